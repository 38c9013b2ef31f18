// Sums of products of a query and rows, by teams of 8 threads a row.
//
// A row is summed in 32 lanes, chunk c in lane c % 32, and the lanes are reduced in halves: 16, 8, 4, 2, 1. A thread of a
// team holds four lanes. Products are fused only by explicit fmaf. The integer sums of int8 rows are exact.
#pragma once
#include "device.cuh"

constexpr uint32 LANES = WARP / TEAM;  // of a sum, per thread

template <uint32 KIND>
struct SumOf {
    using type = float;
};
template <>
struct SumOf<I8_DOT> {
    using type = int;
};

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

// int8 codes times int16 lanes of the query, two at a time.
template <uint32 KIND>
__device__ inline int add_chunk(int sum, uint4 row, const uint4* query) {
    const uint4 lower = query[0], upper = query[1];
    sum = __dp2a_hi(static_cast<int>(lower.y), static_cast<int>(row.x),
                    __dp2a_lo(static_cast<int>(lower.x), static_cast<int>(row.x), sum));
    sum = __dp2a_hi(static_cast<int>(lower.w), static_cast<int>(row.y),
                    __dp2a_lo(static_cast<int>(lower.z), static_cast<int>(row.y), sum));
    sum = __dp2a_hi(static_cast<int>(upper.y), static_cast<int>(row.z),
                    __dp2a_lo(static_cast<int>(upper.x), static_cast<int>(row.z), sum));
    return __dp2a_hi(static_cast<int>(upper.w), static_cast<int>(row.w),
                     __dp2a_lo(static_cast<int>(upper.z), static_cast<int>(row.w), sum));
}

// The lanes of this thread's team.
__device__ inline uint32 team_mask() { return (WHOLE_WARP >> (WARP - TEAM)) << (threadIdx.x % WARP / TEAM * TEAM); }

// Reduce over a team; every member gets the sum. `together`: the mask of converged lanes, whole teams.
template <class Sum>
__device__ inline Sum team_total(Sum sum, uint32 together) {
#pragma unroll
    for (uint32 half = TEAM / 2; half > 0; half /= 2) sum += __shfl_xor_sync(together, sum, half);
    return sum;
}

// Distance to an int8 row from its sum and its trailing step and squared norm, for either metric.
__device__ inline float code_distance(const Collection& collection, int sum, float query_step, float step, float square) {
    const float dot = static_cast<float>(sum) * query_step * step;
    return collection.kind == I8_L2 ? square - 2.0f * dot : -dot;
}

// Sum over a float32 row of `chunks` chunks; every member of the team gets it. A thread issues AT_ONCE loads before it adds.
template <uint32 KIND>
__device__ inline float team_sum(const uint4* row, const uint4* query, uint32 chunks) {
    constexpr uint32 AT_ONCE = 2;
    float sums[LANES] = {};
#pragma unroll 1
    for (uint32 round = threadIdx.x % TEAM; round < chunks; round += LANES * TEAM)
#pragma unroll
        for (uint32 begin = 0; begin < LANES; begin += AT_ONCE) {
            const uint32 first = round + begin * TEAM;
            uint4 loaded[AT_ONCE];
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++)
                if (first + i * TEAM < chunks) loaded[i] = load_row(row + first + i * TEAM);
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++)
                if (const uint32 chunk = first + i * TEAM; chunk < chunks)
                    sums[begin + i] = add_chunk<KIND>(sums[begin + i], loaded[i], query + chunk);
        }
#pragma unroll
    for (uint32 half = LANES / 2; half > 0; half /= 2)
#pragma unroll
        for (uint32 i = 0; i < half; i++) sums[i] += sums[i + half];
    return team_total(sums[0], team_mask());
}

// Distance of the slot's query to the full-precision row of an int8 row: squared L2, or minus the dot product.
__device__ inline float full_distance(const Collection& collection, const Slot* slot, uint32 node) {
    const uint32 chunks = collection.full_chunks;
    const uint4* row = at<const uint4>(collection.full, static_cast<uint64>(node) * chunks);
    const uint4* query = query_at(slot, collection.query_full);
    return collection.kind == I8_L2 ? team_sum<F32_L2>(row, query, chunks) : -team_sum<F32_DOT>(row, query, chunks);
}
