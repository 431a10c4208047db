// A linear layer of one token, with the norm in front and the gated activation behind: see one_token_bulk.py.
//
// Macros: SIZE, columns of the weight. PARTS, warps that share a row. WARPS, that multiply. STAGE, pieces (a
// row's columns for one warp) that arrive together. RING, pieces in shared memory. FLIGHT, stages on their way
// at once. HAS_NORM, HAS_BIAS, IS_HALF: 0 or 1. KIND: of the gated activation, or 0.
#include "one_token.cuh"

constexpr int PIECE = SIZE / PARTS;
constexpr int PIECE_BYTES = PIECE * sizeof(Narrow);
constexpr int CHUNKS = PIECE / 256;  // of 8 columns, for each lane
constexpr int STAGES = RING / STAGE;
constexpr int WEIGHT_ROWS = KIND ? 2 : 1;  // of an output
constexpr int OUTS = STAGE / PARTS / WEIGHT_ROWS;  // of a stage: rows of the gate, then those of up
constexpr int OUTS_BYTES = OUTS * SIZE * sizeof(Narrow);
static_assert(PIECE % 256 == 0 && WARPS % PARTS == 0 && OUTS * WEIGHT_ROWS * PARTS == STAGE);
// A slot of the ring is always the same warp's, which so never takes a turn of its barrier for the one before.
static_assert(RING % STAGE == 0 && RING % WARPS == 0);
static_assert(0 < FLIGHT && FLIGHT < STAGES);

// One thread asks for the rows of `num_outs` outputs; `weight` is the first of them.
__device__ void read_weight(
    const char* weight, long long to_up, int num_outs, unsigned ring, unsigned full, unsigned empty) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    unsigned turn = 0;
    for (int begun = 0; num_outs > 0; turn ^= 1) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES && num_outs > 0; stage++, begun++) {
            if (begun >= STAGES) await(empty + stage * 8, turn ^ 1);
            if (begun >= FLIGHT) {
                const bool is_of_this_turn = stage >= FLIGHT;
                const int earlier = is_of_this_turn ? stage - FLIGHT : stage - FLIGHT + STAGES;
                await(full + earlier * 8, is_of_this_turn ? turn : turn ^ 1);
            }
            const unsigned to = ring + stage * STAGE * PIECE_BYTES, filled = full + stage * 8;
            const unsigned bytes = min(OUTS, num_outs) * SIZE * sizeof(Narrow);
            expect(filled, bytes * WEIGHT_ROWS);
            copy(to, weight, bytes, filled, policy);
            if (KIND) copy(to + OUTS_BYTES, weight + to_up, bytes, filled, policy);
            weight += OUTS_BYTES;
            num_outs -= OUTS;
        }
    }
}

// Bounded as if two programs shared a processor: so attention's registers fit beside one.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) multiply_token(
    const uint4* x, const uint4* residual, const float4* norm, const char* weight, const Narrow* bias, Narrow* y,
    uint4* summed, int num_rows, float eps) {
    extern __shared__ __align__(128) unsigned char ring[];
    uint4* token = reinterpret_cast<uint4*>(ring + RING * PIECE_BYTES);
    unsigned long long* full = reinterpret_cast<unsigned long long*>(token + (HAS_NORM ? SIZE / 8 : 0));
    unsigned long long* empty = full + STAGES;
    float* squares = reinterpret_cast<float*>(empty + STAGES);
    float* sums = squares + WARPS;  // of pieces

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = static_cast<int>(static_cast<long long>(blockIdx.x) * num_rows / gridDim.x);
    const int num_outs = static_cast<int>((blockIdx.x + 1LL) * num_rows / gridDim.x) - first;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(in_shared(full + i), 1);
            init_barrier(in_shared(empty + i), STAGE);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        const long long row_bytes = SIZE * sizeof(Narrow);
        if (lane == 0)
            read_weight(weight + first * row_bytes, num_rows * row_bytes, num_outs, in_shared(ring), in_shared(full),
                in_shared(empty));
        return;
    }

    if (HAS_NORM)
        norm_token(x, residual, norm, summed, eps, token, squares);
    else
        wait_for_previous();
    uint4 own[CHUNKS];  // this lane's columns of the token
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) own[i] = (HAS_NORM ? token : x)[warp % PARTS * (PIECE / 8) + i * 32 + lane];
    const int num_pieces = (num_outs + OUTS - 1) / OUTS * STAGE;
    int slot = warp;
    unsigned turn = 0;
    for (int piece = warp; piece < num_pieces; piece += WARPS) {
        await(in_shared(full + slot / STAGE), turn);
        const float part = multiplied(reinterpret_cast<const uint4*>(ring + slot * PIECE_BYTES) + lane, own);
        __syncwarp();
        if (lane == 0) arrive(in_shared(empty + slot / STAGE));
        const float sum = warp_sum(part);
        if (lane == 0) sums[piece] = sum;
        slot += WARPS;
        if (slot >= RING) slot -= RING, turn ^= 1;
    }
    meet();
    for (int i = threadIdx.x; i < num_outs; i += THREADS) {
        float out[WEIGHT_ROWS];
#pragma unroll
        for (int j = 0; j < WEIGHT_ROWS; j++) {
            out[j] = 0.0f;
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                out[j] += sums[(i / OUTS * WEIGHT_ROWS + j) * OUTS * PARTS + i % OUTS * PARTS + k];
        }
        if (HAS_BIAS) out[0] += static_cast<float>(bias[first + i]);
        // Rounded first, as when the product is stored between the ops.
        if (KIND) out[0] = gated(rounded(out[0]), rounded(out[WEIGHT_ROWS - 1]));
        y[first + i] = narrowed(out[0]);
    }
}
