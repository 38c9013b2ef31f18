"""Copies of KV blocks, cut into slices: who copies can do something else in between.

A KV array is [layers, 2, blocks, kv_heads, block_tokens, head_dim] float32: a tensor of a model on the CPU, the same
in another process's memory, or swap space. A copy goes layer by layer, as a model reads them, and within a layer in
slices of at most 1 MiB. In a slice blocks that lie one behind the other on both sides are copied in one go, straight
from there to here.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

KvArray = NDArray[np.float32]

_SLICE_BYTES = 1 << 20


def kv_array(memory: memoryview, shape: Sequence[int]) -> KvArray:
    """KV in someone's memory; `shape[2]` is replaced by as many blocks as it has. Raises ValueError if it has none."""
    one = [*shape[:2], 1, *shape[3:]]
    block_bytes = 4 * int(np.prod(one))
    blocks = memory.nbytes // block_bytes
    if blocks == 0:
        raise ValueError(f"a memory of {memory.nbytes} bytes holds no KV block of {block_bytes}")
    one[2] = blocks
    return np.frombuffer(memory, np.float32, count=int(np.prod(one))).reshape(one)


class Transfer:
    """One copy, of `source`'s blocks `taken` to `target`'s blocks `given`, in that order. `step` until `done`.

    Raises ValueError for arrays of different models, and for blocks that one of them does not have.
    """

    def __init__(self, source: KvArray, taken: Sequence[int], target: KvArray, given: Sequence[int]) -> None:
        if source.shape[:2] + source.shape[3:] != target.shape[:2] + target.shape[3:]:
            raise ValueError(f"KV of shape {source.shape} does not fit into {target.shape}")
        if len(taken) != len(given):
            raise ValueError(f"{len(taken)} blocks to copy into {len(given)}")
        for name, blocks, array in (("source", taken, source), ("target", given, target)):
            if blocks and not 0 <= min(blocks) <= max(blocks) < array.shape[2]:
                raise ValueError(f"the {name} has blocks 0..{array.shape[2] - 1}, asked for {sorted(blocks)}")
        self._source, self._target = source, target
        block_bytes = target[0, :, :1].nbytes
        each = max(1, _SLICE_BYTES // block_bytes)
        parts = [
            list(_runs(taken[begin : begin + each], given[begin : begin + each]))
            for begin in range(0, len(taken), each)
        ]
        self._slices = [(layer, runs) for layer in range(target.shape[0]) for runs in parts]
        self._next = 0
        self.blocks = len(taken)
        self.bytes = len(taken) * block_bytes * target.shape[0]
        self.busy_ns = 0

    @property
    def done(self) -> bool:
        """Whether all is copied."""
        return self._next == len(self._slices)

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least one slice (None: all that is left); whether all is copied now."""
        begin_ns = clock()
        while not self.done:
            layer, runs = self._slices[self._next]
            source, target = self._source[layer], self._target[layer]
            for taken, given, count in runs:
                target[:, given : given + count] = source[:, taken : taken + count]
            self._next += 1
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        self.busy_ns += clock() - begin_ns
        return self.done


def _runs(taken: Sequence[int], given: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where a run begins in the source and in the target, and its blocks."""
    begin = 0
    for end in range(1, len(taken) + 1):
        if end == len(taken) or (taken[end], given[end]) != (taken[end - 1] + 1, given[end - 1] + 1):
            yield taken[begin], given[begin], end - begin
            begin = end
