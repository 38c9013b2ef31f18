// Extends of one slot by one block: keys, nodes, distances and the visited table stay in shared memory between extends; all are
// loaded from and stored to the batch's memory once.
//
// Memory traffic: that of the stages, minus, except in the first and last extend, the tasks (12 bytes each) and the keys.
#pragma once
#include "finish.cuh"
#include "ring.cuh"

constexpr uint32 QUERY_DONE = 16;  // reason to stop: the query has finished and its result is published

// The extends of a slot in a launch.
struct SlotRun {
    uint32 extends;  // number made
    uint32 reasons;  // for stopping
};

// Extend a slot, whose head is `head`, until its query has finished, `limit` extends were made, or there is another reason
// to stop: one thread calls stop.load() early in each extend, to hide the latency of its loads, and stop.reasons(the query's
// extends) at its end. `table_words`: length of the visited table. `begins`: the query is new, only its line is set.
// `places`: of a thread in the ring of rows, which overlaps the new keys, since these follow distances. Returns the same to
// every thread.
template <class Stop>
__device__ inline SlotRun extend_slot(const Batch& batch, uint32 slot_number, Slot head, bool begins, uint32 table_words,
                                   uint32 places, uint32 limit, Stop stop, unsigned char* shared) {
    BlockScratch* scratch = reinterpret_cast<BlockScratch*>(shared);
    GatherScratch* gathering = &scratch->gathering;
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    const Ring ring = {reinterpret_cast<uint4*>(fresh), places};
    uint64* keys = fresh + max(MERGE_KEYS, places * blockDim.x * CHUNK_BYTES / 8);
    Slot* slot = slot_at(batch, slot_number);
    const Collection& collection = collection_at(batch, head.collection);
    const uint32 top_m = head.top_m, room = max(power_of_two(top_m), MERGE_KEYS);
    uint32* table = reinterpret_cast<uint32*>(keys + room);
    uint32* nodes = table + table_words;
    float* distances = reinterpret_cast<float*>(nodes + batch.slot_tasks);
    fill_keys(keys, top_m, room);
    if (begins) {
        head.task_count = begin_query(slot, head, collection, keys, table, nodes, &gathering->node_count);
    } else {
        const uint64* stored = keys_at(batch, slot_number);
        const uint32* gathered = nodes_at(batch, slot_number);
        copy_visited(table, visited_at(batch, slot_number), head.visited_bits);
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) keys[i] = stored[i];
        for (uint32 i = threadIdx.x; i < head.task_count; i += blockDim.x) nodes[i] = gathered[i];
        __syncthreads();
    }
    SlotRun run = {0, 0};
    while (run.extends < limit && run.reasons == 0) {
        if (limit > 1 && threadIdx.x == 0) stop.load();
        const uint32 count = head.task_count;
        row_distances(collection, slot, nodes, count, distances, ring);
        const Parents next = {gathering->parents, head.search_width, collection.degree * 4,
                              at<const unsigned char>(collection.graph)};
        const auto key_of_task = [=](uint32 i) { return key_of(distances[i], nodes[i]); };
        const Merged merged = merge(keys, top_m, count, key_of_task, fresh, slot->forgot != 0, next, &scratch->merging);
        const bool done = count_extend(slot, head, merged);
        head.task_count = 0;
        if (done)
            publish(batch, slot_number, slot, keys);
        else
            head.task_count = gather_neighbors<1, false>(slot, head, collection, merged.parent_count, table, nodes,
                                                         gathering);
        head.extends += 1;
        head.unchanged = merged.changed ? 0 : head.unchanged + 1;
        run.extends += 1;
        if (threadIdx.x == 0) scratch->reasons = (done ? QUERY_DONE : 0) + stop.reasons(head.extends);
        __syncthreads();
        run.reasons = scratch->reasons;
    }
    if (run.reasons < QUERY_DONE) {
        const uint32 number = computed_here(slot_number);  // so that no register holds these addresses before
        uint64* stored = keys_at(batch, number);
        uint32* gathered = nodes_at(batch, number);
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored[i] = keys[i];
        for (uint32 i = threadIdx.x; i < head.task_count; i += blockDim.x) gathered[i] = nodes[i];
        copy_visited(visited_at(batch, number), table, head.visited_bits);
    }
    if (threadIdx.x == 0) keep_tasks(batch, slot_number, slot, head.collection, head.task_count);
    return run;
}
