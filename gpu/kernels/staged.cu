// The stages of an extend over a whole running batch, and the kernel that writes slots between extends.
//
// Two launches per extend. Between extends, a slot holds its next tasks, already marked as visited. The distance kernel
// fills the device with blocks that share the tasks of all slots, since one slot's tasks are few and vary in number. The
// merge kernel has a warp per slot, which also gathers the neighbours of the parents that it has selected. Inactive slots
// have no tasks, so one captured graph serves any set of active slots.
#include "finish.cuh"
#include "query.cuh"
#include "ring.cuh"

// Execute one command per block: copy the staged line of a new query, or its head, and prepare the query from its vector in
// device memory; set the status. A slot that has just finished stays finished.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_slots(const Batch batch, uint64 commands) {
    DYNAMIC_SHARED(shared);
    const Command command = at<const Command>(commands)[blockIdx.x];
    const uint64 line = command.line & ~static_cast<uint64>(LINE_IN_PLACE);
    const bool in_place = (command.line & LINE_IN_PLACE) != 0;
    Slot* slot = slot_at(batch, command.slot);
    if (line != 0)
        for (uint32 i = threadIdx.x; i < (in_place ? sizeof(Slot) : batch.line_bytes) / CHUNK_BYTES; i += blockDim.x)
            reinterpret_cast<uint4*>(slot)[i] = at<const uint4>(line)[i];
    __syncthreads();
    if (line != 0 && command.status != FREE) {
        const Slot head = load_whole(slot);
        const Collection& collection = collection_at(batch, head.collection);
        if (in_place && !prepare_query(slot, collection, head.vector, shared)) {
            if (threadIdx.x != 0) return;
            publish_invalid(batch, command.slot, slot);
            atomicAdd(&at<Counters>(batch.counters)->stop, 1u);  // the launch that follows ends after an extend
            return;
        }
        begin_query(slot, head, collection, keys_at(batch, command.slot), visited_at(batch, command.slot),
                    nodes_at(batch, command.slot), &slot->task_count);
    }
    if (threadIdx.x == 0 && (line != 0 || command.status == FREE || slot->status != FINISHED)) {
        slot->status = command.status;
        set_due(batch, command.slot, slot->collection, command.status == ACTIVE ? slot->task_count : 0);
    }
}

// compute_distances. Floor: the rows' bytes; to saturate the memory, 24 KB in flight per multiprocessor (ring.cuh). A warp
// loads the nodes of up to 32 tasks of a slot at once, which hides all but the first chain of latencies (node, collection,
// query, row), and then keeps 4 KB of their rows in flight, of any length: 128 KB for 1,024 threads.

constexpr uint32 DISTANCE_BLOCKS = 4;  // per multiprocessor, with 64 registers per thread
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr uint32 MERGE_BLOCKS = 16;  // more would spill there
#else
constexpr uint32 MERGE_BLOCKS = 20;
#endif
constexpr uint32 MERGE_AT_ONCE = 4;  // neighbours per thread

// Write inclusive prefix sums of the slots' tasks to sums[slot]. Ends with a block barrier.
__device__ inline void sum_tasks(const uint32* due, uint32 slots, uint32* sums, uint32* of_warps) {
    const uint32 each = (slots + blockDim.x - 1) / blockDim.x;
    const uint32 begin = min(threadIdx.x * each, slots), end = min(begin + each, slots);
    uint32 total = 0, before = 0;
    for (uint32 i = begin; i < end; i++) sums[i] = total += due[i] & TASK_MASK;
#pragma unroll
    for (uint32 stride = 1; stride < WARP; stride *= 2) {
        const uint32 others = __shfl_xor_sync(WHOLE_WARP, total, static_cast<int>(stride));
        before += threadIdx.x & stride ? others : 0;
        total += others;
    }
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = total;
    __syncthreads();
    for (uint32 i = 0; i < threadIdx.x / WARP; i++) before += of_warps[i];
    for (uint32 i = begin; i < end; i++) sums[i] += before;
    __syncthreads();
}

// The slot of a task: the first whose sum exceeds the task's number.
__device__ inline uint32 slot_of(const uint32* sums, uint32 slots, uint32 task) {
    uint32 slot = 0;
    for (uint32 count = slots; count > 1;) {
        const uint32 half = count / 2;
        slot += sums[slot + half - 1] <= task ? half : 0;
        count -= half;
    }
    return slot;
}

// A warp's equal, contiguous share of all tasks. Every block computes the prefix sums.
struct Share {
    uint32 begin, end;
};

__device__ inline Share share_of_warp(const uint32* due, uint32 slots, uint32* sums, unsigned char* shared) {
    sum_tasks(due, slots, sums, reinterpret_cast<uint32*>(shared));
    const uint32 total = sums[slots - 1], warps = gridDim.x * blockDim.x / WARP, share = (total + warps - 1) / warps;
    const uint32 begin = min((blockIdx.x * blockDim.x + threadIdx.x) / WARP * share, total);
    return {begin, min(begin + share, total)};
}

// Tasks of one slot that a warp processes together: the first one's place in `nodes` and `distances`, and their number.
// The nodes of the next group are not loaded ahead: NVRTC 13.0 does not end on that for sm_90.
struct Group {
    uint32 slot, place, count;
};

extern "C" __global__ void __launch_bounds__(DISTANCE_THREADS, DISTANCE_BLOCKS)
    compute_distances(const Batch batch, uint32 slots) {
    DYNAMIC_SHARED(shared);
    const uint32 *due = at<const uint32>(batch.due), *nodes = at<const uint32>(batch.nodes);
    const uint32 lane = threadIdx.x % WARP;
    uint32* sums = reinterpret_cast<uint32*>(shared + SCRATCH_BYTES);
    uint32* own = sums + (slots + 3) / 4 * 4 + threadIdx.x / WARP * WARP;  // the nodes of this warp's group
    const Ring ring = {reinterpret_cast<uint4*>(sums + (slots + 3) / 4 * 4 + blockDim.x), DISTANCE_PLACES};
    const Share share = share_of_warp(due, slots, sums, shared);
    const auto group_at = [&](uint32 task) -> Group {
        const uint32 slot = slot_of(sums, slots, task);
        return {slot, slot * batch.slot_tasks + task - (slot > 0 ? sums[slot - 1] : 0),
                min(min(sums[slot], share.end) - task, WARP)};
    };
    for (uint32 task = share.begin; task < share.end;) {
        const Group group = group_at(task);
        own[lane] = lane < group.count ? nodes[group.place + lane] : 0;
        __syncwarp();
        row_distances<true>(collection_at(batch, due[group.slot] >> TASK_BITS), slot_at(batch, group.slot), own, group.count,
                            at<float>(batch.distances) + group.place, ring);
        __syncwarp();
        task += group.count;
    }
}

// Merge a slot's scored tasks and gather its next ones. Returns whether the query has finished.
__device__ inline bool merge_and_gather_slot(const Batch& batch, Slot* slot, const Slot& head, unsigned char* shared) {
    BlockScratch* scratch = reinterpret_cast<BlockScratch*>(shared);
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    uint64 *keys = fresh + MERGE_KEYS, *stored = keys_at(batch, blockIdx.x);
    uint32* nodes = nodes_at(batch, blockIdx.x);
    const float* distances = distances_at(batch, blockIdx.x);
    const Collection& collection = collection_at(batch, head.collection);
    const uint32 top_m = head.top_m;
    const bool forgot = head.forgot != 0, in_registers = top_m <= WARP_KEYS;
    const auto key_of_task = [=](uint32 i) { return key_of(distances[i], nodes[i]); };
    const Parents parents = {scratch->gathering.parents, head.search_width, collection.degree * 4,
                             at<const unsigned char>(collection.graph)};
    Merged merged;
    if (in_registers) {
        merged = merge_by_warp(stored, top_m, head.task_count, key_of_task, fresh, forgot, parents);
    } else {
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) keys[i] = stored[i];
        fill_keys(keys, top_m, max(power_of_two(top_m), MERGE_KEYS));
        merged = merge(keys, top_m, head.task_count, key_of_task, fresh, forgot, parents, &scratch->merging);
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored[i] = keys[i];
    }
    const bool done = count_extend(slot, head, merged);
    uint32 count = 0;
    if (done) {
        __syncthreads();
        publish(batch, blockIdx.x, slot, stored);
    } else {
        uint32* visited = visited_at(batch, blockIdx.x);
        count = gather_neighbors<MERGE_AT_ONCE, true>(slot, head, collection, merged.parent_count, visited, nodes,
                                                      &scratch->gathering);
    }
    if (threadIdx.x == 0) keep_tasks(batch, blockIdx.x, slot, head.collection, count);
    return done;
}

// The last block ends the extend, and the launch if it is due.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    merge_and_gather(const Batch batch, uint32 limit, uint64 condition) {
    DYNAMIC_SHARED(shared);
    Slot* slot = slot_at(batch, blockIdx.x);
    uint32 rang = 0;  // loaded early: it comes over the bus
    if (limit > 1 && blockIdx.x == 0 && threadIdx.x == 0) rang = load_system(at<const uint32>(batch.doorbell));
    const Slot head = load_whole(slot);
    const bool done = head.status == ACTIVE && merge_and_gather_slot(batch, slot, head, shared);
    if (!leave<true>(batch, (done ? 1 : 0) + (rang ? 1 : 0))) return;
    Counters* counters = at<Counters>(batch.counters);
    counters->extends += 1;
    counters->total_extends += 1;
    if (counters->extends < limit && counters->stop == 0) return;
    end_launch(batch);
    if (condition != 0) set_condition(condition, 0);
}
