// Primitives that differ between a device and the emulation on a CPU, which defines its own (tests/cuda/host.h).
#pragma once
#include "layout.cuh"

#ifndef TRINITY_EMULATED

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                                unsigned int value);

__device__ inline float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Load 16 bytes of device memory at this point: the assembler would move a plain load behind the next branch, and delay
// the loads that depend on it.
__device__ inline uint4 load_now(const uint4* address) {
    uint4 chunk;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "l"(address));
    return chunk;
}

// Convert an address of device or pinned memory to a pointer that the compiler knows to be global, not shared.
__device__ inline void* global_pointer(uint64 address) { return __cvta_global_to_generic(address); }

// Prefetch 128 bytes of device memory into L2.
__device__ inline void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Return the value as an optimisation barrier: nothing is computed from it earlier, so no register holds that meanwhile.
__device__ inline uint32 computed_here(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Copy 16 bytes of a row asynchronously to shared memory, bypassing L1. They are visible to this thread after it has waited
// for their group.
__device__ inline void copy_row(uint4* target, const uint4* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32>(__cvta_generic_to_shared(target))),
                 "l"(__cvta_generic_to_global(source))
                 : "memory");
}

// Commit the thread's copies since the last group as a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for the thread's copies except those of its last `LATER` groups.
template <uint32 LATER>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Load a word of host memory that may change at any time.
__device__ inline uint32 load_system(const uint32* address) {
    uint32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// The same with acquire semantics: stores before the writer's release store are visible afterwards.
__device__ inline uint32 load_acquire_system(const uint32* address) {
    uint32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Load a word of device memory that other blocks may write at any time.
__device__ inline uint32 load_relaxed(const uint32* address) {
    uint32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ inline void store_relaxed(uint32* address, uint32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Nanoseconds on a clock common to all blocks.
__device__ inline uint64 clock_ns() {
    uint64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

// Yield the multiprocessor to other warps for about 0.5 µs.
__device__ inline void rest() { __nanosleep(500); }

// SYNC POINT: a reader anywhere in the system that loads this value with acquire sees all earlier writes.
__device__ inline void store_release_system(uint32* address, uint32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// 1 / value with an error of at most 1 ulp; +inf for 0.
__device__ inline float reciprocal(uint32 value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(static_cast<float>(value)));
    return result;
}

__device__ inline void set_condition(uint64 handle, uint32 value) { cudaGraphSetConditional(handle, value); }

#endif

constexpr uint32 WARP = 32, LINE_BYTES = 128;
constexpr uint32 WHOLE_WARP = 0xFFFFFFFFu;

template <class T>
__device__ inline T* at(uint64 address, uint64 index = 0) {
    return static_cast<T*>(global_pointer(address)) + index;
}

__device__ inline Slot* slot_at(const Batch& batch, uint32 slot) {
    return at<Slot>(batch.slots + static_cast<uint64>(slot) * batch.line_bytes);
}

// Load a value with as few loads as possible, all issued at once.
template <class T>
__device__ inline T load_whole(const T* address) {
    static_assert(sizeof(T) % sizeof(uint4) == 0, "whole chunks");
    alignas(uint4) T value;
#pragma unroll
    for (uint32 i = 0; i < sizeof(T) / sizeof(uint4); i++)
        reinterpret_cast<uint4*>(&value)[i] = load_now(reinterpret_cast<const uint4*>(address) + i);
    return value;
}

// The tasks of a slot's next extend: nodes and distances.
__device__ inline uint32* nodes_at(const Batch& batch, uint32 slot) {
    return at<uint32>(batch.nodes, static_cast<uint64>(slot) * batch.slot_tasks);
}
__device__ inline float* distances_at(const Batch& batch, uint32 slot) {
    return at<float>(batch.distances, static_cast<uint64>(slot) * batch.slot_tasks);
}

__device__ inline uint64* keys_at(const Batch& batch, uint32 slot) {
    return at<uint64>(batch.keys, static_cast<uint64>(slot) * batch.keys_stride);
}

__device__ inline uint32* visited_at(const Batch& batch, uint32 slot) {
    return at<uint32>(batch.visited, static_cast<uint64>(slot) * batch.visited_stride);
}

__device__ inline const Collection& collection_at(const Batch& batch, uint32 number) {
    return at<const Collection>(batch.collections)[number];
}

__device__ inline Result* result_at(const Batch& batch, uint32 slot) {
    return at<Result>(batch.results + static_cast<uint64>(slot) * batch.result_bytes);
}

// The query of a slot's line, at an offset in bytes.
__device__ inline const uint4* query_at(const Slot* slot, uint32 offset) {
    return reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(slot + 1) + offset);
}

// Number of lanes in a mask before this thread's lane.
__device__ inline uint32 lanes_before(uint32 mask) { return __popc(mask & ((1u << threadIdx.x % WARP) - 1)); }

// Block barrier; a warp barrier if the block is one warp.
template <bool ONE_WARP>
__device__ inline void wait_for_block() {
    if constexpr (ONE_WARP)
        __syncwarp();
    else
        __syncthreads();
}

__device__ inline uint32 power_of_two(uint32 count) { return count <= 1 ? 1 : 1u << (32 - __clz(count - 1)); }
