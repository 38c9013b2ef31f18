// Merge of new keys into a sorted top_m, and selection of the next extend's parents: merge_top_m, select_parents.
//
// Floor: 12 bytes per task and 8 · top_m bytes per slot, read and written; everything else is in shared memory and
// registers. Most new keys are farther than the worst entry of a full top_m and are dropped before sorting. Up to
// WARP_FRESH of the others are sorted and merged into a top_m of up to WARP_KEYS by one warp, in registers with shuffles.
// `merge_by_warp` runs on a single warp without block barriers; `merge` runs on a block with three barriers, and handles
// larger sizes in shared memory, where steps within a warp's 64 keys need no barrier.
//
// Duplicates are possible only after the visited table has evicted a node; only then are they searched for.
#pragma once
#include "gather.cuh"

struct MergeScratch {
    uint32 fresh_count;
    uint32 cursor;  // the first unexpanded entry
    uint32 parent_count;
};

// ---- a block, keys in shared memory

// Compare-exchange keys `stride` apart; runs of `run` keys alternate between ascending and descending.
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

// Barrier between steps of these strides: of the block, or of the warp, which owns 64 keys.
__device__ inline void wait_between(uint32 stride, uint32 next) {
    if (max(stride, next) > WARP)
        __syncthreads();
    else
        __syncwarp();
}

// Sort a bitonic sequence of keys. `size` is a power of two.
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

// Sort `count` keys and drop duplicates. Returns the size of the sorted array, a power of two.
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

// Sort `count` new keys, drop duplicates and merge them into keys[top_m].
__device__ inline void merge_in_block(uint64* keys, uint32 top_m, uint64* fresh, uint32 count) {
    const uint32 added = sort_fresh(fresh, count), size = max(power_of_two(top_m), added);
    // The pairwise minima of a sorted list and a reversed one are the smallest keys of both, as a bitonic sequence.
    for (uint32 i = threadIdx.x; i < added; i += blockDim.x) {
        uint64* key = keys + size - 1 - i;
        *key = min(*key, fresh[i]);
    }
    __syncthreads();
    sort_bitonic(keys, size);
    fill_keys(keys, top_m, size);  // visible after later barriers
}

// ---- one warp, keys in registers: entry `lane + 32 · j` of a list is register j

constexpr uint32 WARP_KEYS = 256, WARP_FRESH = 128;  // maximum of a list and of new keys that one warp merges

// Compare-exchange with the lane `stride` lanes away; entries with bit `run` of their index clear are sorted ascending.
template <uint32 COUNT>
__device__ inline void exchange_lanes(uint64 (&keys)[COUNT], uint32 stride, uint32 run) {
    const uint32 lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32 j = 0; j < COUNT; j++) {
        const uint64 other = __shfl_xor_sync(WHOLE_WARP, keys[j], static_cast<int>(stride));
        const bool ascends = !((lane + WARP * j) & run), lower = !(lane & stride);
        keys[j] = (keys[j] > other) == (ascends == lower) ? other : keys[j];
    }
}

// Compare-exchange registers `stride` apart.
template <uint32 COUNT>
__device__ inline void exchange_registers(uint64 (&keys)[COUNT], uint32 stride, uint32 run) {
#pragma unroll
    for (uint32 j = 0; j < COUNT; j++) {
        if (j & stride) continue;
        const uint64 left = keys[j], right = keys[j ^ stride];
        const bool swap = (left > right) == !(WARP * j & run);
        keys[j] = swap ? right : left;
        keys[j ^ stride] = swap ? left : right;
    }
}

// Sort bitonic runs of `run` entries, alternately ascending and descending.
template <uint32 COUNT>
__device__ inline void merge_runs(uint64 (&keys)[COUNT], uint32 run) {
#pragma unroll
    for (uint32 stride = COUNT / 2; stride > 0; stride /= 2)
        if (WARP * stride < run) exchange_registers(keys, stride, run);
#pragma unroll 1
    for (uint32 stride = min(run, WARP) / 2; stride > 0; stride /= 2) exchange_lanes(keys, stride, run);
}

template <uint32 COUNT>
__device__ inline void sort_in_warp(uint64 (&keys)[COUNT]) {
#pragma unroll 1
    for (uint32 run = 2; run <= WARP * COUNT; run *= 2) merge_runs(keys, run);
}

// Sort up to 32 · COUNT new keys; with `forgot`, duplicates become NO_KEY.
template <uint32 COUNT>
__device__ inline void sort_fresh_in_warp(uint64* fresh, uint32 count, bool forgot) {
    const uint32 lane = threadIdx.x % WARP;
    uint64 keys[COUNT];
#pragma unroll
    for (uint32 j = 0; j < COUNT; j++) keys[j] = lane + WARP * j < count ? fresh[lane + WARP * j] : NO_KEY;
    for (bool doubles = true; doubles;) {
        sort_in_warp(keys);
        __syncwarp();
#pragma unroll
        for (uint32 j = 0; j < COUNT; j++)
            if (lane + WARP * j < count) fresh[lane + WARP * j] = keys[j];
        __syncwarp();
        if (!forgot) return;
        doubles = false;
#pragma unroll
        for (uint32 j = 0; j < COUNT; j++)
            if (const uint32 i = lane + WARP * j; i > 0 && i < count && fresh[i - 1] == keys[j] && keys[j] != NO_KEY) {
                keys[j] = NO_KEY;
                doubles = true;
            }
        doubles = __ballot_sync(WHOLE_WARP, doubles) != 0;
    }
}

__device__ inline void sort_fresh_in_warp(uint64* fresh, uint32 count, bool forgot) {
    if (count > 2 * WARP)
        sort_fresh_in_warp<WARP_FRESH / WARP>(fresh, count, forgot);
    else if (count > WARP)
        sort_fresh_in_warp<2>(fresh, count, forgot);
    else if (count > 1)
        sort_fresh_in_warp<1>(fresh, count, forgot);
}

// The parents of a slot's next extend, and the location of their graph rows, to prefetch them.
struct Parents {
    uint32* nodes;
    uint32 width;
    uint32 row_bytes;
    const unsigned char* graph;
};

// Select an unexpanded key as the parent of this rank. Returns the key marked as expanded.
__device__ inline uint64 as_parent(const Parents& parents, uint32 rank, uint64 key) {
    const uint32 node = node_of(key);
    parents.nodes[rank] = node;
    const unsigned char* row = parents.graph + static_cast<uint64>(node) * parents.row_bytes;
    for (uint32 offset = 0; offset < parents.row_bytes; offset += LINE_BYTES) prefetch_line(row + offset);
    return key | EXPANDED;
}

// Merge `count` sorted new keys into keys[top_m], top_m ≤ 32 · COUNT, and select the parents. One warp. Returns the number
// of parents.
template <uint32 COUNT>
__device__ inline uint32 merge_sorted(uint64* keys, uint32 top_m, const uint64* fresh, uint32 count,
                                      const Parents& parents) {
    const uint32 lane = threadIdx.x % WARP;
    uint64 top[COUNT];
#pragma unroll
    for (uint32 j = 0; j < COUNT; j++) top[j] = lane + WARP * j < top_m ? keys[lane + WARP * j] : NO_KEY;
    if (count > 0) {
        // The pairwise minima of a sorted list and a reversed one are the smallest keys of both, as a bitonic sequence.
#pragma unroll
        for (uint32 j = 0; j < COUNT; j++)
            if (const uint32 turned = WARP * (COUNT - j) - 1 - lane; turned < count) top[j] = min(top[j], fresh[turned]);
        merge_runs(top, 2 * WARP * COUNT);
    }
    uint32 found = 0;
#pragma unroll
    for (uint32 j = 0; j < COUNT; j++)
        if (found < parents.width && WARP * j < top_m) {
            const bool open = lane + WARP * j < top_m && !(top[j] & EXPANDED);
            const uint32 all = __ballot_sync(WHOLE_WARP, open), rank = found + lanes_before(all);
            if (open && rank < parents.width) {
                top[j] = as_parent(parents, rank, top[j]);
                if (count == 0) keys[lane + WARP * j] = top[j];
            }
            found += __popc(all);
        }
    if (count > 0)
#pragma unroll
        for (uint32 j = 0; j < COUNT; j++)
            if (lane + WARP * j < top_m) keys[lane + WARP * j] = top[j];
    return min(found, parents.width);
}

// The same for up to WARP_FRESH unsorted new keys and any top_m up to WARP_KEYS.
__device__ inline uint32 merge_in_warp(uint64* keys, uint32 top_m, uint64* fresh, uint32 count, bool forgot,
                                       const Parents& parents) {
    sort_fresh_in_warp(fresh, count, forgot);
    if (top_m <= 2 * WARP) return merge_sorted<2>(keys, top_m, fresh, count, parents);
    if (top_m <= 4 * WARP) return merge_sorted<4>(keys, top_m, fresh, count, parents);
    return merge_sorted<8>(keys, top_m, fresh, count, parents);
}

// ---- the merge

struct Merged {
    bool changed;         // whether top_m changed
    uint32 parent_count;  // of the next extend
};

// Merge `tasks` keys, key_of_task(0..), into sorted keys[top_m], top_m ≤ WARP_KEYS, in any memory. One warp. `fresh` has
// room for WARP_FRESH.
template <class KeyOfTask>
__device__ inline Merged merge_by_warp(uint64* keys, uint32 top_m, uint32 tasks, KeyOfTask key_of_task, uint64* fresh,
                                       bool forgot, Parents parents) {
    constexpr uint32 ROUNDS = WARP_FRESH / WARP;
    const uint32 lane = threadIdx.x % WARP, width = parents.width;
    Merged merged = {false, 0};
    uint32 first = 0;
    do {
        const uint64 worst = keys[top_m - 1];
        uint64 brought[ROUNDS];
#pragma unroll
        for (uint32 j = 0; j < ROUNDS; j++)
            brought[j] = first + WARP * j + lane < tasks ? key_of_task(first + WARP * j + lane) : NO_KEY;
        uint32 count = 0;
#pragma unroll
        for (uint32 j = 0; j < ROUNDS; j++)
            if (first + WARP * j < tasks) {
                bool is_new = brought[j] < worst;
                if (forgot && is_new) is_new = !holds(keys, top_m, brought[j]);
                const uint32 all = __ballot_sync(WHOLE_WARP, is_new);
                if (is_new) fresh[count + lanes_before(all)] = brought[j];
                count += __popc(all);
            }
        __syncwarp();
        first += WARP_FRESH;
        parents.width = first < tasks ? 0 : width;  // only in the last round
        merged.parent_count = merge_in_warp(keys, top_m, fresh, count, forgot, parents);
        merged.changed |= count > 0;
        __syncwarp();
    } while (first < tasks);
    return merged;
}

// Select the parents among sorted keys, starting at the first unexpanded one. One warp.
__device__ inline uint32 select_parents(uint64* keys, uint32 top_m, uint32 cursor, const Parents& parents) {
    const uint32 lane = threadIdx.x % WARP;
    uint32 found = 0;
    for (uint32 first = cursor; first < top_m && found < parents.width; first += WARP) {
        const uint32 i = first + lane;
        const bool open = i < top_m && !(keys[i] & EXPANDED);
        const uint32 all = __ballot_sync(WHOLE_WARP, open);
        const uint32 rank = found + lanes_before(all);
        if (open && rank < parents.width) keys[i] = as_parent(parents, rank, keys[i]);
        found += __popc(all);
    }
    return min(found, parents.width);
}

// Merge `tasks` keys, key_of_task(0..), into sorted keys[top_m] in shared memory, whose capacity is max(MERGE_KEYS, top_m
// rounded up to a power of two), padded with NO_KEY. `fresh` has room for MERGE_KEYS. Has a block barrier before it reads
// keys or tasks, and at its end. Returns the same to every thread.
template <class KeyOfTask>
__device__ inline Merged merge(uint64* keys, uint32 top_m, uint32 tasks, KeyOfTask key_of_task, uint64* fresh, bool forgot,
                               Parents parents, MergeScratch* scratch) {
    const uint32 width = parents.width;
    bool changed = false;
    uint32 first = 0;
    do {
        if (threadIdx.x == 0) {
            scratch->fresh_count = 0;
            scratch->cursor = top_m;
        }
        __syncthreads();
        const uint64 worst = keys[top_m - 1];
        for (uint32 i = first + threadIdx.x; i < min(first + MERGE_KEYS, tasks); i += blockDim.x) {
            const uint64 key = key_of_task(i);
            if (key < worst && !(forgot && holds(keys, top_m, key))) fresh[atomicAdd(&scratch->fresh_count, 1u)] = key;
        }
        __syncthreads();
        first += MERGE_KEYS;
        parents.width = first < tasks ? 0 : width;  // only in the last round
        const uint32 count = scratch->fresh_count;
        changed |= count > 0;
        if (top_m > WARP_KEYS || count > WARP_FRESH) {
            if (count > 0) merge_in_block(keys, top_m, fresh, count);
            for (uint32 i = threadIdx.x; i < top_m; i += blockDim.x)
                if (!(keys[i] & EXPANDED)) {
                    atomicMin(&scratch->cursor, i);
                    break;
                }
            __syncthreads();
            if (threadIdx.x < WARP) {
                const uint32 found = select_parents(keys, top_m, scratch->cursor, parents);
                if (threadIdx.x == 0) scratch->parent_count = found;
            }
        } else if (threadIdx.x < WARP) {
            const uint32 found = merge_in_warp(keys, top_m, fresh, count, forgot, parents);
            if (threadIdx.x == 0) scratch->parent_count = found;
        }
        __syncthreads();
    } while (first < tasks);
    return {changed, scratch->parent_count};
}
