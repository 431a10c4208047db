// The norm of tokens and its product with a router: see token_router.py.
//
// Macros: SIZE, of a token. IS_HALF: 0 or 1.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int TOKENS = 8;                // of a program
constexpr int EXPERTS = 16;              // of a program
constexpr int OWN = SIZE / WARPS;        // columns of a warp in the product
constexpr int STEPS = OWN / 32;          // of 8 columns for each of four lanes
constexpr int CHUNKS = SIZE / 256;       // of 8 columns for each lane, in the norm
constexpr int PITCH = SIZE + 32;         // of normed tokens in shared memory: loads of two meet in no bank
static_assert(OWN % 32 == 0);

struct Shared {
    Narrow normed[TOKENS * PITCH];
    float norm[SIZE];
    float parts[WARPS][EXPERTS * TOKENS];
};

// A warp's token; program 0 of a tile of tokens keeps the sum and what was normed.
__device__ __forceinline__ void norm_token(
    const uint4* x, const uint4* residual, uint4* summed, uint4* normed, float eps, bool keeps, Shared& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4 sums[CHUNKS], added[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) sums[i] = x[i * 32 + lane], added[i] = residual[i * 32 + lane];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        unsigned* pairs = reinterpret_cast<unsigned*>(&sums[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 a = widened(pairs[j]), b = widened(reinterpret_cast<const unsigned*>(&added[i])[j]);
            pairs[j] = packed(a.x + b.x, a.y + b.y);
            const float2 wide = widened(pairs[j]);
            square += wide.x * wide.x + wide.y * wide.y;
        }
        if (keeps) summed[i * 32 + lane] = sums[i];
    }
    const float scale = rsqrtf(warp_sum(square) / SIZE + eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        unsigned* pairs = reinterpret_cast<unsigned*>(&sums[i]);
        const float* factor = s.norm + (i * 32 + lane) * 8;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 wide = widened(pairs[j]);
            pairs[j] = packed(wide.x * scale * factor[2 * j], wide.y * scale * factor[2 * j + 1]);
        }
        if (keeps) normed[i * 32 + lane] = sums[i];
        *reinterpret_cast<uint4*>(s.normed + warp * PITCH + (i * 32 + lane) * 8) = sums[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) route_tokens(
    const Narrow* x, const Narrow* residual, const float* norm, const Narrow* router, Narrow* normed, Narrow* logits,
    Narrow* summed, int num_tokens, int num_experts, int x_stride, int residual_stride, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int num_groups = num_experts / EXPERTS, first_expert = blockIdx.x % num_groups * EXPERTS;
    const int first_token = blockIdx.x / num_groups * TOKENS;
    uint4 upper[STEPS], lower[STEPS];
    const Narrow* rows = router + (first_expert + g) * static_cast<long long>(SIZE) + warp * OWN + q * 8;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        upper[i] = *reinterpret_cast<const uint4*>(rows + i * 32);
        lower[i] = *reinterpret_cast<const uint4*>(rows + 8 * SIZE + i * 32);
    }
    for (int i = threadIdx.x; i < SIZE / 4; i += WARPS * 32)
        reinterpret_cast<float4*>(s.norm)[i] = reinterpret_cast<const float4*>(norm)[i];
    __syncthreads();
    wait_for_previous();
    const long long token = first_token + warp;
    if (token < num_tokens) {
        norm_token(reinterpret_cast<const uint4*>(x + token * x_stride),
            reinterpret_cast<const uint4*>(residual + token * residual_stride),
            reinterpret_cast<uint4*>(summed + token * SIZE), reinterpret_cast<uint4*>(normed + token * SIZE), eps,
            first_expert == 0, s);
    } else {
        for (int i = lane; i < SIZE / 8; i += 32)
            *reinterpret_cast<uint4*>(s.normed + warp * PITCH + i * 8) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint4 v = *reinterpret_cast<const uint4*>(s.normed + g * PITCH + warp * OWN + i * 32 + q * 8);
        multiply_add(c[0], upper[i].x, lower[i].x, upper[i].y, lower[i].y, v.x, v.y);
        multiply_add(c[1], upper[i].z, lower[i].z, upper[i].w, lower[i].w, v.z, v.w);
    }
    float2* mine = reinterpret_cast<float2*>(s.parts[warp]);
    mine[g * 4 + q] = make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    mine[(g + 8) * 4 + q] = make_float2(c[0][2] + c[1][2], c[0][3] + c[1][3]);
    __syncthreads();
    const int expert = threadIdx.x % EXPERTS, place = threadIdx.x / EXPERTS;
    if (place >= TOKENS || first_token + place >= num_tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += s.parts[w][expert * TOKENS + place];
    logits[(first_token + place) * static_cast<long long>(num_experts) + first_expert + expert] = narrowed(sum);
}
