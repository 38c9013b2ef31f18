// Several extends of each slot in one launch, a block a slot, for when few slots are active: what separate stages would
// wait for each other, blocks here need not, and keys, nodes and distances stay in shared memory; so does the visited
// table in `extend_fused_near`, which takes it from the batch's memory and puts it back, once a launch.
//
// The bytes are those of the stages, less the tasks (12 a task) and, but for the first and last extend of a launch, the
// keys. One block's loads cannot fill a device: use it while there are fewer active slots than multiprocessors.
#include "finish.cuh"

// Chunks that a thread asks for at once: as many as a block of FUSED_THREADS has registers for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr uint32 FUSED_AT_ONCE = 1;
#else
constexpr uint32 FUSED_AT_ONCE = 4;
#endif

// NEAR: the visited table is in shared memory.
template <bool NEAR>
__device__ inline void extend_slot(const Batch& batch, uint32 limit, unsigned char* shared) {
    GatherScratch* gathering = reinterpret_cast<GatherScratch*>(shared);
    MergeScratch* merging = reinterpret_cast<MergeScratch*>(gathering + 1);
    uint32* stop = reinterpret_cast<uint32*>(merging + 1);
    uint64* fresh = reinterpret_cast<uint64*>(shared + SCRATCH_BYTES);
    uint64* keys = fresh + MERGE_KEYS;
    Slot* slot = slot_at(batch, blockIdx.x);
    Counters* counters = at<Counters>(batch.counters);
    uint32 extends = 0, reasons_to_stop = 0;
    Slot head = load_whole(slot);
    if (head.status == ACTIVE) {
        const Collection& collection = at<const Collection>(batch.collections)[head.collection];
        const uint32 top_m = head.top_m, room = max(power_of_two(top_m), MERGE_KEYS);
        uint32* table = reinterpret_cast<uint32*>(keys + room);
        uint32* nodes = NEAR ? table + batch.visited_stride : table;
        float* distances = reinterpret_cast<float*>(nodes + batch.slot_tasks);
        uint64* stored = at<uint64>(batch.keys, static_cast<uint64>(blockIdx.x) * batch.keys_stride);
        uint32* kept = at<uint32>(batch.visited, static_cast<uint64>(blockIdx.x) * batch.visited_stride);
        uint32* visited = NEAR ? table : kept;
        uint32* parents = parents_at(batch, blockIdx.x);
        const Parents next = {gathering->parents, head.search_width, collection.degree * 4,
                              at<const unsigned char>(collection.graph)};
        const bool first = head.extends == 0;
        if (NEAR && !first) copy_visited(table, kept, head.visited_bits);
        if (threadIdx.x < head.parent_count) gathering->parents[threadIdx.x] = parents[threadIdx.x];
        for (uint32 i = threadIdx.x; i < room; i += blockDim.x) keys[i] = i < top_m && !first ? stored[i] : NO_KEY;
        bool done = false;
        while (!done && extends < limit && reasons_to_stop == 0) {
            uint32 rang = 0, others = 0;  // asked for early: the answers come over the bus, and from other blocks
            if (limit > 1 && threadIdx.x == 0) {
                rang = load_system(at<const uint32>(batch.doorbell));
                others = load_system(&counters->stop);
            }
            gather<1>(slot, head, collection, gathering->parents, head.parent_count, visited, nodes, &gathering->node_count);
            const uint32 count = gathering->node_count;
            for (uint32 i = threadIdx.x / SLOT_TEAM; i < count; i += blockDim.x / SLOT_TEAM) {
                const float distance = row_distance<SLOT_TEAM, FUSED_AT_ONCE>(collection, slot, nodes[i]);
                if (threadIdx.x % SLOT_TEAM == 0) distances[i] = distance;
            }
            const auto key_of_task = [=](uint32 i) { return key_of(distances[i], nodes[i]); };
            const Merged merged = merge(keys, top_m, count, key_of_task, fresh, slot->forgot != 0, next, merging);
            done = count_extend(slot, head, merged);
            if (done) finish(batch, blockIdx.x, slot, collection, keys, merging);
            head.extends += 1;
            head.unchanged = merged.changed ? 0 : head.unchanged + 1;
            head.parent_count = merged.parent_count;
            extends += 1;
            if (threadIdx.x == 0) *stop = (done ? 1 : 0) + (rang ? 1 : 0) + (others ? 1 : 0);
            __syncthreads();
            reasons_to_stop = *stop;
        }
        if (!done) {
            for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x) stored[i] = keys[i];
            if (threadIdx.x < head.parent_count) parents[threadIdx.x] = gathering->parents[threadIdx.x];
            if (NEAR) copy_visited(kept, table, head.visited_bits);
        }
        if (threadIdx.x == 0) atomicMax(&counters->extends, extends);
    }
    if (!leave<false>(batch, reasons_to_stop)) return;
    counters->total_extends += counters->extends;
    end_launch(batch);
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1) extend_fused(const Batch batch, uint32 limit) {
    DYNAMIC_SHARED(shared);
    extend_slot<false>(batch, limit, shared);
}
extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1) extend_fused_near(const Batch batch, uint32 limit) {
    DYNAMIC_SHARED(shared);
    extend_slot<true>(batch, limit, shared);
}
