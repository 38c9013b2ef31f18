// A block extends each slot, without the rings of the resident kernel: for tests of block.cuh and of the end of a launch.

struct NoReason {
    __device__ void load() {}
    __device__ uint32 reasons(uint32) const { return 0; }
};

extern "C" __global__ void extend_in_blocks(const Batch batch, uint32 limit, uint32 places) {
    DYNAMIC_SHARED(shared);
    Counters* counters = at<Counters>(batch.counters);
    const Slot head = load_whole(slot_at(batch, blockIdx.x));
    uint32 reasons_to_stop = 0;
    if (head.status == ACTIVE) {
        const SlotRun run =
            extend_slot(batch, blockIdx.x, head, false, batch.visited_stride, places, limit, NoReason{}, shared);
        if (threadIdx.x == 0) atomicMax(&counters->extends, run.extends);
        reasons_to_stop = run.reasons;
    }
    if (!leave<false>(batch, reasons_to_stop)) return;
    counters->total_extends += counters->extends;
    end_launch(batch);
}
