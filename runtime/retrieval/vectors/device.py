"""Query vectors that stay in a GPU's memory, for pools that can take them from there."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import DeviceSpan

Floats = npt.NDArray[np.float32]
CopyOut = Callable[[Floats, int], None]


class DeviceVectors:
    """float32 [d] or [n, d], C-contiguous, at `address` of a GPU (by its ordinal in this process).

    Nothing is copied: `owner`, whose memory it is, is kept alive, and must not be changed until the queries have ended.
    copy_out: fills a host array from an address of the GPU.
    """

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], device: int, copy_out: CopyOut) -> None:
        self.shape = shape
        self._owner, self._address, self._device, self._copy_out = owner, address, device, copy_out
        self._staged: Floats | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceVectors":
        """Neighbouring rows of [n, d]."""
        begin, end, _ = rows.indices(len(self))
        return self._part(begin, (max(end - begin, 0), *self.shape[1:]))

    def __iter__(self) -> Iterator["DeviceVectors"]:
        """Each row of [n, d], as [d]."""
        return (self._part(row, self.shape[1:]) for row in range(len(self)))

    def _part(self, row: int, shape: tuple[int, ...]) -> "DeviceVectors":
        return DeviceVectors(self._owner, self._address + 4 * self.shape[1] * row, shape, self._device, self._copy_out)

    @property
    def span(self) -> DeviceSpan:
        """Where they lie."""
        return DeviceSpan(self._address, 4 * int(np.prod(self.shape)), self._device)

    def on_host(self) -> Floats:
        """A copy, made once. Raises `InvalidRequest` if CUDA refuses."""
        if self._staged is None:
            staged = np.empty(self.shape, np.float32)
            self._copy_out(staged, self._address)
            self._staged = staged
        return self._staged


Vectors = Floats | DeviceVectors


def on_host(vectors: Vectors) -> Floats:
    """Themselves, or their copy."""
    return vectors.on_host() if isinstance(vectors, DeviceVectors) else vectors
