// Distances of a slot's query to rows, by the block that serves the slot, or by one warp (compute_distances): rows are
// copied asynchronously into a ring in shared memory, far ahead of their use.
//
// Floor: the rows' bytes, each read once (distances · d · itemsize), and one memory latency. A memory of 4.8 TB/s with a
// latency of 0.65 µs is saturated by 3.1 MB in flight, 24 KB for each of 132 multiprocessors. A team that loads a row, or
// four chunks per thread of it, adds them and then loads more has at most 512 bytes in flight, and none while it adds. With
// eight places per thread a warp has 4 KB in flight, and while half of that is added still 2 KB.
//
// A thread adds only chunks that it has copied itself, so no barriers are needed. The order of summation is distance.cuh's.
#pragma once
#include "distance.cuh"

constexpr uint32 PAIR = 2;  // chunks that a thread adds together

// Shared memory for in-flight chunks, `places` per thread: place p of lane l of warp w is chunks[(w · places + p) · 32 + l].
struct Ring {
    uint4* chunks;
    uint32 places;
};

// The rows of a slot are shared by all warps of the block, or are those of one warp.
template <bool ONE_WARP>
__device__ inline uint32 first_row(uint32 thread) {
    return ONE_WARP ? 0 : thread / WARP * (WARP / TEAM);
}
template <bool ONE_WARP>
__device__ inline uint32 rows_at_once() {
    return ONE_WARP ? WARP / TEAM : blockDim.x / TEAM;
}

// A warp's position in the rows; each of its teams processes one row at a time: the first team's row, and the first chunk of
// a piece of it, which has PIECE chunks per thread.
template <uint32 PIECE, bool ONE_WARP>
struct RowCursor {
    uint32 row, piece;

    // Advance to the next piece. Returns whether the row is complete.
    __device__ bool step(uint32 chunks) {
        piece += PIECE * TEAM;
        if (PIECE == LANES && piece < chunks) return false;
        piece = 0;
        row += rows_at_once<ONE_WARP>();
        return true;
    }
};

// The ring has two halves: one is in flight while the other is added. LONG: rows of several pieces of LANES chunks per
// thread, one piece per half; a ring too small for two pieces has one half. Other rows are one piece of PAIR chunks per
// thread or one, and a half holds as many rows as fit.
template <uint32 KIND, bool LONG, bool ONE_WARP>
__device__ inline void ring_distances(const Collection& collection, const Slot* slot, const uint32* nodes, uint32 count,
                                      float* distances, Ring ring) {
    constexpr uint32 PIECE = LONG ? LANES : PAIR, QUERY_CHUNKS = KIND < F16_L2 ? 1 : 2;
    const uint32 thread = computed_here(threadIdx.x), lane = thread % TEAM, team = thread % WARP / TEAM;
    const uint32 chunks = collection.row_chunks;
    RowCursor<PIECE, ONE_WARP> fetched = {first_row<ONE_WARP>(thread), 0}, added = fetched;
    if (added.row >= count) return;
    const unsigned char* rows = at<const unsigned char>(collection.rows) + lane * CHUNK_BYTES;
    const uint4* query = query_at(slot, QUERY_ROW) + lane * QUERY_CHUNKS;
    uint4 kept[PAIR * QUERY_CHUNKS] = {};  // the lane's part of the query, for short rows
    if (!LONG)
#pragma unroll
        for (uint32 j = 0; j < PAIR * QUERY_CHUNKS; j++)
            if (const uint32 chunk = j / QUERY_CHUNKS * TEAM; chunk + lane < chunks)
                kept[j] = query[chunk * QUERY_CHUNKS + j % QUERY_CHUNKS];

    const uint32 stride = (LONG || chunks > TEAM ? PIECE : 1) * WARP;
    const uint32 half = LONG ? PIECE * WARP : ring.places / 2 * WARP;
    const bool two = !LONG || ring.places >= 2 * PIECE;  // halves
    // The half to fill next, and the other. Indices, since NVRTC 13.0 does not end on pointers that alternate.
    uint32 next = thread / WARP * ring.places * WARP + thread % WARP, last = two ? next + half : next;
    float sums[2][PAIR] = {};  // of a pair's lanes, and of the next pair's
    const auto fetch = [&] {
#pragma unroll 1
        for (uint32 place = next; place != next + half && fetched.row < count; place += stride) {
            const uint32 i = fetched.row + team, left = i < count ? chunks : 0;
            const unsigned char* row = rows + static_cast<uint64>(nodes[min(i, count - 1)]) * (chunks * CHUNK_BYTES);
            const uint4* piece = reinterpret_cast<const uint4*>(row + fetched.piece * CHUNK_BYTES);
#pragma unroll
            for (uint32 j = 0; j < PIECE; j++)
                if (fetched.piece + j * TEAM + lane < left) copy_row(ring.chunks + place + j * WARP, piece + j * TEAM);
            fetched.step(chunks);
        }
        commit_copies();
        const uint32 filled = next;
        next = last;
        last = filled;
    };
    if (two) fetch();
    while (added.row < count) {
        fetch();
        if (two)
            wait_for_copies<1>();
        else
            wait_for_copies<0>();
#pragma unroll 1
        for (uint32 place = next; place != next + half && added.row < count; place += stride) {
            const uint32 i = added.row + team, left = i < count ? chunks : 0;
            uint32 number = added.piece + lane, now = place;
#pragma unroll 1
            for (uint32 n = 0; n < PIECE / PAIR; n++) {  // not unrolled: too few registers
#pragma unroll
                for (uint32 j = 0; j < PAIR; j++)
                    if (number + j * TEAM < left) {
                        const uint4 chunk = ring.chunks[now + j * WARP];
                        const uint4* part = LONG ? query + (number - lane + j * TEAM) * QUERY_CHUNKS : kept + j * QUERY_CHUNKS;
                        sums[0][j] = add_chunk<KIND>(sums[0][j], chunk, part);
                    }
                if (!LONG) continue;
#pragma unroll
                for (uint32 j = 0; j < PAIR; j++) {
                    const float sum = sums[0][j];
                    sums[0][j] = sums[1][j];
                    sums[1][j] = sum;
                }
                number += PAIR * TEAM;
                now += PAIR * WARP;
            }
            if (!added.step(chunks)) continue;
            const float sum = team_total((sums[0][0] + sums[1][0]) + (sums[0][1] + sums[1][1]), WHOLE_WARP);
            if (lane == 0 && i < count) distances[i] = KIND % 2 == 0 ? sum : -sum;
            sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0;
        }
    }
}

template <uint32 KIND, bool ONE_WARP>
__device__ inline void ring_distances(const Collection& collection, const Slot* slot, const uint32* nodes, uint32 count,
                                      float* distances, Ring ring) {
    if (collection.row_chunks > PAIR * TEAM)
        ring_distances<KIND, true, ONE_WARP>(collection, slot, nodes, count, distances, ring);
    else
        ring_distances<KIND, false, ONE_WARP>(collection, slot, nodes, count, distances, ring);
}

// Distances of the slot's query to the rows of `count` nodes: squared L2, or minus the dot product. All threads of the
// block or the warp.
template <bool ONE_WARP = false>
__device__ inline void row_distances(const Collection& collection, const Slot* slot, const uint32* nodes, uint32 count,
                                     float* distances, Ring ring) {
    switch (collection.kind) {
        case F32_L2: return ring_distances<F32_L2, ONE_WARP>(collection, slot, nodes, count, distances, ring);
        case F32_DOT: return ring_distances<F32_DOT, ONE_WARP>(collection, slot, nodes, count, distances, ring);
        case F16_L2: return ring_distances<F16_L2, ONE_WARP>(collection, slot, nodes, count, distances, ring);
        default: return ring_distances<F16_DOT, ONE_WARP>(collection, slot, nodes, count, distances, ring);
    }
}
