// The picks of a router and the experts of up to MOST_TOKENS tokens: see bulk_experts.py.
//
// Macros: SIZE, of a token. INNER, of an expert. EXPERTS. PICKED, of a token. MOST_TOKENS. ARE_PICKED: tokens come
// with their picks, not with logits. IS_NORMALIZED, the weights of picks. TILES, of 8 tokens, of an expert at once.
// Of GATE_UP and DOWN each: _PARTS, warps that share a row; _SLOTS, of the ring, for a unit of 16 rows; _RING, slots
// in shared memory; _FLIGHT, slots on their way at once; _BYTES, shared memory of a launch. KIND: of the gated
// activation. IS_HALF: 0 or 1.
#include "common.cuh"

constexpr int WARPS = 8;  // that multiply; one more asks for the weights
constexpr int THREADS = WARPS * 32;
constexpr int ALL_THREADS = THREADS + 32;
constexpr int TOKENS = 8 * TILES;
constexpr int WORDS = (MOST_TOKENS + 31) / 32;
constexpr int MOST_PAIRS = MOST_TOKENS * PICKED;
constexpr int MOST_TILES = EXPERTS + MOST_PAIRS / TOKENS;
constexpr int LANE_EXPERTS = EXPERTS / 32;

// A product with the weights of experts, in units of 16 of their rows. Rows of gate and up, whose outputs meet,
// are in one unit, and in one slot of the ring.
template <int SIZE_, int ROWS_, int PARTS_, bool IS_GATED_, int SLOTS_, int RING_, int FLIGHT_>
struct Product {
    static constexpr bool IS_GATED = IS_GATED_;
    static constexpr int ROWS = ROWS_;    // of an expert
    static constexpr int PARTS = PARTS_;  // warps that share a row
    static constexpr int SLOTS = SLOTS_;  // of a unit, side by side
    static constexpr int RING = RING_;
    static constexpr int FLIGHT = FLIGHT_;
    static constexpr int OWN_BYTES = SIZE_ / PARTS * sizeof(Narrow);
    static constexpr int STEPS = OWN_BYTES / 64;    // of 8 columns for each of four lanes
    static constexpr int GROUPS = WARPS / PARTS;    // of warps, each with units of its own
    static constexpr int OUTS = IS_GATED ? 8 : 16;  // of a unit
    static constexpr int Y_SIZE = IS_GATED ? ROWS / 2 : ROWS;
    static constexpr int UNITS = ROWS / 16;         // of an expert
    static constexpr int ROW_BYTES = SIZE_ * sizeof(Narrow);
    static constexpr int SLOT_BYTES = 16 / SLOTS * ROW_BYTES;
    static_assert(SIZE_ % (PARTS * 64) == 0 && ROWS % 32 == 0 && WARPS % PARTS == 0 && 8 % SLOTS == 0);
    // A slot is always the same group's, which so never takes a turn of its barrier for the one before.
    static_assert(RING % (SLOTS * GROUPS) == 0 && 0 < FLIGHT && FLIGHT < RING);
};
using GateUp = Product<SIZE, 2 * INNER, GATE_UP_PARTS, true, GATE_UP_SLOTS, GATE_UP_RING, GATE_UP_FLIGHT>;
using Down = Product<INNER, SIZE, DOWN_PARTS, false, DOWN_SLOTS, DOWN_RING, DOWN_FLIGHT>;

struct Tile {
    unsigned short expert, first, count;  // `count` pairs from place `first` in the order on
};

struct Lists {
    unsigned masks[EXPERTS * WORDS];  // an expert's tokens
    Tile tiles[MOST_TILES];
    unsigned short firsts[EXPERTS];    // places in the order
    unsigned short order[MOST_PAIRS];  // pairs (token * PICKED + pick) by expert
    unsigned short picks[MOST_PAIRS];  // experts of pairs
    int num_tiles;
};

template <class P>
struct Shared {
    unsigned char ring[P::RING * P::SLOT_BYTES];
    float parts[WARPS * 16 * TOKENS];  // of sums: parts of a group, 8 tokens, 16 rows, tokens
    unsigned long long full[P::RING], empty[P::RING];
    Lists lists;
};
static_assert(sizeof(Shared<GateUp>) <= GATE_UP_BYTES && sizeof(Shared<Down>) <= DOWN_BYTES);

__device__ __forceinline__ void meet(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }

// In this order: else all loads of a unit are hoisted, and registers spill.
__device__ __forceinline__ uint4 loaded(unsigned from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

// Larger logits have larger keys; of equal ones the first expert has.
__device__ __forceinline__ unsigned key_of(unsigned bits, int expert) {
    const unsigned ordered = bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
    return ordered << 16 | (0xffff - expert);
}

__device__ __forceinline__ int expert_of(unsigned key) { return 0xffff - (key & 0xffff); }

__device__ __forceinline__ float logit_of(unsigned key) {
    const unsigned ordered = key >> 16;
    const unsigned short bits = ordered & 0x8000 ? ordered & 0x7fff : ~ordered & 0xffff;
    return static_cast<float>(*reinterpret_cast<const Narrow*>(&bits));
}

__device__ __forceinline__ void mark(int expert, int token, Lists& lists) {
    atomicOr(&lists.masks[expert * WORDS + token / 32], 1u << token % 32);
}

// The picks of some tokens of a warp from the bits of their logits, together: each by itself would wait for every
// pick. The largest come first. With `weights`, those of tokens that are this program's to keep.
template <int N>
__device__ __forceinline__ void pick_some(
    const unsigned (&bits)[N][LANE_EXPERTS], int first, int step, int num_tokens, float* weights, Lists& lists) {
    const int lane = threadIdx.x % 32;
    unsigned left[N][LANE_EXPERTS], largest[N], own[N] = {};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) left[n][i] = key_of(bits[n][i], lane + i * 32);
#pragma unroll
    for (int pick = 0; pick < PICKED; pick++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned best = 0;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) best = max(best, left[n][i]);
            best = __reduce_max_sync(~0u, best);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) left[n][i] = left[n][i] == best ? 0 : left[n][i];
            if (pick == 0) largest[n] = best;
            if (pick == lane) own[n] = best;
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int token = first + n * step;
        if (token >= num_tokens) return;
        if (lane < PICKED) {
            const int expert = expert_of(own[n]);
            lists.picks[token * PICKED + lane] = expert;
            mark(expert, token, lists);
        }
        if (weights == nullptr || token % gridDim.x != blockIdx.x) continue;
        const float weight = lane < PICKED ? expf(logit_of(own[n]) - logit_of(largest[n])) : 0.0f;
        float total = weight;
        if (!IS_NORMALIZED) {
            total = 0.0f;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++)
                total += expf(logit_of(key_of(bits[n][i], 0)) - logit_of(largest[n]));
        }
        total = warp_sum(total);
        if (lane < PICKED) weights[token * PICKED + lane] = weight / total;
    }
}

// The picks of all tokens from their logits, by every program for itself; or as they are given.
__device__ __forceinline__ void pick(const void* routing, int num_tokens, float* weights, Lists& lists) {
#if ARE_PICKED
    const long long* given = static_cast<const long long*>(routing);
    for (int pair = threadIdx.x; pair < num_tokens * PICKED; pair += ALL_THREADS) {
        const int expert = static_cast<int>(given[pair]);
        lists.picks[pair] = expert;
        mark(expert, pair / PICKED, lists);
    }
#else
    constexpr int ALL_WARPS = WARPS + 1;
    constexpr int N = (MOST_TOKENS + ALL_WARPS - 1) / ALL_WARPS;
    const unsigned short* logits = static_cast<const unsigned short*>(routing);
    const int first = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned bits[N][LANE_EXPERTS];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int token = first + n * ALL_WARPS;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++)
            bits[n][i] = token < num_tokens ? logits[token * EXPERTS + lane + i * 32] : 0;
    }
    pick_some<N>(bits, first, ALL_WARPS, num_tokens, weights, lists);
#endif
}

// Tiles of one expert each, by a warp: a lane has experts side by side.
__device__ void list_tiles(Lists& lists) {
    int counts[LANE_EXPERTS], pairs = 0, tiles = 0;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
        counts[i] = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) counts[i] += __popc(lists.masks[(threadIdx.x * LANE_EXPERTS + i) * WORDS + w]);
        pairs += counts[i];
        tiles += (counts[i] + TOKENS - 1) / TOKENS;
    }
    int both = tiles << 16 | pairs;  // of this lane and those before
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, both, lanes);
        if (threadIdx.x >= lanes) both += before;
    }
    if (threadIdx.x == 31) lists.num_tiles = both >> 16;
    int first = (both & 0xffff) - pairs, tile = (both >> 16) - tiles;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
        const int expert = threadIdx.x * LANE_EXPERTS + i;
        lists.firsts[expert] = first;
        for (int done = 0; done < counts[i]; done += TOKENS) {
            Tile& entry = lists.tiles[tile++];
            entry.expert = expert, entry.first = first + done, entry.count = min(TOKENS, counts[i] - done);
        }
        first += counts[i];
    }
}

// Pairs in the order of their experts, those of an expert in the order of tokens.
__device__ void list_pairs(int num_tokens, Lists& lists) {
    for (int pair = threadIdx.x; pair < num_tokens * PICKED; pair += ALL_THREADS) {
        const int token = pair / PICKED, expert = lists.picks[pair];
        const unsigned* masks = lists.masks + expert * WORDS;
        int place = lists.firsts[expert] + __popc(masks[token / 32] & ((1u << token % 32) - 1));
        for (int w = 0; w < token / 32; w++) place += __popc(masks[w]);
        lists.order[place] = pair;
    }
}

// What every program begins with. Nothing before waits for the kernel in front.
template <class P>
__device__ __forceinline__ void begin(Shared<P>& s) {
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < P::RING; i++)
            init_barrier(in_shared(s.full + i), 1), init_barrier(in_shared(s.empty + i), P::PARTS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    for (int i = threadIdx.x; i < EXPERTS * WORDS; i += ALL_THREADS) s.lists.masks[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void make_lists(const void* routing, int num_tokens, float* weights, Lists& lists) {
    pick(routing, num_tokens, weights, lists);
    __syncthreads();
    if (threadIdx.x < 32) list_tiles(lists);
    __syncthreads();
    list_pairs(num_tokens, lists);
    __syncthreads();
}

template <class P>
struct Turn {  // of the ring
    int slot = 0, begun = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance(int slots) {
        begun += slots, slot += slots;
        if (slot == P::RING) slot = 0, parity ^= 1;
    }
};

// Where a program's share of the units of all tiles, one after the other, begins.
template <class P>
__device__ __forceinline__ int first_unit(int program, const Shared<P>& s) {
    return static_cast<int>(static_cast<long long>(program) * s.lists.num_tiles * P::UNITS / gridDim.x);
}

// One thread asks for the rows of this program's share.
template <class P>
__device__ __forceinline__ void read_weights(const char* weights, Shared<P>& s) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const unsigned ring = in_shared(s.ring), full = in_shared(s.full), empty = in_shared(s.empty);
    const int last = first_unit<P>(blockIdx.x + 1, s);
    Turn<P> turn;
#pragma unroll 1
    for (int unit = first_unit<P>(blockIdx.x, s); unit < last; unit++) {
        const long long expert = s.lists.tiles[unit / P::UNITS].expert;
        const char* from = weights + (expert * P::ROWS + unit % P::UNITS * P::OUTS) * P::ROW_BYTES;
#pragma unroll 1
        for (int i = 0; i < P::SLOTS; i++) {
            if (turn.begun >= P::RING) await(empty + turn.slot * 8, turn.parity ^ 1);
            if (turn.begun >= P::FLIGHT) {
                const bool is_of_this_turn = turn.slot >= P::FLIGHT;
                const int earlier = is_of_this_turn ? turn.slot - P::FLIGHT : turn.slot - P::FLIGHT + P::RING;
                await(full + earlier * 8, is_of_this_turn ? turn.parity : turn.parity ^ 1);
            }
            const unsigned to = ring + turn.slot * P::SLOT_BYTES, filled = full + turn.slot * 8;
            expect(filled, P::SLOT_BYTES);
            if (P::IS_GATED) {
                constexpr int HALF = P::SLOT_BYTES / 2;
                copy(to, from + i * HALF, HALF, filled, policy);
                copy(to + HALF, from + P::ROWS / 2LL * P::ROW_BYTES + i * HALF, HALF, filled, policy);
            } else {
                copy(to, from + i * P::SLOT_BYTES, P::SLOT_BYTES, filled, policy);
            }
            turn.advance(1);
        }
    }
}

// A warp's columns of a unit times those of 8 * N tokens: into `sums` as 8 tokens, 16 rows, tokens.
template <class P, int N>
__device__ __forceinline__ void multiply_unit(
    unsigned upper, unsigned lower, const uint4 (&own)[TILES][P::STEPS], float* sums, int barrier) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float c[N][2][4] = {};
    // Rows begin in the same bank: every second one reads the halves of 128 bytes in the other order.
    const bool is_odd = g & 1;
    const unsigned near = is_odd ? 64 : 0, far = 64 - near;
#pragma unroll
    for (int i = 0; i < P::STEPS; i += 2) {
        const uint4 a = loaded(upper + i * 64 + near), b = loaded(upper + i * 64 + far);
        const uint4 d = loaded(lower + i * 64 + near), e = loaded(lower + i * 64 + far);
        const uint4 u0 = is_odd ? b : a, u1 = is_odd ? a : b, l0 = is_odd ? e : d, l1 = is_odd ? d : e;
#pragma unroll
        for (int n = 0; n < N; n++) {
            multiply_add(c[n][0], u0.x, l0.x, u0.y, l0.y, own[n][i].x, own[n][i].y);
            multiply_add(c[n][1], u0.z, l0.z, u0.w, l0.w, own[n][i].z, own[n][i].w);
            multiply_add(c[n][0], u1.x, l1.x, u1.y, l1.y, own[n][i + 1].x, own[n][i + 1].y);
            multiply_add(c[n][1], u1.z, l1.z, u1.w, l1.w, own[n][i + 1].z, own[n][i + 1].w);
        }
    }
    meet(barrier, P::PARTS * 32);  // the sums of the unit in front have been taken
#pragma unroll
    for (int n = 0; n < N; n++) {
        float* to = sums + n * 128 + g * 8 + 2 * q;
        *reinterpret_cast<float2*>(to) = make_float2(c[n][0][0] + c[n][1][0], c[n][0][1] + c[n][1][1]);
        *reinterpret_cast<float2*>(to + 64) = make_float2(c[n][0][2] + c[n][1][2], c[n][0][3] + c[n][1][3]);
    }
}

// The outputs of a unit from what the warps of a group have; pairs' rows of y.
template <class P>
__device__ __forceinline__ void store_unit(
    int unit, const Tile& tile, const float* sums, Narrow* y, const Lists& lists) {
    constexpr int GROUP_THREADS = P::PARTS * 32;
    for (int i = threadIdx.x % GROUP_THREADS; i < P::OUTS * tile.count; i += GROUP_THREADS) {
        const int row = i % P::OUTS, place = i / P::OUTS;
        const float* from = sums + place / 8 * 128 + row * 8 + place % 8;
        float sum = 0.0f, up = 0.0f;
#pragma unroll
        for (int part = 0; part < P::PARTS; part++) {
            sum += from[part * 16 * TOKENS];
            if (P::IS_GATED) up += from[part * 16 * TOKENS + 64];
        }
        // Rounded first, as when the product is stored between the ops.
        if (P::IS_GATED) sum = gated(rounded(sum), rounded(up));
        const long long pair = lists.order[tile.first + place];
        y[pair * P::Y_SIZE + unit % P::UNITS * P::OUTS + row] = narrowed(sum);
    }
}

// This lane's columns of a tile's tokens.
template <class P>
__device__ __forceinline__ void hold_tokens(
    const Tile& tile, const char* rows, long long row_bytes, int part, uint4 (&own)[TILES][P::STEPS],
    const Lists& lists) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const bool is_token = n * 8 + g < tile.count;
        const int pair = is_token ? lists.order[tile.first + n * 8 + g] : 0;
        const char* from = rows + (P::IS_GATED ? pair / PICKED : pair) * row_bytes + part * P::OWN_BYTES + q * 16;
#pragma unroll
        for (int i = 0; i < P::STEPS; i++)
            own[n][i] = is_token ? __ldcg(reinterpret_cast<const uint4*>(from + i * 64)) : make_uint4(0, 0, 0, 0);
    }
}

// This program's share of a product. `rows`: of tokens, for gate and up, or of pairs.
template <class P>
__device__ __forceinline__ void multiply(const char* rows, long long row_bytes, Narrow* y, Shared<P>& s) {
    const int warp = threadIdx.x / 32, group = warp / P::PARTS, part = warp % P::PARTS;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, barrier = 1 + group;
    float* sums = s.parts + group * P::PARTS * 16 * TOKENS;
    // A lane's rows g and g + 8 of a unit, in its slots: of gate and up, the same of both; else side by side.
    constexpr int SLOT_ROWS = (P::IS_GATED ? 8 : 16) / P::SLOTS;
    const int upper_row = g, lower_row = P::IS_GATED ? g : g + 8;
    const unsigned in_part = in_shared(s.ring) + part * P::OWN_BYTES + q * 16;
    const unsigned upper =
        in_part + upper_row / SLOT_ROWS * P::SLOT_BYTES + upper_row % SLOT_ROWS * P::ROW_BYTES;
    const unsigned lower = in_part + lower_row / SLOT_ROWS * P::SLOT_BYTES +
                           lower_row % SLOT_ROWS * P::ROW_BYTES + (P::IS_GATED ? P::SLOT_BYTES / 2 : 0);
    const int last = first_unit<P>(blockIdx.x + 1, s);
    uint4 own[TILES][P::STEPS];
    Tile tile;
    int held = -1;
    Turn<P> turn;
#pragma unroll 1
    for (int unit = first_unit<P>(blockIdx.x, s); unit < last; unit++, turn.advance(P::SLOTS)) {
        if (turn.slot / P::SLOTS % P::GROUPS != group) continue;
        if (unit / P::UNITS != held) {
            held = unit / P::UNITS;
            tile = s.lists.tiles[held];
            hold_tokens<P>(tile, rows, row_bytes, part, own, s.lists);
        }
        for (int i = 0; i < P::SLOTS; i++) await(in_shared(s.full + turn.slot + i), turn.parity);
        __syncwarp();
        const unsigned in_ring = turn.slot * P::SLOT_BYTES;
        float* own_sums = sums + part * 16 * TOKENS;
        if (TILES == 1 || tile.count <= 8)
            multiply_unit<P, 1>(upper + in_ring, lower + in_ring, own, own_sums, barrier);
        else
            multiply_unit<P, TILES>(upper + in_ring, lower + in_ring, own, own_sums, barrier);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            for (int i = 0; i < P::SLOTS; i++) arrive(in_shared(s.empty + turn.slot + i));
        meet(barrier, P::PARTS * 32);
        store_unit<P>(unit, tile, sums, y, s.lists);
    }
}

extern __shared__ __align__(128) unsigned char memory[];

// inner (pairs, INNER) from x and logits or picks; of logits, the weights (tokens, PICKED), too.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) mix_gate_up(
    const char* x, const void* routing, const char* gate_up, float* weights, Narrow* inner, int num_tokens,
    int x_stride) {
    Shared<GateUp>& s = *reinterpret_cast<Shared<GateUp>*>(memory);
    begin(s);
    wait_for_previous();
    make_lists(routing, num_tokens, weights, s.lists);
    if (threadIdx.x < THREADS)
        multiply<GateUp>(x, x_stride * static_cast<long long>(sizeof(Narrow)), inner, s);
    else if (threadIdx.x == THREADS)
        read_weights<GateUp>(gate_up, s);
}

// outs (pairs, SIZE) from inner. Lists are made again, and the first weights asked for, while the kernel in front
// still multiplies: logits or picks were there when it began.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) mix_down(
    const char* inner, const void* routing, const char* down, Narrow* outs, int num_tokens) {
    Shared<Down>& s = *reinterpret_cast<Shared<Down>*>(memory);
    begin(s);
    make_lists(routing, num_tokens, nullptr, s.lists);
    if (threadIdx.x < THREADS) {
        wait_for_previous();
        multiply<Down>(inner, Down::ROW_BYTES, outs, s);
    } else if (threadIdx.x == THREADS) {
        read_weights<Down>(down, s);
    }
}
