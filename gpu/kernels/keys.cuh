// Entries of top_m, as on the CPU (gpu/cpu/extend/keys.py): the distance's bits, mapped so that integers order as the floats
// do, then the node's 31 bits, then one bit "expanded". All keys of a query differ, so sorting is deterministic: it does
// not depend on the order of threads and blocks.
#pragma once
#include "device.cuh"

constexpr uint64 NO_KEY = ~0ull;  // sorts last, and counts as expanded
constexpr uint64 EXPANDED = 1;

// Map floats to integers of the same order, and back.
__device__ inline uint32 ordered_of(float value) {
    const uint32 bits = __float_as_uint(value + 0.0f);  // -0 becomes +0, so that they tie
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float float_of(uint32 ordered) {
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

__device__ inline uint64 key_of(float distance, uint32 node) {
    return static_cast<uint64>(ordered_of(distance)) << 32 | static_cast<uint64>(node) << 1;
}

__device__ inline float distance_of(uint64 key) { return float_of(static_cast<uint32>(key >> 32)); }

__device__ inline uint32 node_of(uint64 key) { return static_cast<uint32>(key) >> 1; }

// Whether ascending keys contain this key, expanded or not.
__device__ inline bool holds(const uint64* keys, uint32 count, uint64 key) {
    uint32 position = 0;
    while (count > 0) {
        const uint32 half = (count + 1) / 2;
        position += keys[position + half - 1] < key ? half : 0;
        count -= half;
    }
    return (keys[position] & ~EXPANDED) == key;
}
