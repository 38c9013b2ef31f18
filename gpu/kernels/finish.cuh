// End of a slot's extend, of its query, and of a launch.
//
// Results are written directly to pinned host memory when a query finishes: 8 · k bytes and a line. The host polls a
// result's ticket and the number of launches, which are stored last, with release at system scope. It never synchronises.
#pragma once
#include "distance.cuh"
#include "merge.cuh"

constexpr uint32 RESCORED_AT_LEAST = 8;

struct BlockScratch {
    GatherScratch gathering;
    MergeScratch merging;
    uint32 reasons;
};
static_assert(sizeof(BlockScratch) <= SCRATCH_BYTES, "shared scratch of a block");

// The full-precision key of an entry; every member of the team gets it.
__device__ inline uint64 exact_key(const Slot* slot, const Collection& collection, uint64 key) {
    return key_of(full_distance(collection, slot, node_of(key)), node_of(key));
}

// Sort the nearest entries by full-precision distance and drop the others (int8 rows only), as on the CPU
// (gpu/cpu/extend/results.py): rescoring the first max(k, 8) entries measures the range of the codes' error; later entries
// are rescored if an error somewhat below that range could make them nearer than the k-th.
__device__ inline void rescore(const Slot* slot, const Collection& collection, uint64* keys,
                                     MergeScratch* scratch) {
    const uint32 k = slot->k, count = min(slot->top_m, 2 * k + 16), first = min(count, max(k, RESCORED_AT_LEAST));
    const uint32 team = threadIdx.x / TEAM, teams = blockDim.x / TEAM;
    const bool leads = threadIdx.x % TEAM == 0;
    // Every member of a team reads a key before its leader replaces it: the exact distance depends on it, but racecheck
    // counts barriers only.
    const uint32 together = team_mask();
    if (threadIdx.x == 0) {
        scratch->least = ~0u;
        scratch->most = scratch->worst = 0;
    }
    __syncthreads();
    for (uint32 i = team; i < first; i += teams) {
        const uint64 key = keys[i];
        if (key == NO_KEY) break;
        const uint64 exact = exact_key(slot, collection, key);
        __syncwarp(together);
        if (!leads) continue;
        const uint32 off = ordered_of(distance_of(exact) - distance_of(key));
        atomicMin(&scratch->least, off);
        atomicMax(&scratch->most, off);
        keys[i] = exact;
    }
    __syncthreads();
    for (uint32 i = threadIdx.x; i < first; i += blockDim.x) {  // the k-th of them; there are more than k only if k < 8
        uint32 rank = 0;
        for (uint32 j = 0; j < first && first > k; j++) rank += keys[j] < keys[i];
        if (rank < k) atomicMax(&scratch->worst, static_cast<uint32>(keys[i] >> 32));
    }
    __syncthreads();
    const float least = float_of(scratch->least), most = float_of(scratch->most), worst = float_of(scratch->worst);
    for (uint32 i = first + team; i < count; i += teams) {
        const uint64 key = keys[i];
        const bool wanted = key != NO_KEY && distance_of(key) + least - (most - least) < worst;
        const uint64 exact = wanted ? exact_key(slot, collection, key) : NO_KEY;
        __syncwarp(together);
        if (leads) keys[i] = exact;
    }
    fill_keys(keys, count, power_of_two(count));
    __syncthreads();
    sort(keys, power_of_two(count));
}

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

// Publish the result of a finished query: `keys` in shared memory, with capacity for a power of two.
__device__ inline void finish(const Batch& batch, uint32 slot_number, const Slot* slot, const Collection& collection,
                              uint64* keys, MergeScratch* scratch) {
    if (collection.full != 0) rescore(slot, collection, keys, scratch);
    publish(batch, slot_number, slot, keys);
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
