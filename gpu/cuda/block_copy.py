"""The kernel that copies KV blocks between paged tensors (gpu/kernels/copy.cu): its image and its argument."""

import ctypes
from collections.abc import Sequence

from gpu.cuda.compiler import compile_kernels

KERNEL = "copy_blocks"
MAX_BLOCKS = 256
"""Blocks of one launch: their list is part of its argument, of which a kernel has 4 KiB."""
THREADS, _MAX_GRID = 512, 128
CHUNK_BYTES = 16
_AT_ONCE = 4  # chunks of a thread


class BlockCopy(ctypes.Structure):
    """The kernel's argument: blocks `source_blocks` of consecutive planes go to the blocks `target_blocks`."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("source_plane", ctypes.c_uint64),
        ("target_plane", ctypes.c_uint64),
        ("block_chunks", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("planes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("source_blocks", ctypes.c_uint32 * MAX_BLOCKS),
        ("target_blocks", ctypes.c_uint32 * MAX_BLOCKS),
    )

    @classmethod
    def of(
        cls, source: int, target: int, strides: tuple[int, int], block_bytes: int, planes: int,
        source_blocks: Sequence[int], target_blocks: Sequence[int],
    ) -> "BlockCopy":  # fmt: skip
        """Return a copy of at most MAX_BLOCKS blocks of `block_bytes` bytes, a multiple of 16, in `planes` planes.

        `source` and `target` are the addresses of the first plane; `strides` are the planes' sizes in blocks there.
        """
        chunks = block_bytes // CHUNK_BYTES
        made = cls(source, target, strides[0] * chunks, strides[1] * chunks, chunks, len(source_blocks), planes)
        made.source_blocks[: len(source_blocks)] = source_blocks
        made.target_blocks[: len(target_blocks)] = target_blocks
        return made

    @property
    def grid(self) -> int:
        """Thread blocks of the launch."""
        chunks: int = self.planes * self.blocks * self.block_chunks
        return min(_MAX_GRID, -(-chunks // (THREADS * _AT_ONCE)))


def compile_block_copy(arch: str) -> bytes:
    """Return the kernel's cubin. See `gpu.cuda.compiler.compile_kernels`."""
    return compile_kernels(arch, units=("copy.cu",))
