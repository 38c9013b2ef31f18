// Distances between a query and rows, by teams of 8, 16 or 32 threads.
//
// Floor: the bytes of the rows, each read once: distances · d · itemsize. Every thread has up to four loads of 16 bytes in
// flight, as registers allow; the query stays in L1, which row loads bypass.
//
// A row is summed in 32 lanes, chunk c in lane c % 32, and the lanes are reduced in halves: 16, 8, 4, 2, 1. A thread of a
// smaller team holds several lanes, so sums are bit-identical for every team. Products are fused only by explicit fmaf.
// The integer sums of int8 rows are exact.
#pragma once
#include "device.cuh"

constexpr uint32 SLOT_TEAM = 8;  // team size in blocks that serve one slot

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
template <uint32 TEAM>
__device__ inline uint32 team_mask() {
    return (WHOLE_WARP >> (WARP - TEAM)) << (threadIdx.x % WARP / TEAM * TEAM);
}

// Reduce over a team; every member gets the sum. `together`: the mask of converged lanes, whole teams.
template <uint32 TEAM, class Sum>
__device__ inline Sum team_total(Sum sum, uint32 together) {
#pragma unroll
    for (uint32 half = TEAM / 2; half > 0; half /= 2) sum += __shfl_xor_sync(together, sum, half);
    return sum;
}

// Sum over a row of `chunks` chunks; every member of the team gets it. A thread issues AT_ONCE loads before it adds.
template <uint32 KIND, uint32 TEAM, uint32 AT_ONCE>
__device__ inline typename SumOf<KIND>::type team_sum(const uint4* row, const uint4* query, uint32 chunks) {
    constexpr uint32 LANES = WARP / TEAM, LOADS = LANES < AT_ONCE ? AT_ONCE : LANES;
    constexpr uint32 QUERY_CHUNKS = KIND < F16_L2 ? 1 : 2;
    typename SumOf<KIND>::type sums[LANES] = {};
#pragma unroll 1
    for (uint32 round = threadIdx.x % TEAM; round < chunks; round += LOADS * TEAM)
#pragma unroll
        for (uint32 begin = 0; begin < LOADS; begin += AT_ONCE) {
            const uint32 first = round + begin * TEAM;
            uint4 loaded[AT_ONCE];
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++)
                if (first + i * TEAM < chunks) loaded[i] = load_row(row + first + i * TEAM);
#pragma unroll
            for (uint32 i = 0; i < AT_ONCE; i++)
                if (const uint32 chunk = first + i * TEAM; chunk < chunks)
                    sums[(begin + i) % LANES] =
                        add_chunk<KIND>(sums[(begin + i) % LANES], loaded[i], query + chunk * QUERY_CHUNKS);
        }
#pragma unroll
    for (uint32 half = LANES / 2; half > 0; half /= 2)
#pragma unroll
        for (uint32 i = 0; i < half; i++) sums[i] += sums[i + half];
    return team_total<TEAM>(sums[0], team_mask<TEAM>());
}

// Distance to an int8 row from its sum and its trailing step and squared norm, for either metric.
__device__ inline float code_distance(const Collection& collection, int sum, float query_step, float step, float square) {
    const float dot = static_cast<float>(sum) * query_step * step;
    return collection.kind == I8_L2 ? square - 2.0f * dot : -dot;
}

// Distance of the slot's query to a stored row: squared L2, or minus the dot product; for int8 codes without the
// constant |q - c|² or c · q (gpu/index/rows.py). Every member of the team gets it.
template <uint32 TEAM, uint32 AT_ONCE>
__device__ inline float row_distance(const Collection& collection, const Slot* slot, uint32 node) {
    const uint32 chunks = collection.row_chunks;
    const uint4* row = at<const uint4>(collection.rows, static_cast<uint64>(node) * chunks);
    const uint4* query = query_at(slot, collection.query_row);
    switch (collection.kind) {
        case F32_L2: return team_sum<F32_L2, TEAM, AT_ONCE>(row, query, chunks);
        case F32_DOT: return -team_sum<F32_DOT, TEAM, AT_ONCE>(row, query, chunks);
        case F16_L2: return team_sum<F16_L2, TEAM, AT_ONCE>(row, query, chunks);
        case F16_DOT: return -team_sum<F16_DOT, TEAM, AT_ONCE>(row, query, chunks);
        default:
            const float* step_and_square = reinterpret_cast<const float*>(row + chunks) - 2;
            const float query_step = *reinterpret_cast<const float*>(query_at(slot, CODE_STEP));
            const int sum = team_sum<I8_DOT, TEAM, AT_ONCE>(row, query, chunks);
            return code_distance(collection, sum, query_step, step_and_square[0], step_and_square[1]);
    }
}

// Distance of the slot's query to the full-precision row of an int8 row.
template <uint32 TEAM, uint32 AT_ONCE>
__device__ inline float full_distance(const Collection& collection, const Slot* slot, uint32 node) {
    const uint32 chunks = collection.full_chunks;
    const uint4* row = at<const uint4>(collection.full, static_cast<uint64>(node) * chunks);
    const uint4* query = query_at(slot, collection.query_full);
    return collection.kind == I8_L2 ? team_sum<F32_L2, TEAM, AT_ONCE>(row, query, chunks)
                                    : -team_sum<F32_DOT, TEAM, AT_ONCE>(row, query, chunks);
}
