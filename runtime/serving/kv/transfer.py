"""Copies of KV blocks, cut into slices: who copies can do something else in between.

A KV array is [layers, 2, blocks, kv_heads, block_tokens, head_dim] float32: a model's tensor, the same in another
process's memory, or a tier's. A copy goes layer by layer, as a model reads them, and within a layer in slices of at
most 1 MiB. In a slice blocks that lie one behind the other on both sides are copied in one go, straight from there to
here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_SLICE_BYTES = 1 << 20


class KvArray(Protocol):
    """A numpy array or a torch tensor: what copying needs of either, so that neither is imported for the other."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


def kv_array(memory: memoryview, shape: Sequence[int]) -> NDArray[np.float32]:
    """KV in someone's memory; `shape[2]` is replaced by as many blocks as it has. Raises ValueError if it has none."""
    there = kv_shape(memory.nbytes, shape)
    return np.frombuffer(memory, np.float32, count=int(np.prod(there))).reshape(there)


def kv_shape(nbytes: int, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` with as many blocks as so many bytes hold. Raises ValueError if they hold none."""
    block_bytes = 4 * int(np.prod([*shape[:2], *shape[3:]]))
    blocks = nbytes // block_bytes
    if blocks == 0:
        raise ValueError(f"a memory of {nbytes} bytes holds no KV block of {block_bytes}")
    return (*shape[:2], blocks, *shape[3:])


class Run(NamedTuple):
    """Blocks that lie one behind the other on both sides: where in the source, where in the target, how many."""

    taken: int
    given: int
    blocks: int


class Transfer:
    """One copy, of `source`'s blocks `taken` to `target`'s blocks `given`, in that order. `step` until `done`.

    Each slice is copied when `step` returns. Raises ValueError for arrays of different models, and for blocks that one
    of them does not have.
    """

    def __init__(self, source: KvArray, taken: Sequence[int], target: KvArray, given: Sequence[int]) -> None:
        self._source, self._target = source, target
        self._plan(tuple(source.shape), taken, tuple(target.shape), given)

    def _plan(
        self, source: tuple[int, ...], taken: Sequence[int], target: tuple[int, ...], given: Sequence[int]
    ) -> None:
        if source[:2] + source[3:] != target[:2] + target[3:]:
            raise ValueError(f"KV of shape {source} does not fit into {target}")
        if len(taken) != len(given):
            raise ValueError(f"{len(taken)} blocks to copy into {len(given)}")
        for name, blocks, shape in (("source", taken, source), ("target", given, target)):
            if blocks and not 0 <= min(blocks) <= max(blocks) < shape[2]:
                raise ValueError(f"the {name} has blocks 0..{shape[2] - 1}, asked for {sorted(blocks)}")
        block_bytes = 4 * int(np.prod([2, *target[3:]]))  # of one layer
        each = max(1, _SLICE_BYTES // block_bytes)
        parts = [
            list(_runs(taken[begin : begin + each], given[begin : begin + each]))
            for begin in range(0, len(taken), each)
        ]
        self._slices = [(layer, runs) for layer in range(target[0]) for runs in parts]
        self._next = 0
        self.blocks = len(taken)
        self.bytes = len(taken) * block_bytes * target[0]
        self.busy_ns = 0

    @property
    def done(self) -> bool:
        """Whether all is copied. May raise IpcError."""
        return self._next == len(self._slices)

    @property
    def settled(self) -> bool:
        """Whether nothing is being written just now: blocks of a copy that is given up are free from then on."""
        return True

    def settle(self) -> None:
        """Wait until it is."""

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least one slice (None: all that is left); whether all is copied now.

        May raise IpcError.
        """
        begin_ns = clock()
        while self._next < len(self._slices):
            self._copy(*self._slices[self._next])
            self._next += 1
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        self.busy_ns += clock() - begin_ns
        return self.done

    def _copy(self, layer: int, runs: Sequence[Run]) -> None:
        source, target = self._source[layer], self._target[layer]
        for taken, given, count in runs:
            for side in (0, 1):  # each is one piece of memory, there and here
                target[side, given : given + count] = source[side, taken : taken + count]


def _runs(taken: Sequence[int], given: Sequence[int]) -> Iterator[Run]:
    begin = 0
    for end in range(1, len(taken) + 1):
        if end == len(taken) or (taken[end], given[end]) != (taken[end - 1] + 1, given[end - 1] + 1):
            yield Run(taken[begin], given[begin], end - begin)
            begin = end
