// End of a slot's extend, of its query, and of a launch.
//
// Results are written directly to pinned host memory when a query finishes: 8 · k bytes and a line. The host polls a
// result's ticket and the number of launches, which are stored last, with release at system scope. It never synchronises.
#pragma once
#include "distance.cuh"
#include "merge.cuh"

struct BlockScratch {
    GatherScratch gathering;
    MergeScratch merging;
    uint32 reasons;
};
static_assert(sizeof(BlockScratch) <= SCRATCH_BYTES, "shared scratch of a block");

// Write the k nearest of a slot's keys to its result line, then the ticket.
__device__ inline void publish(const Batch& batch, uint32 slot_number, const Slot* slot, const uint64* keys) {
    Result* result = result_at(batch, slot_number);
    int* nodes = reinterpret_cast<int*>(result + 1);
    float* distances = reinterpret_cast<float*>(nodes + batch.max_k);
    for (uint32 i = threadIdx.x; i < slot->k; i += blockDim.x) {
        const uint64 key = keys[i];
        nodes[i] = key == NO_KEY ? -1 : static_cast<int>(node_of(key));
        distances[i] = key == NO_KEY ? __uint_as_float(0x7F800000u) : distance_of(key);
    }
    if (threadIdx.x == 0) {
        result->extends = slot->extends;
        result->invalid = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release_system(&result->ticket, slot->ticket);
}

// Count an extend of a slot whose head was `head` before. Returns, to every thread, whether the query has finished.
__device__ inline bool count_extend(Slot* slot, const Slot& head, Merged merged) {
    const uint32 unchanged = merged.changed ? 0 : head.unchanged + 1;
    const bool done = merged.parent_count == 0 || (head.patience > 0 && unchanged >= head.patience);
    if (threadIdx.x == 0) {
        slot->unchanged = unchanged;
        slot->extends = head.extends + 1;
        if (done) slot->status = FINISHED;
    }
    return done;
}

// Set the number of a slot's tasks for the next extend. One thread.
__device__ inline void set_due(const Batch& batch, uint32 slot_number, uint32 collection, uint32 count) {
    at<uint32>(batch.due)[slot_number] = collection << TASK_BITS | count;
}

// Store an active slot's number of tasks for the next extend; 0 if its query has finished. One thread.
__device__ inline void keep_tasks(const Batch& batch, uint32 slot_number, Slot* slot, uint32 collection, uint32 count) {
    slot->task_count = count;
    set_due(batch, slot_number, collection, count);
}

// Leave the launch with reasons to end it (finished slots, a doorbell). True in one thread of the last block to leave.
// SYNC POINT: the writes of all other blocks before they left are visible to that thread.
template <bool ONE_WARP>
__device__ inline bool leave(const Batch& batch, uint32 reasons_to_stop) {
    wait_for_block<ONE_WARP>();
    if (threadIdx.x != 0) return false;
    Counters* counters = at<Counters>(batch.counters);
    if (reasons_to_stop > 0) atomicAdd(&counters->stop, reasons_to_stop);
    __threadfence();
    if (atomicInc(&counters->left, gridDim.x - 1) != gridDim.x - 1) return false;  // wraps to 0 for the next launch
    __threadfence();
    return true;
}

// Report the end of a launch to the host.
__device__ inline void end_launch(const Batch& batch) {
    Counters* counters = at<Counters>(batch.counters);
    counters->extends = 0;
    counters->stop = 0;
    counters->launches += 1;
    Progress* progress = at<Progress>(batch.progress);
    progress->extends = counters->total_extends;
    store_release_system(&progress->launches, counters->launches);
}
