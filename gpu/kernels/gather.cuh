// The new tasks of a slot, from its parents' neighbours or a collection's seeds: expand_neighbors, mark_visited.
//
// Floor: graph rows, search_width · degree · 4 bytes per slot, and per neighbour a 32-byte sector of the visited table,
// read and, for a new node, written.
//
// The visited table is a set-associative cache with sets of 8 words, one sector. It has no false positives. A full set
// evicts a word, which the slot's head records (`forgot`); an evicted node may be scored again, which does not change
// results (keys.cuh, merge.cuh).
#pragma once
#include "keys.cuh"

static_assert(SCRATCH_BYTES >= 4 * (MAX_SEARCH_WIDTH + 8), "a block's counts and parents");

constexpr uint32 NO_NODE = 0xFFFFFFFFu;
constexpr uint32 WAYS = 8;

struct GatherScratch {
    uint32 parents[MAX_SEARCH_WIDTH];  // selected by the merge
    uint32 node_count;
};

// Copy a visited table between the batch's and shared memory.
__device__ inline void copy_visited(uint32* target, const uint32* source, uint32 bits) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
#pragma unroll 1
    for (uint32 i = threadIdx.x; i < (1u << bits) / 4; i += blockDim.x) to[i] = from[i];
}

// Clear a visited table.
__device__ inline void clear_visited(uint32* visited, uint32 bits) {
    uint4* sectors = reinterpret_cast<uint4*>(visited);
    for (uint32 i = threadIdx.x; i < (1u << bits) / 4; i += blockDim.x)
        sectors[i] = make_uint4(NO_NODE, NO_NODE, NO_NODE, NO_NODE);
}

// A snapshot of the words of a node's set, which begins at visited[first]. An index, since NVRTC 13.0 does not end on an
// array of pointers of which some are not set.
struct Set {
    uint32 first;
    uint4 lower, upper;
};

__device__ inline uint32 hash_of(uint32 node) { return node * 2654435761u; }

__device__ inline Set set_of(const uint32* visited, uint32 bits, uint32 node) {
    const uint32 first = hash_of(node) >> (32 - bits) & ~(WAYS - 1);  // of the highest `bits` bits
    const uint4* words = reinterpret_cast<const uint4*>(visited + first);
    return {first, words[0], words[1]};
}

// Insert a node into the table. Returns whether it is new. SYNC POINT: if several threads insert a node at once, it is new
// for the one whose compare-and-swap wins.
__device__ inline bool mark_visited(Slot* slot, uint32* visited, const Set& set, uint32 node) {
    const uint32 words[WAYS] = {set.lower.x, set.lower.y, set.lower.z, set.lower.w,
                                set.upper.x, set.upper.y, set.upper.z, set.upper.w};
    uint32 way = WAYS;  // the first free one: all before it are checked already
    bool seen = false;
#pragma unroll
    for (uint32 i = WAYS; i-- > 0;) {
        way = words[i] == NO_NODE ? i : way;
        seen |= words[i] == node;
    }
    if (seen) return false;
    for (; way < WAYS; way++) {
        const uint32 held = atomicCAS(visited + set.first + way, NO_NODE, node);
        if (held == NO_NODE) return true;
        if (held == node) return false;
    }
    slot->forgot = 1;
    return atomicExch(visited + set.first + hash_of(node) % WAYS, node) != node;
}

// Write the new ones of `count` nodes, bring(0..), to `nodes`, in any order, and their number to *node_count. Returns the
// number to every thread. A thread issues AT_ONCE loads of sets before it checks them. Starts and ends with a block barrier.
template <uint32 AT_ONCE, bool ONE_WARP, class Bring>
__device__ inline uint32 gather(Slot* slot, uint32 bits, uint32 size, uint32 count, Bring bring, uint32* visited,
                                uint32* nodes, uint32* node_count) {
    if (threadIdx.x == 0) *node_count = 0;
    wait_for_block<ONE_WARP>();
    for (uint32 begin = threadIdx.x; begin < count; begin += AT_ONCE * blockDim.x) {
        uint32 brought[AT_ONCE];
        Set sets[AT_ONCE];
#pragma unroll
        for (uint32 j = 0; j < AT_ONCE; j++)
            brought[j] = begin + j * blockDim.x < count ? bring(begin + j * blockDim.x) : NO_NODE;
#pragma unroll
        for (uint32 j = 0; j < AT_ONCE; j++)  // a corrupt graph may point outside the rows
            if (brought[j] < size) sets[j] = set_of(visited, bits, brought[j]);
#pragma unroll
        for (uint32 j = 0; j < AT_ONCE; j++)
            if (brought[j] < size && mark_visited(slot, visited, sets[j], brought[j]))
                nodes[atomicAdd(node_count, 1u)] = brought[j];
    }
    wait_for_block<ONE_WARP>();
    return *node_count;
}

// The same for the neighbours of the parents selected by a merge. `head`: of the slot.
template <uint32 AT_ONCE, bool ONE_WARP>
__device__ inline uint32 gather_neighbors(Slot* slot, const Slot& head, const Collection& collection,
                                          uint32 parent_count, uint32* visited, uint32* nodes, GatherScratch* scratch) {
    const uint32 *graph = at<const uint32>(collection.graph), *parents = scratch->parents;
    const uint32 degree = collection.degree;
    const float per_parent = reciprocal(degree);
    const auto neighbor = [=](uint32 i) {
        const uint32 rank = static_cast<uint32>((i + 0.5f) * per_parent);  // i / degree, for i up to 2²¹
        return graph[static_cast<uint64>(parents[rank]) * degree + (i - rank * degree)];
    };
    return gather<AT_ONCE, ONE_WARP>(slot, head.visited_bits, collection.size, parent_count * degree, neighbor, visited,
                                     nodes, &scratch->node_count);
}

// The same for the seeds, for a new query. Clears its visited table and its keys (top_m of them, to NO_KEY).
__device__ inline uint32 begin_query(Slot* slot, const Slot& head, const Collection& collection, uint64* keys,
                                     uint32* visited, uint32* nodes, uint32* node_count) {
    for (uint32 i = threadIdx.x; i < head.top_m; i += blockDim.x) keys[i] = NO_KEY;
    clear_visited(visited, head.visited_bits);
    const uint32* seeds = at<const uint32>(collection.seeds);
    return gather<1, false>(slot, head.visited_bits, collection.size, collection.seed_count,
                            [=](uint32 i) { return seeds[i]; }, visited, nodes, node_count);
}
