"""Swap space: KV blocks in the host's memory, for rows that made room for others; wherever the model is."""

from collections.abc import Sequence

import numpy as np

from runtime.serving.kv.transfer import KvArray, Transfer


class SwapSpace:
    """`blocks` places for blocks of KV arrays like `kv`. On a CPU memory is taken when places are first used."""

    def __init__(self, kv: KvArray, blocks: int) -> None:
        self.total = blocks
        self._kv = kv
        self._space = _like(kv, blocks)
        self._free = list(range(blocks))

    @property
    def free(self) -> int:
        """Places that are not taken."""
        return len(self._free)

    def take(self, blocks: Sequence[int]) -> list[int]:
        """Copy blocks out, before this returns; their places. There must be as many `free`."""
        if len(blocks) > len(self._free):
            raise ValueError(f"{len(blocks)} blocks to swap out, {len(self._free)} places are free")
        places = [self._free.pop() for _ in blocks]
        Transfer(self._kv, blocks, self._space, places).step()
        return places

    def back(self, places: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """The copy of places back into blocks. The places stay taken until `drop`."""
        return Transfer(self._space, places, self._kv, blocks)

    def drop(self, places: list[int]) -> None:
        """Give places back; the list is empty afterwards."""
        self._free += places
        places.clear()


def _like(kv: KvArray, blocks: int) -> KvArray:
    shape = (*kv.shape[:2], blocks, *kv.shape[3:])
    if isinstance(kv, np.ndarray):
        return np.empty(shape, np.float32)
    import torch

    # Page-locked, so that a GPU copies by itself. torch waits for each slice, in the order of the model's own work.
    return torch.empty(shape, dtype=torch.float32, pin_memory=blocks > 0 and torch.cuda.is_available())
