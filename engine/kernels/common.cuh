// What kernels share: bulk copies and their barriers, overlapping launches, arithmetic.
//
// Macros: IS_HALF: 0 or 1. KIND: of the gated activation, where there is one.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if IS_HALF
#define NARROW "f16"
using Narrow = __half;
#else
#define NARROW "bf16"
using Narrow = __nv_bfloat16;
#endif

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

// c + a b on tensor cores: rows g and g + 8 of a, g = lane / 4; column g of b; columns 2 (lane % 4) and the next of c.
__device__ __forceinline__ void multiply_add(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." NARROW "." NARROW ".f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#ifdef KIND
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
#endif
