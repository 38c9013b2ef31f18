// Copies KV blocks of all layers from one paged tensor to another, which may be another process's or another GPU's.
//
// Both tensors are planes (K or V of a layer) of blocks. A launch copies the same blocks in several planes; its list of
// blocks is part of its argument. Every thread has four chunks of 16 bytes in flight: with 128 thread blocks of 512 that is
// 4 MB, more than latency × bandwidth of the memory (.65 µs × 2.1 TB/s read), and three quarters of every multiprocessor's
// threads are left to kernels that run meanwhile. Loads and stores are streaming: the chunks are used once and should not
// displace weights from the L2 cache.

using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr uint32 MAX_BLOCKS = 256, AT_ONCE = 4;

// The layout is that of gpu.cuda.block_copy.BlockCopy.
struct BlockCopy {
    const uint4* source;  // first plane of the launch
    uint4* target;
    uint64 source_plane, target_plane;           // chunks from plane to plane
    uint32 block_chunks, blocks, planes, unused;
    uint32 from[MAX_BLOCKS], to[MAX_BLOCKS];
};
static_assert(sizeof(BlockCopy) == 48 + 8 * MAX_BLOCKS, "BlockCopy");

extern "C" __global__ void __launch_bounds__(512) copy_blocks(const __grid_constant__ BlockCopy copy) {
    const uint32 plane_chunks = copy.blocks * copy.block_chunks, chunks = copy.planes * plane_chunks;
    const uint32 stride = gridDim.x * blockDim.x;
    for (uint32 first = blockIdx.x * blockDim.x + threadIdx.x; first < chunks; first += AT_ONCE * stride) {
        uint4 values[AT_ONCE];
        uint4* targets[AT_ONCE];
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            const uint32 chunk = min(first + i * stride, chunks - 1);  // the last chunk may be copied several times
            const uint32 plane = chunk / plane_chunks, block = chunk % plane_chunks / copy.block_chunks;
            const uint64 offset = chunk % copy.block_chunks;
            values[i] = __ldcs(copy.source + plane * copy.source_plane + uint64(copy.from[block]) * copy.block_chunks + offset);
            targets[i] = copy.target + plane * copy.target_plane + uint64(copy.to[block]) * copy.block_chunks + offset;
        }
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) __stcs(targets[i], values[i]);
    }
}
