// CUDA C++ on a CPU: a block's threads are fibers, which yield at barriers and warp exchanges and are resumed in a
// seeded random order; blocks run one after another, also in random order. Included before the kernels' source.
//
// Resident blocks (extend_resident) are threads of the process, which run concurrently with each other and with other
// commands. Under the thread sanitizer all blocks are threads. Atomic operations are relaxed, as on a device, and order
// nothing by themselves; fences do (see tsan.h). Data that one block reads from another must pass a fence, an atomic word
// and a fence, or the sanitizer reports a race. It sees no races within a block.
//
// Errors on a device terminate the process with a line on stderr: threads of a block at different barriers, a barrier
// that some threads have left, a shuffle whose partners never arrive. Dynamic shared memory is a heap block of the
// requested size, filled with 0xA5 for each block, so the address sanitizer detects accesses outside of it. Asynchronous
// copies to it land when the thread waits for them and not before; until then the target is poisoned.
#pragma once
#define TRINITY_EMULATED

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>

using std::fabs;
using std::max;
using std::min;
using std::sqrt;

#define __global__
#define __device__
#define __noinline__
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* name = emulated::shared_memory()

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

namespace emulated {

enum class Exchange { ballot, shuffle_xor, barrier };

extern thread_local Index thread, block, threads, blocks;
unsigned char* shared_memory();
int block_barrier(int value, int line);  // returns the or of all values
uint64_t warp_exchange(Exchange kind, unsigned mask, uint64_t value, int operand);
void maybe_yield();
void before_atomic(void* address);
void after_atomic(const void* address);
void fence();
void copy_later(void* target, const void* source, unsigned bytes);
void commit_copies();
void wait_for_copies(unsigned later);
int injected_fault();  // the number of the injected fault that a test has selected, or -1

template <class T>
uint64_t bits_of(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T, class Bits>
T value_of(Bits bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define blockDim emulated::threads
#define gridDim emulated::blocks

#define __syncthreads() static_cast<void>(emulated::block_barrier(0, __LINE__))
#define __syncthreads_or(value) emulated::block_barrier(static_cast<int>(value), __LINE__)
inline void __syncwarp(unsigned mask = ~0u) { emulated::warp_exchange(emulated::Exchange::barrier, mask, 0, 0); }

inline unsigned __ballot_sync(unsigned mask, bool value) {
    return static_cast<unsigned>(emulated::warp_exchange(emulated::Exchange::ballot, mask, value, 0));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    const uint64_t bits = emulated::bits_of(value);
    return emulated::value_of<T>(emulated::warp_exchange(emulated::Exchange::shuffle_xor, mask, bits, distance));
}

// Other fibers may run between any two atomic operations.
template <class T, class Change>
T atomically(T* address, Change change) {
    emulated::maybe_yield();
    emulated::before_atomic(address);
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &old, change(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    emulated::after_atomic(address);
    return old;
}
template <class T>
T atomicAdd(T* address, T value) {
    return atomically(address, [=](T old) { return old + value; });
}
inline unsigned atomicInc(unsigned* address, unsigned most) {
    return atomically(address, [=](unsigned old) { return old >= most ? 0 : old + 1; });
}
template <class T>
T atomicMin(T* address, T value) {
    return atomically(address, [=](T old) { return min(old, value); });
}
template <class T>
T atomicMax(T* address, T value) {
    return atomically(address, [=](T old) { return max(old, value); });
}
template <class T>
T atomicExch(T* address, T value) {
    return atomically(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
    return atomically(address, [=](T old) { return old == expected ? value : old; });
}

inline void __threadfence() { emulated::fence(); }
inline void __threadfence_system() { emulated::fence(); }

inline int __clz(unsigned value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __float_as_uint(float value) { return emulated::value_of<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return emulated::value_of<float>(bits); }

inline float float_of_half(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
    return sign ? -size : size;  // no infinities: gpu/index/rows.py keeps values in range
}

inline uint4 load_now(const uint4* address) { return *address; }
inline unsigned computed_here(unsigned value) { return value; }
inline void copy_row(uint4* target, const uint4* source) { emulated::copy_later(target, source, sizeof(uint4)); }
inline void commit_copies() { emulated::commit_copies(); }
template <unsigned LATER>
void wait_for_copies() {
    emulated::wait_for_copies(LATER);
}
inline void prefetch_line(const void*) {}
inline void* global_pointer(unsigned long long address) { return reinterpret_cast<void*>(address); }
inline unsigned load_system(const unsigned* address) {
    const unsigned value = __atomic_load_n(address, __ATOMIC_RELAXED);
    emulated::after_atomic(address);
    return value;
}
inline void store_release_system(unsigned* address, unsigned value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
// A waiting thread yields the core: the first of a warp sleeps for the whole warp.
inline void doze(long ns) {
    const timespec while_others_work = {0, ns};
    if (threadIdx.x % 32 == 0) nanosleep(&while_others_work, nullptr);
}
inline unsigned load_acquire_system(const unsigned* address) {
    doze(20000);  // latency of the bus
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline unsigned load_relaxed(const unsigned* address) { return load_system(address); }
inline void store_relaxed(unsigned* address, unsigned value) {
    emulated::before_atomic(address);
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long clock_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000000000ull * time.tv_sec + time.tv_nsec;
}
inline void rest() { doze(100000); }
inline float reciprocal(unsigned value) { return 1.0f / static_cast<float>(value); }
inline void set_condition(unsigned long long handle, unsigned value) { *reinterpret_cast<unsigned*>(handle) = value; }
