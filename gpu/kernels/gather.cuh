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

// Copy a visited table, from the batch's memory to the block's or back.
__device__ inline void copy_visited(uint32* target, const uint32* source, uint32 bits) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
    for (uint32 i = threadIdx.x; i < (1u << bits) / 4; i += blockDim.x) to[i] = from[i];
}

// Forget all that an earlier query saw. Its keys are the caller's to clear.
__device__ inline void clear_visited(uint32* visited, uint32 bits) {
    uint4* sectors = reinterpret_cast<uint4*>(visited);
    for (uint32 i = threadIdx.x; i < (1u << bits) / 4; i += blockDim.x)
        sectors[i] = make_uint4(NO_NODE, NO_NODE, NO_NODE, NO_NODE);
}

// Calls act(rank, i) for the `search_width` nearest entries i from the cursor on that have not been parents, and returns
// how many there are. One warp.
template <class Act>
__device__ inline uint32 next_parents(const Slot* slot, const uint64* keys, uint32 cursor, Act act) {
    const uint32 lane = threadIdx.x % WARP, width = slot->search_width, top_m = slot->top_m;
    uint32 found = 0;
    for (uint32 first = cursor; first < top_m && found < width; first += WARP) {
        const uint32 i = first + lane;
        const bool open = i < top_m && !(keys[i] & EXPANDED);
        const uint32 all = __ballot_sync(WHOLE_WARP, open);
        const uint32 rank = found + __popc(all & ((1u << lane) - 1));
        if (open && rank < width) act(rank, i);
        found += __popc(all);
    }
    return min(found, width);
}

// The next parents, which they are from now on. One warp.
__device__ inline void select_parents(const Slot* slot, uint64* keys, GatherScratch* scratch) {
    const uint32 count = next_parents(slot, keys, slot->cursor, [=](uint32 rank, uint32 i) {
        scratch->parents[rank] = node_of(keys[i]);
        keys[i] |= EXPANDED;
    });
    if (threadIdx.x % WARP == 0) scratch->parent_count = count;
}

// Have the graph rows of the parents that the next extend will select brought near, while this one ends. One warp.
__device__ inline void prefetch_rows(const Slot* slot, const Collection& collection, const uint64* keys,
                                     uint32 cursor) {
    const uint32 bytes = collection.degree * sizeof(uint32);
    next_parents(slot, keys, cursor, [=, &collection](uint32, uint32 i) {
        const unsigned char* row = at<unsigned char>(collection.graph, static_cast<uint64>(node_of(keys[i])) * bytes);
        for (uint32 offset = 0; offset < bytes; offset += LINE_BYTES) prefetch_line(row + offset);
    });
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

// All three stages: writes the first-seen nodes, in any order, and scratch->node_count. `keys` is the slot's top_m, which
// the first extend does not read.
__device__ inline void gather(const Slot* slot, const Collection& collection, uint64* keys, uint32* visited,
                              uint32* nodes, GatherScratch* scratch) {
    const bool first = slot->extends == 0;
    const uint32 bits = slot->visited_bits, size = collection.size;
    if (threadIdx.x == 0) scratch->node_count = 0;
    if (first)
        clear_visited(visited, bits);
    else if (threadIdx.x < WARP)
        select_parents(slot, keys, scratch);
    __syncthreads();
    const uint32 neighbors = first ? collection.seed_count : scratch->parent_count * collection.degree;
    for (uint32 i = threadIdx.x; i < neighbors; i += blockDim.x) {
        const uint32 node = neighbor(slot, collection, scratch->parents, i);
        if (node >= size) continue;  // a damaged graph must not lead outside of the rows
        if (mark_visited(visited, bits, node)) nodes[atomicAdd(&scratch->node_count, 1u)] = node;
    }
    __syncthreads();
}
