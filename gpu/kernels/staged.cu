// The stages of an extend over a whole running batch, and what writes slots between extends.
//
// Three launches an extend: gathering has a block a slot and merging a warp, distances have whatever fills the device,
// since one slot's tasks are few and their number varies. Blocks of slots that are not running leave at once, so one
// captured graph serves every set of slots. Merging also chooses the parents of the next extend, so that gathering
// begins with their graph rows, which are on their way by then.
#include "finish.cuh"

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

extern "C" __global__ void __launch_bounds__(GATHER_THREADS) gather_tasks(const Batch batch) {
    DYNAMIC_SHARED(shared);
    GatherScratch* scratch = reinterpret_cast<GatherScratch*>(shared);
    uint32* nodes = reinterpret_cast<uint32*>(shared + SCRATCH_BYTES);
    Slot* slot = slot_at(batch, blockIdx.x);
    const Slot head = load_whole(slot);
    if (head.status != ACTIVE) return;
    const Collection& collection = at<const Collection>(batch.collections)[head.collection];
    uint32* visited = at<uint32>(batch.visited, static_cast<uint64>(blockIdx.x) * batch.visited_stride);
    const uint32* parents = parents_at(batch, blockIdx.x);
    gather<2>(slot, head, collection, parents, head.parent_count, visited, nodes, &scratch->node_count);
    const uint32 count = scratch->node_count;
    if (threadIdx.x == 0) {
        const uint32 begin = atomicAdd(&at<Counters>(batch.counters)->tasks, count);
        slot->task_begin = scratch->task_begin = begin;
        slot->task_end = begin + count;
    }
    __syncthreads();
    Task* tasks = at<Task>(batch.tasks, scratch->task_begin);
    for (uint32 i = threadIdx.x; i < count; i += blockDim.x) tasks[i] = Task{blockIdx.x, nodes[i]};
}

// Blocks that a multiprocessor should run: with 64 registers a thread every load of a round is under way before the
// first is used. The assembler for sm_100 would spill with so few.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr uint32 DISTANCE_BLOCKS = 2, MERGE_BLOCKS = 16;
#else
constexpr uint32 DISTANCE_BLOCKS = 4, MERGE_BLOCKS = 20;
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
__device__ inline bool merge_slot(const Batch& batch, Slot* slot, const Slot& head, unsigned char* shared) {
    MergeScratch* scratch = reinterpret_cast<MergeScratch*>(shared);
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    uint64* keys = fresh + MERGE_KEYS;
    uint64* stored = at<uint64>(batch.keys, static_cast<uint64>(blockIdx.x) * batch.keys_stride);
    const Collection& collection = at<const Collection>(batch.collections)[head.collection];
    const uint32 top_m = head.top_m, tasks = head.task_end - head.task_begin;
    const bool empty = head.extends == 0, forgot = head.forgot != 0, in_registers = top_m <= WARP_KEYS;
    const Task* task = at<const Task>(batch.tasks, head.task_begin);
    const float* distance = at<const float>(batch.distances, head.task_begin);
    const auto key_of_task = [=](uint32 i) { return key_of(distance[i], task[i].node); };
    const Parents parents = {parents_at(batch, blockIdx.x), head.search_width, collection.degree * 4,
                             at<const unsigned char>(collection.graph)};
    Merged merged;
    if (in_registers) {
        merged = merge_by_warp(stored, top_m, empty, tasks, key_of_task, fresh, forgot, parents);
    } else {
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) keys[i] = empty ? NO_KEY : stored[i];
        fill_keys(keys, top_m, max(power_of_two(top_m), MERGE_KEYS));
        merged = merge(keys, top_m, tasks, key_of_task, fresh, forgot, parents, scratch);
        for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored[i] = keys[i];
    }
    const bool done = count_extend(slot, head, merged);
    if (done) {
        for (uint32 i = threadIdx.x; in_registers && i < top_m; i += blockDim.x) keys[i] = stored[i];
        __syncthreads();
        finish(batch, blockIdx.x, slot, collection, keys, scratch);
    }
    return done;
}

// The last block ends the extend, and the launch if it is time.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    merge_top_m(const Batch batch, uint32 limit, uint64 condition) {
    DYNAMIC_SHARED(shared);
    Slot* slot = slot_at(batch, blockIdx.x);
    uint32 rang = 0;  // asked for early: the answer comes over the bus
    if (limit > 1 && blockIdx.x == 0 && threadIdx.x == 0) rang = load_system(at<const uint32>(batch.doorbell));
    const Slot head = load_whole(slot);
    const bool done = head.status == ACTIVE && merge_slot(batch, slot, head, shared);
    if (!leave<true>(batch, (done ? 1 : 0) + (rang ? 1 : 0))) return;
    Counters* counters = at<Counters>(batch.counters);
    counters->tasks = 0;
    counters->extends += 1;
    counters->total_extends += 1;
    if (counters->extends < limit && counters->stop == 0) return;
    end_launch(batch);
    if (condition != 0) set_condition(condition, 0);
}
