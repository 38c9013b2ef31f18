// Merging new keys into a sorted top_m: merge_top_m. A block a slot.
//
// Floor: 12 bytes a task and 8 · top_m bytes a slot, read and written; all else is in shared memory. Most new keys are
// farther than the worst of a full top_m and are dropped before anything is sorted; the rest, a power of two of them,
// are sorted and merged by bitonic networks. Steps whose pairs lie within a warp's 64 keys need no barrier of the
// block.
#pragma once
#include "keys.cuh"

struct MergeScratch {
    uint32 fresh_count;
    uint32 cursor;
    uint32 least, most, worst;  // of rescoring: floats, ordered
};

// Compare and exchange keys `stride` apart; runs of `run` keys ascend and descend in turn.
__device__ inline void exchange(uint64* keys, uint32 size, uint32 stride, uint32 run) {
    for (uint32 pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const uint32 i = (pair & ~(stride - 1)) << 1 | (pair & (stride - 1));
        const uint64 left = keys[i], right = keys[i + stride];
        if ((left > right) == !(i & run)) {
            keys[i] = right;
            keys[i + stride] = left;
        }
    }
}

// Wait for whoever shares keys in steps of these strides: a warp owns 64 keys.
__device__ inline void wait_between(uint32 stride, uint32 next) {
    if (max(stride, next) > WARP)
        __syncthreads();
    else
        __syncwarp();
}

// Sort keys that fall and then rise, or the reverse. `size` is a power of two.
__device__ inline void sort_bitonic(uint64* keys, uint32 size) {
    for (uint32 stride = size / 2; stride > 0; stride /= 2) {
        exchange(keys, size, stride, size);
        wait_between(stride, stride / 2);
    }
    __syncthreads();
}

// Sort keys. `size` is a power of two.
__device__ inline void sort(uint64* keys, uint32 size) {
    for (uint32 run = 2; run < size; run *= 2)
        for (uint32 stride = run / 2; stride > 0; stride /= 2) {
            exchange(keys, size, stride, run);
            wait_between(stride, stride > 1 ? stride / 2 : run);
        }
    sort_bitonic(keys, size);
}

__device__ inline void fill_keys(uint64* keys, uint32 begin, uint32 end) {
    for (uint32 i = begin + threadIdx.x; i < end; i += blockDim.x) keys[i] = NO_KEY;
}

// Sort `count` keys, which a table that forgets may have let through twice, and drop doubles. Returns the size, a power
// of two, of the sorted array.
__device__ inline uint32 sort_fresh(uint64* fresh, uint32 count) {
    const uint32 size = power_of_two(count);
    fill_keys(fresh, count, size);
    __syncthreads();
    sort(fresh, size);
    uint32 doubles = 0, bit = 1;
    for (uint32 i = threadIdx.x; i < count; i += blockDim.x, bit <<= 1)
        if (i > 0 && fresh[i] == fresh[i - 1]) doubles |= bit;
    if (__syncthreads_or(doubles)) {
        bit = 1;
        for (uint32 i = threadIdx.x; i < count; i += blockDim.x, bit <<= 1)
            if (doubles & bit) fresh[i] = NO_KEY;
        __syncthreads();
        sort(fresh, size);
    }
    return size;
}

// Merge `tasks` keys, key_of_task(0..), into keys[top_m]; behind these there is room for MERGE_KEYS and a power of two,
// filled with NO_KEY. `fresh` holds MERGE_KEYS. Waits for the block before it reads keys or tasks. Returns whether
// top_m changed.
template <class KeyOfTask>
__device__ inline bool merge(uint64* keys, uint32 top_m, uint32 tasks, KeyOfTask key_of_task, uint64* fresh,
                             MergeScratch* scratch) {
    bool changed = false;
    for (uint32 first = 0; first < tasks; first += MERGE_KEYS) {
        if (threadIdx.x == 0) scratch->fresh_count = 0;
        __syncthreads();
        const uint64 worst = keys[top_m - 1];
        for (uint32 i = first + threadIdx.x; i < min(first + MERGE_KEYS, tasks); i += blockDim.x) {
            const uint64 key = key_of_task(i);
            if (key < worst && !holds(keys, top_m, key)) fresh[atomicAdd(&scratch->fresh_count, 1u)] = key;
        }
        __syncthreads();
        const uint32 count = scratch->fresh_count;  // 0 stays 0; else sort_fresh waits before it changes
        if (count == 0) continue;
        changed = true;
        const uint32 added = sort_fresh(fresh, count);
        const uint32 size = max(power_of_two(top_m), added);
        // Of two sorted lists, one turned round, the smaller of each pair are the smallest of all, and bitonic.
        for (uint32 i = threadIdx.x; i < added; i += blockDim.x) {
            uint64* key = keys + size - 1 - i;
            *key = min(*key, fresh[i]);
        }
        __syncthreads();
        sort_bitonic(keys, size);
        fill_keys(keys, top_m, size);  // read again after other barriers
    }
    return changed;
}

// The first entry that has not been a parent, or top_m.
__device__ inline uint32 find_cursor(const uint64* keys, uint32 top_m, MergeScratch* scratch) {
    if (threadIdx.x == 0) scratch->cursor = top_m;
    __syncthreads();
    for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x)
        if (!(keys[i] & EXPANDED)) {
            atomicMin(&scratch->cursor, i);
            break;
        }
    __syncthreads();
    return scratch->cursor;
}
