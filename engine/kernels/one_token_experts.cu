// A mixture of experts of one token, with the norm and the router in front, in one launch: see one_token_experts.py.
//
// Macros: SIZE, columns of the token. INNER, of an expert's inside. EXPERTS, NUM_PICKED. WARPS, that multiply.
// PAIRS, rows of the gate and as many of up that arrive together. ROWS, of down that do. SLOTS, stages in shared
// memory. FLIGHT, stages on their way at once. MOST_PAIRS, MOST_ROWS, of a program. HAS_BIAS (of the router),
// IS_NORMALIZED, IS_HALF: 0 or 1. KIND: of the gated activation.
//
// Programs hand values to each other as words: 16 bits of the value, and below them the epoch, which each launch
// has another of. A word of this epoch is there; so nothing is counted, fenced or reset.
#include "one_token.cuh"

constexpr long long ROW_BYTES = SIZE * sizeof(Narrow), DOWN_BYTES = INNER * sizeof(Narrow);
constexpr int STAGE_BYTES = PAIRS * 2 * ROW_BYTES;
constexpr int LOGITS = 4, INSIDES = LOGITS + EXPERTS;  // among what is handed over, behind the epoch
static_assert(SIZE % 256 == 0 && INNER % 256 == 0 && EXPERTS % 32 == 0 && NUM_PICKED <= 32);
static_assert(ROWS * DOWN_BYTES <= STAGE_BYTES && PAIRS <= INNER && 0 < FLIGHT && FLIGHT < SLOTS);

__device__ __forceinline__ void hand_over(unsigned* to, float value, unsigned epoch) {
    const unsigned word = packed(0.0f, value) | epoch;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Four words, and whether all of them are of this epoch.
__device__ __forceinline__ bool take(uint4& words, const unsigned* from, unsigned epoch) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return (((words.x ^ epoch) | (words.y ^ epoch) | (words.z ^ epoch) | (words.w ^ epoch)) & 0xffffu) == 0;
}

__device__ __forceinline__ unsigned epoch_of(const unsigned* from) {
    unsigned epoch;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(epoch) : "l"(from) : "memory");
    return epoch & 0xffffu;
}

// One warp: the experts of the largest logits, the first of equal ones first; all logits into `scores`.
__device__ void pick_experts(const unsigned* logits, unsigned epoch, float* scores, int* picks) {
    const int lane = threadIdx.x % 32;
    uint4 taken = {};
    bool are_there = lane >= EXPERTS / 4;
    do {
        if (!are_there) are_there = take(taken, logits + lane * 4, epoch);
    } while (!__all_sync(~0u, are_there));
    const unsigned words[4] = {taken.x, taken.y, taken.z, taken.w};
    unsigned keys[4] = {};  // order as the logits, then as the experts backwards
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (lane >= EXPERTS / 4) continue;
        scores[lane * 4 + i] = widened(words[i]).y;
        const unsigned bits = words[i] >> 16 == 0x8000u ? 0 : words[i] >> 16;
        keys[i] = (bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u) << 16 | (0xffffu - (lane * 4 + i));
    }
#pragma unroll
    for (int pick = 0; pick < NUM_PICKED; pick++) {
        const unsigned best = __reduce_max_sync(~0u, max(max(keys[0], keys[1]), max(keys[2], keys[3])));
#pragma unroll
        for (int i = 0; i < 4; i++) keys[i] = keys[i] == best ? 0 : keys[i];
        if (lane == 0) picks[pick] = 0xffffu - (best & 0xffffu);
    }
    __syncwarp();
}

// The weight of the lane's pick.
__device__ __forceinline__ float pick_weight(const float* scores, const int* picks) {
    const int lane = threadIdx.x % 32;
    const float largest = scores[picks[0]];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < EXPERTS / 32; i++) total += expf(scores[i * 32 + lane] - largest);
    total = warp_sum(total);
    float weight = lane < NUM_PICKED ? expf(scores[picks[lane]] - largest) / total : 0.0f;
    if (IS_NORMALIZED) weight /= warp_sum(weight);
    return weight;
}

// The sums over the warp of eight values of each lane: that of value lane / 4.
__device__ __forceinline__ float warp_sums(float (&values)[8]) {
#pragma unroll
    for (int half = 4; half; half /= 2) {
        const bool is_upper = threadIdx.x & half * 4;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float sent = is_upper ? values[i] : values[i + half];
            values[i] = (is_upper ? values[i + half] : values[i]) + __shfl_xor_sync(~0u, sent, half * 4);
        }
    }
    const float sum = values[0] + __shfl_xor_sync(~0u, values[0], 2);
    return sum + __shfl_xor_sync(~0u, sum, 1);
}

// This lane's columns of a pick's inside, when they are there.
__device__ __forceinline__ void take_inside(uint4 (&own)[INNER / 256], const unsigned* inside, unsigned epoch) {
    uint4 words[INNER / 256][2];
    bool are_there[INNER / 256][2] = {}, all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < INNER / 256; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const unsigned* from = inside + (i * 32 + threadIdx.x % 32) * 8 + j * 4;
                if (!are_there[i][j]) are_there[i][j] = take(words[i][j], from, epoch);
                all &= are_there[i][j];
            }
        }
    } while (!__all_sync(~0u, all));
#pragma unroll
    for (int i = 0; i < INNER / 256; i++) {
        const uint4 low = words[i][0], high = words[i][1];
        own[i] = make_uint4(
            __byte_perm(low.x, low.y, 0x7632), __byte_perm(low.z, low.w, 0x7632),
            __byte_perm(high.x, high.y, 0x7632), __byte_perm(high.z, high.w, 0x7632));
    }
}

// A program's part: pairs of rows of the gate and up, of all picks in a row, and rows of down, the same of each pick.
struct Part {
    int first_pair, num_pairs, first_row, num_rows;
    __device__ Part() {
        const int program = blockIdx.x, programs = gridDim.x;
        first_pair = program * (NUM_PICKED * INNER) / programs;
        num_pairs = (program + 1) * (NUM_PICKED * INNER) / programs - first_pair;
        first_row = program * SIZE / programs;
        num_rows = (program + 1) * SIZE / programs - first_row;
    }
    __device__ int pair_stages() const { return (num_pairs + PAIRS - 1) / PAIRS; }
};

// One thread asks for all rows of the program.
struct Reader {
    unsigned ring, full, empty;
    unsigned long long policy;
    int stage = 0;

    // The slot of the next stage, free, with `bytes` expected.
    __device__ __forceinline__ int begin(unsigned bytes) {
        const int slot = stage % SLOTS;
        if (stage >= SLOTS) await(empty + slot * 8, (stage / SLOTS + 1) & 1);
        if (stage >= FLIGHT) await(full + (stage - FLIGHT) % SLOTS * 8, (stage - FLIGHT) / SLOTS & 1);
        expect(full + slot * 8, bytes);
        stage++;
        return slot;
    }

    __device__ void read_pairs(const char* gate_up, const int* picks, const Part& part) {
#pragma unroll 1
        for (int done = 0; done < part.num_pairs; done += PAIRS) {
            const int pairs = min(PAIRS, part.num_pairs - done), first = part.first_pair + done;
            const int pick = first / INNER, row = first % INNER, here = min(pairs, INNER - row);
            const int slot = begin(pairs * 2 * ROW_BYTES);
            const unsigned to = ring + slot * STAGE_BYTES, filled = full + slot * 8;
            const char* gate = gate_up + (picks[pick] * 2LL * INNER + row) * ROW_BYTES;
            copy(to, gate, here * ROW_BYTES, filled, policy);
            copy(to + PAIRS * ROW_BYTES, gate + INNER * ROW_BYTES, here * ROW_BYTES, filled, policy);
            if (here == pairs) continue;
            const unsigned rest = to + here * ROW_BYTES, bytes = (pairs - here) * ROW_BYTES;
            gate = gate_up + picks[pick + 1] * 2LL * INNER * ROW_BYTES;
            copy(rest, gate, bytes, filled, policy);
            copy(rest + PAIRS * ROW_BYTES, gate + INNER * ROW_BYTES, bytes, filled, policy);
        }
    }

    __device__ void read_down(const char* down, const int* picks, const Part& part) {
#pragma unroll 1
        for (int pick = 0; pick < NUM_PICKED; pick++) {
            const char* rows = down + (picks[pick] * static_cast<long long>(SIZE) + part.first_row) * DOWN_BYTES;
#pragma unroll 1
            for (int row = 0; row < part.num_rows; row += ROWS) {
                const unsigned bytes = min(ROWS, part.num_rows - row) * DOWN_BYTES;
                const int slot = begin(bytes);
                copy(ring + slot * STAGE_BYTES, rows + row * DOWN_BYTES, bytes, full + slot * 8, policy);
            }
        }
    }
};

// The token normed together with `residual`, into shared memory; in `products` each warp's part of the logit.
__device__ __forceinline__ void norm_router(
    const uint4* x, const uint4* residual, const float4* norm, const uint4* router, uint4* summed, float eps,
    uint4* token, float* squares, float* products) {
    constexpr int TURNS = (SIZE / 8 + THREADS - 1) / THREADS;
    uint4 row[TURNS][1];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        if (i < SIZE / 8) row[turn][0] = router[min(blockIdx.x, EXPERTS - 1) * (SIZE / 8) + i];
    }
    norm_token(x, residual, norm, summed, eps, token, squares);
    float product = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        if (i < SIZE / 8) product += multiplied(token + i, row[turn]);
    }
    product = warp_sum(product);
    if (threadIdx.x % 32 == 0) products[threadIdx.x / 32] = product;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) mix_token(
    const uint4* x, const uint4* residual, const float4* norm, const uint4* router, const Narrow* bias,
    const char* gate_up, const char* down, Narrow* y, uint4* summed, unsigned* words, float eps) {
    extern __shared__ __align__(128) unsigned char ring[];
    uint4* token = reinterpret_cast<uint4*>(ring + SLOTS * STAGE_BYTES);
    unsigned long long* full = reinterpret_cast<unsigned long long*>(token + SIZE / 8);
    unsigned long long* empty = full + SLOTS;
    float* squares = reinterpret_cast<float*>(empty + SLOTS);
    float* products = squares + WARPS;
    float* scores = products + WARPS;
    int* picks = reinterpret_cast<int*>(scores + EXPERTS);
    unsigned* epoch_here = reinterpret_cast<unsigned*>(picks + NUM_PICKED);
    float* sums = reinterpret_cast<float*>(epoch_here + 1);  // of rows of the gate and up
    float* outs = sums + MOST_PAIRS * 2;  // of rows of down, for each pick

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Part part;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < SLOTS; i++) {
            init_barrier(in_shared(full + i), 1);
            init_barrier(in_shared(empty + i), WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const unsigned epoch = epoch_of(words);
        asm volatile("bar.sync 2, %0;" ::"n"(THREADS + 32) : "memory");  // `products` are there
        if (lane == 0) {
            *epoch_here = epoch;
            float logit = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) logit += products[i];
            if (HAS_BIAS && blockIdx.x < EXPERTS) logit += static_cast<float>(bias[blockIdx.x]);
            if (blockIdx.x < EXPERTS) hand_over(words + LOGITS + blockIdx.x, logit, epoch);
        }
        __syncwarp();
        pick_experts(words + LOGITS, epoch, scores, picks);
        asm volatile("bar.arrive 3, %0;" ::"n"(THREADS + 32) : "memory");
        if (lane == 0) {
            Reader reader{in_shared(ring), in_shared(full), in_shared(empty)};
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(reader.policy));
            reader.read_pairs(gate_up, picks, part);
            reader.read_down(down, picks, part);
        }
        return;
    }

    norm_router(x, residual, norm, router, summed, eps, token, squares, products);
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS + 32) : "memory");
    int stage = 0;
    {
        uint4 own[SIZE / 256];  // this lane's columns of the token
#pragma unroll
        for (int i = 0; i < SIZE / 256; i++) own[i] = token[i * 32 + lane];
#pragma unroll 1
        for (; stage < part.pair_stages(); stage++) {
            const int slot = stage % SLOTS;
            await(in_shared(full + slot), stage / SLOTS & 1);
#pragma unroll 1
            for (int i = (warp + stage * (4 * WARPS - 2 * PAIRS)) % WARPS; i < 2 * PAIRS; i += WARPS) {
                const float sum = warp_sum(multiplied(
                    reinterpret_cast<const uint4*>(ring + slot * STAGE_BYTES + i * ROW_BYTES) + lane, own));
                if (lane == 0) sums[stage * 2 * PAIRS + i] = sum;
            }
            __syncwarp();
            if (lane == 0) arrive(in_shared(empty + slot));
        }
    }
    // All sums are there, and the picks, long since.
    asm volatile("bar.sync 3, %0;" ::"n"(THREADS + 32) : "memory");
    const unsigned epoch = *epoch_here;
    for (int i = threadIdx.x; i < part.num_pairs; i += THREADS) {
        const float* gate = sums + i / PAIRS * 2 * PAIRS + i % PAIRS;
        // Rounded first, as when the product is stored between the ops.
        hand_over(words + INSIDES + part.first_pair + i, gated(rounded(gate[0]), rounded(gate[PAIRS])), epoch);
    }
    const float weights = pick_weight(scores, picks);
    const int num_parts = (part.num_rows + ROWS - 1) / ROWS;
#pragma unroll 1
    for (int unit = 0; unit < NUM_PICKED * num_parts; unit++, stage++) {
        const int slot = stage % SLOTS;
        // A slot is always the same warp's, which so never takes a turn of its barrier for the one before.
        if (slot % WARPS != warp) continue;
        const int pick = unit / num_parts, first = unit % num_parts * ROWS, rows = min(ROWS, part.num_rows - first);
        uint4 own[INNER / 256];  // this lane's columns of the pick's inside
        take_inside(own, words + INSIDES + pick * INNER, epoch);
        const float weight = __shfl_sync(~0u, weights, pick);
        await(in_shared(full + slot), stage / SLOTS & 1);
        const uint4* down_rows = reinterpret_cast<const uint4*>(ring + slot * STAGE_BYTES) + lane;
#pragma unroll 1
        for (int row = 0; row < rows; row += 8) {
            float parts[8];
#pragma unroll
            for (int i = 0; i < 8; i++) parts[i] = multiplied(down_rows + min(row + i, rows - 1) * (INNER / 8), own);
            const float out = rounded(warp_sums(parts)) * weight;
            if (lane % 4 == 0 && row + lane / 4 < rows) outs[pick * MOST_ROWS + first + row + lane / 4] = out;
        }
        __syncwarp();
        if (lane == 0) arrive(in_shared(empty + slot), WARPS);
    }
    meet();
    for (int row = threadIdx.x; row < part.num_rows; row += THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int pick = 0; pick < NUM_PICKED; pick++) total += outs[pick * MOST_ROWS + row];
        y[part.first_row + row] = narrowed(total);
    }
    // The next launch's; all programs know this one's, since they have handed something over.
    if (blockIdx.x == 0 && threadIdx.x == 0) words[0] = epoch + 1;
}
