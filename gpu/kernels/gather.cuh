// From a slot's top_m to the nodes whose distances are wanted: select_parents, expand_neighbors, mark_visited. A block
// a slot.
//
// Floor: graph rows, search_width · degree · 4 bytes a slot, and a 32-byte sector of the visited table for each
// neighbour, read and, for a node that is new, written.
//
// The visited table is a cache of sets of 8 words, one sector. It answers "seen" only for a node that was seen. When a
// set is full, a word of it is forgotten; a forgotten node costs a second distance and changes no result (keys.cuh,
// merge.cuh).
#pragma once
#include "keys.cuh"

static_assert(SCRATCH_BYTES >= 4 * (MAX_SEARCH_WIDTH + 8), "a block's counts and parents");

constexpr uint32 NO_NODE = 0xFFFFFFFFu;
constexpr uint32 WAYS = 8;

struct GatherScratch {
    uint32 parents[MAX_SEARCH_WIDTH];
    uint32 parent_count;
    uint32 node_count;
};

// Forget all that an earlier query saw. Its keys are the caller's to clear.
__device__ inline void clear_visited(uint32* visited, uint32 bits) {
    uint4* sectors = reinterpret_cast<uint4*>(visited);
    for (uint32 i = threadIdx.x; i < (1u << bits) / 4; i += blockDim.x)
        sectors[i] = make_uint4(NO_NODE, NO_NODE, NO_NODE, NO_NODE);
}

// The `search_width` nearest entries from the cursor on that have not been parents, which they are from now on. One
// warp.
__device__ inline void select_parents(const Slot* slot, uint64* keys, GatherScratch* scratch) {
    const uint32 lane = threadIdx.x % WARP, width = slot->search_width;
    uint32 found = 0;
    for (uint32 first = slot->cursor; first < slot->top_m && found < width; first += WARP) {
        const uint32 i = first + lane;
        const uint64 key = i < slot->top_m ? keys[i] : NO_KEY;
        const bool open = !(key & EXPANDED);
        const uint32 all = __ballot_sync(WHOLE_WARP, open);
        const uint32 rank = found + __popc(all & ((1u << lane) - 1));
        if (open && rank < width) {
            scratch->parents[rank] = node_of(key);
            keys[i] = key | EXPANDED;
        }
        found += __popc(all);
    }
    if (lane == 0) scratch->parent_count = min(found, width);
}

// The i-th neighbour of the parents; in the first extend, the i-th seed.
__device__ inline uint32 neighbor(const Slot* slot, const Collection& collection, const uint32* parents, uint32 i) {
    if (slot->extends == 0) return at<const uint32>(collection.seeds)[i];
    const uint64 row = static_cast<uint64>(parents[i / collection.degree]) * collection.degree;
    return at<const uint32>(collection.graph, row)[i % collection.degree];
}

// Whether this is the first time that the table sees a node. SYNC POINT: of several threads that bring a node at once,
// the one whose compare-and-swap wins is first.
__device__ inline bool mark_visited(uint32* visited, uint32 bits, uint32 node) {
    const uint32 hash = node * 2654435761u;
    uint32* set = visited + ((hash >> (32 - bits)) & ~(WAYS - 1));
    const uint4 lower = reinterpret_cast<const uint4*>(set)[0], upper = reinterpret_cast<const uint4*>(set)[1];
    const uint32 words[WAYS] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
#pragma unroll
    for (uint32 way = 0; way < WAYS; way++) {
        uint32 held = words[way];
        if (held == NO_NODE) {
            held = atomicCAS(set + way, NO_NODE, node);
            if (held == NO_NODE) return true;
        }
        if (held == node) return false;
    }
    return atomicExch(set + hash % WAYS, node) != node;
}

// All three stages: writes the first-seen nodes, in any order, and scratch->node_count. `keys` is the slot's top_m.
__device__ inline void gather(const Slot* slot, const Collection& collection, uint64* keys, uint32* visited,
                              uint32* nodes, GatherScratch* scratch) {
    const bool first = slot->extends == 0;
    const uint32 bits = slot->visited_bits, size = collection.size;
    if (first) clear_visited(visited, bits);
    if (threadIdx.x == 0) scratch->node_count = 0;
    if (threadIdx.x < WARP) select_parents(slot, keys, scratch);
    __syncthreads();
    const uint32 neighbors = first ? collection.seed_count : scratch->parent_count * collection.degree;
    for (uint32 i = threadIdx.x; i < neighbors; i += blockDim.x) {
        const uint32 node = neighbor(slot, collection, scratch->parents, i);
        if (node >= size) continue;  // a damaged graph must not lead outside of the rows
        if (mark_visited(visited, bits, node)) nodes[atomicAdd(&scratch->node_count, 1u)] = node;
    }
    __syncthreads();
}
