// Persistent kernel: each block takes a slot from the host's rings, extends it until its query has finished or reached its
// goal, records that, and takes the next one. So queries start and finish without a launch, and independently of others.
//
// The host writes entries to two rings in its own memory. Entries of the prefill ring are taken first, except every
// EVERY_DECODE-th one. One warp at a time, of an idle block, polls the rings over the bus, 32 entries of each at once, and
// copies new entries to device memory, where the other blocks poll. A block owns a slot from its entry to its record; the
// host writes no other entry for it meanwhile, so a ring never overflows.
//
// A query's goal is the number of extends that it may reach; 0 pauses it. It is loaded at the start of each extend and
// applies at its end. If a slot stops before its query has finished, its state is stored to the batch's memory, from where
// any block can continue.
//
// A launch ends after its lifetime, even if the host process has died.
#include "block.cuh"
#include "query.cuh"

constexpr uint32 NO_ENTRY = 0, LEAVE = 1;  // not entries: an entry's lap is not 0
constexpr uint32 SLOT_MASK = (1u << SLOT_BITS) - 1;

__device__ inline uint32 lap_of(uint32 position, uint32 entries) {
    return position / entries % MAX_LAP + 1;
}

__device__ inline uint32* ring_copy(Queue* queue, uint32 ring, uint32 entries) {
    return reinterpret_cast<uint32*>(queue + 1) + ring * entries;
}

// Take the next entry of a ring, if any. One thread. The entry is read before it is taken: afterwards it may be overwritten.
__device__ inline uint32 take_entry(Queue* queue, uint32 ring, uint32 entries) {
    uint32 taken = load_relaxed(&queue->taken[ring]);
    while (load_relaxed(&queue->known[ring]) != taken) {
        __threadfence();  // SYNC POINT: known entries, and the host's writes before them, are visible
        const uint32 entry = load_relaxed(ring_copy(queue, ring, entries) + taken % entries);
        const uint32 found = atomicCAS(&queue->taken[ring], taken, taken + 1);
        if (found == taken) return entry;
        taken = found;
    }
    return NO_ENTRY;
}

// Copy the host's new entries and doorbell to device memory. One warp at a time in the grid.
__device__ inline void poll_host(const Batch& batch, Queue* queue, uint32 entries) {
    const uint32 lane = threadIdx.x % WARP;
    const uint32 rang = load_system(at<const uint32>(batch.doorbell));
    for (uint32 ring = 0; ring < RINGS; ring++) {
        const uint32 known = load_relaxed(&queue->known[ring]), position = known + lane;
        // SYNC POINT: the line and the goal, written by the host before the entry, are visible.
        const uint32 entry = load_acquire_system(at<const uint32>(batch.rings, ring * entries + position % entries));
        const uint32 all = __ballot_sync(WHOLE_WARP, entry >> LAP_SHIFT == lap_of(position, entries));
        const uint32 count = all == WHOLE_WARP ? WARP : __ffs(static_cast<int>(~all)) - 1;
        if (lane < count) store_relaxed(ring_copy(queue, ring, entries) + position % entries, entry);
        __threadfence();  // SYNC POINT: entries are written before `known`
        __syncwarp();
        if (lane == 0 && count > 0) atomicExch(&queue->known[ring], known + count);
    }
    if (lane == 0 && rang) atomicExch(&queue->stop, 1u);
}

// Wait for the block's next entry, or LEAVE. One warp; the result is in its first lane.
__device__ inline uint32 next_entry(const Batch& batch, uint32 entries, uint64 end) {
    Queue* queue = at<Queue>(batch.queue);
    bool polls = false;
    for (;;) {
        uint32 entry = NO_ENTRY;
        if (threadIdx.x % WARP == 0) {
            const uint32 taken = load_relaxed(&queue->taken[PREFILL_RING]) + load_relaxed(&queue->taken[DECODE_RING]);
            const uint32 first = taken % EVERY_DECODE == EVERY_DECODE - 1 ? DECODE_RING : PREFILL_RING;
            if (load_relaxed(&queue->stop) != 0 || clock_ns() >= end) entry = LEAVE;
            if (entry == NO_ENTRY) entry = take_entry(queue, first, entries);
            if (entry == NO_ENTRY) entry = take_entry(queue, RINGS - 1 - first, entries);
            // SYNC POINT: the polling warp sees `known` of its predecessor.
            if (entry == NO_ENTRY && !polls && atomicCAS(&queue->polling, 0u, 1u) == 0) {
                polls = true;
                __threadfence();
            }
            if (entry != NO_ENTRY && polls) {
                __threadfence();  // for the next polling warp
                atomicExch(&queue->polling, 0u);
            }
        }
        if (__ballot_sync(WHOLE_WARP, entry != NO_ENTRY) != 0) return entry;
        if (__ballot_sync(WHOLE_WARP, polls) != 0)
            poll_host(batch, queue, entries);
        else
            rest();
    }
}

// Stop condition: the query has reached its goal, or the launch's lifetime is over.
struct ResidentStop {
    const uint32* goal;
    uint64 end;
    uint32 loaded;

    __device__ void load() { loaded = load_system(goal); }
    __device__ uint32 reasons(uint32 extends) const { return (loaded <= extends ? 1 : 0) + (clock_ns() >= end ? 1 : 0); }
};

// Return a slot to the host.
__device__ inline void record_slot(const Batch& batch, Queue* queue, uint32 slot_number, uint32 extends, bool done,
                                   uint32 entries) {
    const uint32 position = atomicAdd(&queue->records, 1u);
    Record* record = at<Record>(batch.records, position % entries);
    record->extends = extends;
    const uint32 slot = lap_of(position, entries) << LAP_SHIFT | (done ? IS_DONE : 0) | slot_number;
    store_release_system(&record->slot, slot);
}

// Process an entry.
__device__ inline void serve(const Batch& batch, Queue* queue, uint32 entry, uint32 entries, uint64 end,
                             uint32 places, unsigned char* shared) {
    const uint32 slot_number = entry & SLOT_MASK;
    BlockScratch* scratch = reinterpret_cast<BlockScratch*>(shared);
    Slot* slot = slot_at(batch, slot_number);
    ResidentStop stop = {at<const uint32>(batch.goals, slot_number), end, 0};
    if (threadIdx.x == 0) scratch->reasons = load_system(stop.goal);
    if (entry & IS_NEW) {
        const uint4* line = at<const uint4>(batch.lines + static_cast<uint64>(slot_number) * batch.line_bytes);
        const uint32 bytes = entry & IS_IN_PLACE ? sizeof(Slot) : batch.line_bytes;
        for (uint32 i = threadIdx.x; i < bytes / CHUNK_BYTES; i += blockDim.x)
            reinterpret_cast<uint4*>(slot)[i] = load_now(line + i);
    }
    __syncthreads();
    const uint32 goal = scratch->reasons;
    Slot head = load_whole(slot);
    if ((entry & IS_IN_PLACE) &&
        !prepare_query(slot, collection_at(batch, head.collection), head.vector, shared + SCRATCH_BYTES)) {
        if (threadIdx.x != 0) return;
        publish_invalid(batch, slot_number, slot);
        record_slot(batch, queue, slot_number, 0, true, entries);
        return;
    }
    head.visited_bits = min(head.visited_bits, RESIDENT_VISITED_BITS);
    const uint32 table_words = min(batch.visited_stride, 1u << RESIDENT_VISITED_BITS);
    const uint32 limit = goal > head.extends ? ~0u : 0;
    __syncthreads();
    const SlotRun run =
        extend_slot(batch, slot_number, head, (entry & IS_NEW) != 0, table_words, places, limit, stop, shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) record_slot(batch, queue, slot_number, head.extends + run.extends, run.reasons >= QUERY_DONE, entries);
}

extern "C" __global__ void __launch_bounds__(RESIDENT_THREADS, 2)
    extend_resident(const Batch batch, uint32 entries, uint32 life_us, uint32 places) {
    DYNAMIC_SHARED(shared);
    BlockScratch* scratch = reinterpret_cast<BlockScratch*>(shared);
    Queue* queue = at<Queue>(batch.queue);
    const uint64 end = clock_ns() + life_us * 1000ull;
    for (;;) {
        if (threadIdx.x < WARP) {
            const uint32 entry = next_entry(batch, entries, end);
            if (threadIdx.x == 0) scratch->reasons = entry;
        }
        __syncthreads();
        const uint32 entry = scratch->reasons;
        __syncthreads();
        if (entry == LEAVE) break;
        serve(batch, queue, entry, entries, end, places, shared);
        __syncthreads();
    }
    if (!leave<false>(batch, 0)) return;
    Progress* progress = at<Progress>(batch.progress);
    progress->taken = queue->taken[PREFILL_RING] + queue->taken[DECODE_RING];
    progress->recorded = queue->records;
    queue->stop = 0;
    end_launch(batch);
}
