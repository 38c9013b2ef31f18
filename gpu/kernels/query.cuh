// Preparation of a query whose vector lies in device memory, with the arithmetic of gpu/cpu/queries.py.
//
// The vector may be another process's to write, at any time: each value is loaded once, and what is checked is what is used.
#pragma once
#include "finish.cuh"

// Reduce over the block; every thread gets the result. `of_warps`: shared, one value per warp. Two block barriers.
template <class T, class Combine>
__device__ inline T over_block(T value, T* of_warps, Combine combine) {
#pragma unroll
    for (uint32 stride = WARP / 2; stride > 0; stride /= 2)
        value = combine(value, __shfl_xor_sync(WHOLE_WARP, value, static_cast<int>(stride)));
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    T result = of_warps[0];
    for (uint32 i = 1; i < blockDim.x / WARP; i++) result = combine(result, of_warps[i]);
    return result;
}

// Write the prepared query of a slot, from the float32 vector at an address. Returns, to every thread, whether the vector is
// valid. `scratch`: shared, PREPARE_BYTES. Ends with a block barrier.
__device__ inline bool prepare_query(Slot* slot, const Collection& collection, uint64 vector, void* scratch) {
    const uint32 dim = collection.dim, lanes = (dim + 15) / 16 * 16;
    unsigned char* query = reinterpret_cast<unsigned char*>(slot + 1);
    float* full = reinterpret_cast<float*>(query + QUERY_ROW);
    const uint32* source = at<const uint32>(vector);
    double square = 0;
    for (uint32 i = threadIdx.x; i < lanes; i += blockDim.x) {
        const float value = i < dim ? __uint_as_float(load_system(source + i)) : 0.0f;
        full[i] = value;
        square += static_cast<double>(value) * value;
    }
    const auto add = [](double a, double b) { return a + b; };
    const double squares = over_block(square, static_cast<double*>(scratch), add);
    // The sum is finite exactly if all values are.
    const bool normalised = collection.normalised != 0;
    if (!(squares <= (normalised ? LARGEST_DOUBLE : LARGEST_SQUARE))) return false;
    const double factor = normalised && squares > 0 ? 1 / sqrt(squares) : collection.scale;
    for (uint32 i = threadIdx.x; i < lanes; i += blockDim.x) full[i] = static_cast<float>(full[i] * factor);
    __syncthreads();
    return true;
}

// End a query whose vector is invalid. One thread.
__device__ inline void publish_invalid(const Batch& batch, uint32 slot_number, Slot* slot) {
    Result* result = result_at(batch, slot_number);
    result->extends = 0;
    result->invalid = 1;
    slot->status = FINISHED;
    set_due(batch, slot_number, slot->collection, 0);
    store_release_system(&result->ticket, slot->ticket);
}
