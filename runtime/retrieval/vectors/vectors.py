"""Query vectors from wherever they are: sequences, host arrays, and arrays in a GPU's memory.

What lies on a GPU, told by `__cuda_array_interface__` (version 3) or `__dlpack__`, stays there if it is float32: it may
go to a pool on that GPU as it is. It is copied to the host when it must be, and at once if it is of another type.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import DeviceSpan
from runtime.errors import InvalidRequest

# ---- query vectors that stay in a GPU's memory, for pools that can take them from there


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


_NUMBERS = "fiub"  # kinds of dtype
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType, dlpack.h


def as_vectors(vectors: Any, name: str = "vector") -> Vectors:
    """`vectors` as float32: from the host always a copy, from a GPU none. Raises `InvalidRequest` for other things."""
    found = vectors
    if type(vectors) is not np.ndarray:
        if hasattr(vectors, "__cuda_array_interface__"):
            found = _from_gpu(vectors, "from_cuda_array", name)
        elif hasattr(vectors, "__dlpack_device__"):
            found = _from_dlpack(vectors, name)
    if isinstance(found, DeviceVectors):
        return found
    try:
        array = np.asarray(found)
        if array.dtype.kind not in _NUMBERS:
            raise InvalidRequest(f"{name}: not an array of real numbers: its type is {array.dtype}", name)
        return np.array(array, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name}: not an array of numbers: {error}", name) from error


def _from_dlpack(vectors: Any, name: str) -> DeviceVectors | npt.NDArray[Any]:
    device = int(vectors.__dlpack_device__()[0])
    if device in (_CUDA, _CUDA_MANAGED):
        return _from_gpu(vectors, "from_dlpack", name)
    if device not in (_CPU, _CUDA_HOST):
        raise InvalidRequest(f"{name}: it lies on a device of DLPack's type {device}; only CPU and CUDA are read", name)
    try:
        return np.from_dlpack(vectors)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: it cannot be read through DLPack: {error}", name) from error


def _from_gpu(vectors: Any, how: str, name: str) -> DeviceVectors | npt.NDArray[Any]:
    try:
        gpu_vectors = importlib.import_module("runtime.retrieval.vectors.gpu")
    except ImportError as error:
        raise InvalidRequest(
            f"{name}: it lies on a GPU, and reading it needs the extra [cuda] ({error}); copy it to the host first",
            name,
        ) from error
    found: DeviceVectors | npt.NDArray[Any] = getattr(gpu_vectors, how)(vectors, name)
    return found
