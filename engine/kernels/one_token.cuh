// What kernels of one token share: bulk copies and their barriers, arithmetic, the norm, a row times the token.
//
// Macros: SIZE, columns of the token. WARPS, that multiply. IS_HALF: 0 or 1. KIND: of the gated activation.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if IS_HALF
using Narrow = __half;
#else
using Narrow = __nv_bfloat16;
#endif

constexpr int THREADS = WARPS * 32;  // that multiply; one warp more asks for the weights

__device__ __forceinline__ unsigned in_shared(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(unsigned barrier, unsigned times = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void await(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void copy(
    unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The kernel in front has ended, and its writes are seen. Only then may the next one begin: it reads, without
// a wait of its own, what was written before this one began.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ float2 widened(unsigned pair) {
#if IS_HALF
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#else
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#endif
}

__device__ __forceinline__ Narrow narrowed(float x) {
#if IS_HALF
    return __float2half_rn(x);
#else
    return __float2bfloat16_rn(x);
#endif
}

__device__ __forceinline__ unsigned packed(float low, float high) {
    const Narrow pair[2] = {narrowed(low), narrowed(high)};
    return *reinterpret_cast<const unsigned*>(pair);
}

__device__ __forceinline__ float rounded(float x) { return widened(packed(x, 0.0f)).x; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ __forceinline__ float gated(float gate, float up) {
    float slope = gate;
    if (KIND == 2) slope = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if (KIND == 3) {
        gate = fminf(gate, 7.0f);
        up = fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f;
        slope = 1.702f * gate;
    }
    return gate / (1.0f + __expf(-slope)) * up;
}

// The token normed together with `residual`, in shared memory; program 0 stores the sum of both.
__device__ __forceinline__ void norm_token(
    const uint4* x, const uint4* residual, const float4* norm, uint4* summed, float eps, uint4* token,
    float* squares) {
    constexpr int TURNS = (SIZE / 8 + THREADS - 1) / THREADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 factors[TURNS][2];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        if (i < SIZE / 8) factors[turn][0] = norm[2 * i], factors[turn][1] = norm[2 * i + 1];
    }
    wait_for_previous();
    uint4 sums[TURNS];
    float square = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        if (i >= SIZE / 8) continue;
        sums[turn] = x[i];
        const uint4 added = residual[i];
        unsigned* pairs = reinterpret_cast<unsigned*>(&sums[turn]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 a = widened(pairs[j]), b = widened(reinterpret_cast<const unsigned*>(&added)[j]);
            pairs[j] = packed(a.x + b.x, a.y + b.y);
            const float2 wide = widened(pairs[j]);
            square += wide.x * wide.x + wide.y * wide.y;
        }
        if (blockIdx.x == 0) summed[i] = sums[turn];
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    meet();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += squares[i];
    const float scale = rsqrtf(total / SIZE + eps);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        if (i >= SIZE / 8) continue;
        unsigned* pairs = reinterpret_cast<unsigned*>(&sums[turn]);
        const float* factor = reinterpret_cast<const float*>(factors[turn]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 wide = widened(pairs[j]);
            pairs[j] = packed(wide.x * scale * factor[2 * j], wide.y * scale * factor[2 * j + 1]);
        }
        token[i] = sums[turn];
    }
    meet();
}

// This lane's part of a row, or of a piece of one, times that of the token.
template <int CHUNKS>
__device__ __forceinline__ float multiplied(const uint4* piece, const uint4 (&own)[CHUNKS]) {
    uint4 held[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) held[i] = piece[i * 32];
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 weight = widened(reinterpret_cast<const unsigned*>(&held[i])[j]);
            const float2 factor = widened(reinterpret_cast<const unsigned*>(&own[i])[j]);
            even = fmaf(weight.x, factor.x, even);
            odd = fmaf(weight.y, factor.y, odd);
        }
    }
    return even + odd;
}
