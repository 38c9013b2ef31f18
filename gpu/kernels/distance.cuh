// Sums of products of a query and rows, by teams of 8 threads a row.
//
// A row is summed in 32 lanes, chunk c in lane c % 32, and the lanes are reduced in halves: 16, 8, 4, 2, 1. A thread of a
// team holds four lanes. Products are fused only by explicit fmaf.
#pragma once
#include "device.cuh"

constexpr uint32 LANES = WARP / TEAM;  // of a sum, per thread

template <uint32 KIND>
__device__ inline float add_term(float sum, float value, uint32 query_bits) {
    const float query = __uint_as_float(query_bits);
    if constexpr (KIND % 2 == 0) {
        const float difference = value - query;
        return fmaf(difference, difference, sum);
    } else {
        return fmaf(value, query, sum);
    }
}

// Add a chunk of a row to a sum; `query` points to the query's part of the same lanes.
template <uint32 KIND>
__device__ inline float add_chunk(float sum, uint4 row, const uint4* query) {
    if constexpr (KIND < F16_L2) {
        const uint4 part = query[0];
        sum = add_term<KIND>(sum, __uint_as_float(row.x), part.x);
        sum = add_term<KIND>(sum, __uint_as_float(row.y), part.y);
        sum = add_term<KIND>(sum, __uint_as_float(row.z), part.z);
        return add_term<KIND>(sum, __uint_as_float(row.w), part.w);
    } else {
        const uint4 lower = query[0], upper = query[1];
        sum = add_term<KIND>(sum, float_of_half(row.x & 0xFFFF), lower.x);
        sum = add_term<KIND>(sum, float_of_half(row.x >> 16), lower.y);
        sum = add_term<KIND>(sum, float_of_half(row.y & 0xFFFF), lower.z);
        sum = add_term<KIND>(sum, float_of_half(row.y >> 16), lower.w);
        sum = add_term<KIND>(sum, float_of_half(row.z & 0xFFFF), upper.x);
        sum = add_term<KIND>(sum, float_of_half(row.z >> 16), upper.y);
        sum = add_term<KIND>(sum, float_of_half(row.w & 0xFFFF), upper.z);
        return add_term<KIND>(sum, float_of_half(row.w >> 16), upper.w);
    }
}

// Reduce over a team; every member gets the sum. `together`: the mask of converged lanes, whole teams.
__device__ inline float team_total(float sum, uint32 together) {
#pragma unroll
    for (uint32 half = TEAM / 2; half > 0; half /= 2) sum += __shfl_xor_sync(together, sum, half);
    return sum;
}
