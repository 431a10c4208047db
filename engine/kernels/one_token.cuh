// What kernels of one token share: the norm, a row times the token.
//
// Macros: SIZE, columns of the token. WARPS, that multiply. And those of common.cuh.
#pragma once
#include "common.cuh"

constexpr int THREADS = WARPS * 32;  // that multiply; one warp more asks for the weights

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

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
