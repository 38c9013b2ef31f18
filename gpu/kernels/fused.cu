// Several extends of each slot in one launch, one block per slot, for few active slots: blocks do not wait for each other,
// as separate stages would. One block's loads cannot saturate a device, so this form is for fewer active slots than
// multiprocessors.
#include "block.cuh"

// Stop condition: another slot has finished, or the doorbell has rung.
struct LaunchStop {
    const Batch& batch;
    uint32 rang, others;

    __device__ void load() {
        rang = load_system(at<const uint32>(batch.doorbell));
        others = load_system(&at<Counters>(batch.counters)->stop);
    }
    __device__ uint32 reasons(uint32) const { return (rang ? 1 : 0) + (others ? 1 : 0); }
};

template <bool NEAR>
__device__ inline void extend_of_launch(const Batch& batch, uint32 limit, uint32 places, unsigned char* shared) {
    Counters* counters = at<Counters>(batch.counters);
    const Slot head = load_whole(slot_at(batch, blockIdx.x));
    uint32 reasons_to_stop = 0;
    if (head.status == ACTIVE) {
        const LaunchStop stop = {batch, 0, 0};
        const SlotRun run =
            extend_slot<NEAR>(batch, blockIdx.x, head, false, batch.visited_stride, places, limit, stop, shared);
        if (threadIdx.x == 0) atomicMax(&counters->extends, run.extends);
        reasons_to_stop = run.reasons;
    }
    if (!leave<false>(batch, reasons_to_stop)) return;
    counters->total_extends += counters->extends;
    end_launch(batch);
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1)
    extend_fused(const Batch batch, uint32 limit, uint32 places) {
    DYNAMIC_SHARED(shared);
    extend_of_launch<false>(batch, limit, places, shared);
}
extern "C" __global__ void __launch_bounds__(FUSED_THREADS, 1)
    extend_fused_near(const Batch batch, uint32 limit, uint32 places) {
    DYNAMIC_SHARED(shared);
    extend_of_launch<true>(batch, limit, places, shared);
}
