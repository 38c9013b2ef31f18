// Extends of one slot by one block: keys, nodes and distances stay in shared memory from extend to extend, and so does the
// visited table where it is NEAR; it is taken from the batch's memory and put back, once.
//
// The bytes are those of the stages, less the tasks (12 a task) and, but for the first and last extend, the keys.
#pragma once
#include "finish.cuh"
#include "ring.cuh"

struct BlockScratch {
    GatherScratch gathering;
    MergeScratch merging;
    uint32 reasons;
};
static_assert(sizeof(BlockScratch) <= SCRATCH_BYTES, "what a block's threads share");

constexpr uint32 QUERY_DONE = 16;  // as a reason to stop; its result is published then

struct Went {
    uint32 extends;  // that were made
    uint32 reasons;  // to stop
};

// Extend a slot, whose head is `head`, until its query is done, `limit` extends were made, or there is another reason to
// stop: one thread calls stop.ask() early in each extend, since what it asks for comes from afar, and at its end
// stop.reasons(the query's extends). NEAR: the block has `table_words` for a visited table. `places`: a thread's in the
// ring of rows, which lies where new keys do, since these come after distances. The same in every thread.
template <bool NEAR, class Stop>
__device__ inline Went extend_slot(const Batch& batch, uint32 slot_number, Slot head, uint32 table_words, uint32 places,
                                   uint32 limit, Stop stop, unsigned char* shared) {
    BlockScratch* scratch = reinterpret_cast<BlockScratch*>(shared);
    GatherScratch* gathering = &scratch->gathering;
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    const Ring ring = {reinterpret_cast<uint4*>(fresh), places};
    uint64* keys = fresh + max(MERGE_KEYS, places * blockDim.x * CHUNK_BYTES / 8);
    Slot* slot = slot_at(batch, slot_number);
    const Collection& collection = at<const Collection>(batch.collections)[head.collection];
    const uint32 top_m = head.top_m, room = max(power_of_two(top_m), MERGE_KEYS);
    uint32* table = reinterpret_cast<uint32*>(keys + room);
    uint32* nodes = NEAR ? table + table_words : table;
    float* distances = reinterpret_cast<float*>(nodes + batch.slot_tasks);
    const auto stored = [&](uint32 slot_number) {
        return at<uint64>(batch.keys, static_cast<uint64>(slot_number) * batch.keys_stride);
    };
    const auto kept = [&](uint32 slot_number) {
        return at<uint32>(batch.visited, static_cast<uint64>(slot_number) * batch.visited_stride);
    };
    uint32* visited = NEAR ? table : kept(slot_number);
    const bool first = head.extends == 0;
    if (NEAR && !first) copy_visited(table, kept(slot_number), head.visited_bits);
    if (threadIdx.x < head.parent_count) gathering->parents[threadIdx.x] = parents_at(batch, slot_number)[threadIdx.x];
    for (uint32 i = threadIdx.x; i < room; i += blockDim.x)
        keys[i] = i < top_m && !first ? stored(slot_number)[i] : NO_KEY;
    Went went = {0, 0};
    while (went.extends < limit && went.reasons == 0) {
        if (limit > 1 && threadIdx.x == 0) stop.ask();
        gather<1>(slot, head, collection, gathering->parents, head.parent_count, visited, nodes, &gathering->node_count);
        const uint32 count = gathering->node_count;
        row_distances(collection, slot, nodes, count, distances, ring);
        const Parents next = {gathering->parents, head.search_width, collection.degree * 4,
                              at<const unsigned char>(collection.graph)};
        const auto key_of_task = [=](uint32 i) { return key_of(distances[i], nodes[i]); };
        const Merged merged = merge(keys, top_m, count, key_of_task, fresh, slot->forgot != 0, next, &scratch->merging);
        const bool done = count_extend(slot, head, merged);
        if (done) finish(batch, slot_number, slot, collection, keys, &scratch->merging);
        head.extends += 1;
        head.unchanged = merged.changed ? 0 : head.unchanged + 1;
        head.parent_count = merged.parent_count;
        went.extends += 1;
        if (threadIdx.x == 0) scratch->reasons = (done ? QUERY_DONE : 0) + stop.reasons(head.extends);
        __syncthreads();
        went.reasons = scratch->reasons;
    }
    if (went.reasons < QUERY_DONE) {
        const uint32 back = computed_here(slot_number);
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored(back)[i] = keys[i];
        if (threadIdx.x < head.parent_count) parents_at(batch, back)[threadIdx.x] = gathering->parents[threadIdx.x];
        if (NEAR) copy_visited(kept(back), table, head.visited_bits);
    }
    return went;
}
