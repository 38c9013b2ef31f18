// The stages of an extend over a whole running batch, and what writes slots between extends.
//
// Three launches an extend: gathering and merging have a block a slot, distances have whatever fills the device, since
// one slot's tasks are few and their number varies. Blocks of slots that are not running leave at once, so one captured
// graph serves every set of slots.
#include "distance.cuh"
#include "finish.cuh"
#include "gather.cuh"

// Carry out one command a block: copy a staged line, set a status. A query that has just finished stays so.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_slots(const Batch batch, uint64 commands) {
    const Command command = at<const Command>(commands)[blockIdx.x];
    Slot* slot = slot_at(batch, command.slot);
    if (command.line != 0)
        for (uint32 i = threadIdx.x; i < batch.line_bytes / CHUNK_BYTES; i += blockDim.x)
            reinterpret_cast<uint4*>(slot)[i] = at<const uint4>(command.line)[i];
    __syncthreads();
    if (threadIdx.x == 0 && (command.line != 0 || command.status == FREE || slot->status != FINISHED))
        slot->status = command.status;
}

extern "C" __global__ void __launch_bounds__(SLOT_THREADS) gather_tasks(const Batch batch) {
    DYNAMIC_SHARED(shared);
    GatherScratch* scratch = reinterpret_cast<GatherScratch*>(shared);
    uint32* nodes = reinterpret_cast<uint32*>(shared + SCRATCH_BYTES);
    Slot* slot = slot_at(batch, blockIdx.x);
    if (slot->status != ACTIVE) return;
    uint64* keys = at<uint64>(batch.keys, static_cast<uint64>(blockIdx.x) * batch.keys_stride);
    uint32* visited = at<uint32>(batch.visited, static_cast<uint64>(blockIdx.x) * batch.visited_stride);
    if (slot->extends == 0) fill_keys(keys, 0, slot->top_m);
    gather(slot, at<const Collection>(batch.collections)[slot->collection], keys, visited, nodes, scratch);
    const uint32 count = scratch->node_count;
    if (threadIdx.x == 0) {
        slot->task_begin = atomicAdd(&at<Counters>(batch.counters)->tasks, count);
        slot->task_end = slot->task_begin + count;
    }
    __syncthreads();
    Task* tasks = at<Task>(batch.tasks, slot->task_begin);
    for (uint32 i = threadIdx.x; i < count; i += blockDim.x) tasks[i] = Task{blockIdx.x, nodes[i]};
}

// Blocks that a multiprocessor should run, of distances and of a slot's: with 64 registers a thread every load of a round
// is under way before the first is used. The assembler for sm_100 would spill with so few.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr uint32 DISTANCE_BLOCKS = 2, SLOT_BLOCKS = 4;
#else
constexpr uint32 DISTANCE_BLOCKS = 4, SLOT_BLOCKS = 8;
#endif

template <uint32 TEAM>
__device__ inline void compute_distances(const Batch& batch) {
    const uint32 count = at<const Counters>(batch.counters)->tasks, teams = gridDim.x * blockDim.x / TEAM;
    const Task* tasks = at<const Task>(batch.tasks);
    uint32 i = (blockIdx.x * blockDim.x + threadIdx.x) / TEAM;
    for (Task task, next = tasks[i < count ? i : 0]; i < count; i += teams) {
        task = next;
        next = tasks[i + teams < count ? i + teams : 0];  // on its way while this one's row is
        const Slot* slot = slot_at(batch, task.slot);
        const Collection& collection = at<const Collection>(batch.collections)[slot->collection];
        const float distance = row_distance<TEAM, 4>(collection, slot, task.node);
        if (threadIdx.x % TEAM == 0) at<float>(batch.distances)[i] = distance;
    }
}

extern "C" __global__ void __launch_bounds__(DISTANCE_THREADS, DISTANCE_BLOCKS) compute_distances_8(const Batch batch) {
    compute_distances<8>(batch);
}
extern "C" __global__ void __launch_bounds__(DISTANCE_THREADS, DISTANCE_BLOCKS)
    compute_distances_16(const Batch batch) {
    compute_distances<16>(batch);
}
extern "C" __global__ void __launch_bounds__(DISTANCE_THREADS, DISTANCE_BLOCKS)
    compute_distances_32(const Batch batch) {
    compute_distances<32>(batch);
}

// Returns whether the slot's query is done.
__device__ inline bool merge_slot(const Batch& batch, Slot* slot, unsigned char* shared) {
    MergeScratch* scratch = reinterpret_cast<MergeScratch*>(shared);
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    uint64* keys = fresh + MERGE_KEYS;
    uint64* stored = at<uint64>(batch.keys, static_cast<uint64>(blockIdx.x) * batch.keys_stride);
    const uint32 top_m = slot->top_m, begin = slot->task_begin, unchanged = slot->unchanged;
    for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) keys[i] = stored[i];
    fill_keys(keys, top_m, max(power_of_two(top_m), MERGE_KEYS));
    const Task* tasks = at<const Task>(batch.tasks, begin);
    const float* distances = at<const float>(batch.distances, begin);
    const auto key_of_task = [=](uint32 i) { return key_of(distances[i], tasks[i].node); };
    const Merged merged = merge(keys, top_m, slot->task_end - begin, key_of_task, fresh, scratch);
    const Collection& collection = at<const Collection>(batch.collections)[slot->collection];
    if (threadIdx.x < WARP) prefetch_rows(slot, collection, keys, merged.cursor);
    if (merged.changed)
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored[i] = keys[i];
    return finish_extend(batch, blockIdx.x, slot, collection, keys, merged, unchanged, scratch);
}

// The last block ends the extend, and the launch if it is time.
extern "C" __global__ void __launch_bounds__(SLOT_THREADS, SLOT_BLOCKS)
    merge_top_m(const Batch batch, uint32 limit, uint64 condition) {
    DYNAMIC_SHARED(shared);
    Slot* slot = slot_at(batch, blockIdx.x);
    uint32 rang = 0;  // asked for early: the answer comes over the bus
    if (limit > 1 && blockIdx.x == 0 && threadIdx.x == 0) rang = load_system(at<const uint32>(batch.doorbell));
    const bool done = slot->status == ACTIVE && merge_slot(batch, slot, shared);
    if (!leave(batch, (done ? 1 : 0) + (rang ? 1 : 0))) return;
    Counters* counters = at<Counters>(batch.counters);
    counters->tasks = 0;
    counters->extends += 1;
    counters->total_extends += 1;
    if (counters->extends < limit && counters->stop == 0) return;
    end_launch(batch);
    if (condition != 0) set_condition(condition, 0);
}
