"""What a caller of the search client asks, checked where it enters: vectors from wherever they are, and numbers.

A vector that lies on a GPU, told by `__cuda_array_interface__` (version 3) or `__dlpack__`, stays there if it is
float32: it may go to a pool on that GPU as it is. It is copied to the host when it must be, and at once if it is of
another type.
"""

import importlib
import numbers
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import STAGES, DeviceSpan, SearchSpec
from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.filters import Wanted, filter_bytes

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
        gpu_vectors = importlib.import_module("runtime.retrieval.search.gpu_vectors")
    except ImportError as error:
        raise InvalidRequest(
            f"{name}: it lies on a GPU, and reading it needs the extra [cuda] ({error}); copy it to the host first",
            name,
        ) from error
    found: DeviceVectors | npt.NDArray[Any] = getattr(gpu_vectors, how)(vectors, name)
    return found


# ---- numbers and names, checked before any pool is known; a pool has limits of its own

_MOST = 65_535  # of k, top_m, search_width and patience: what a request's header holds
_LATEST_NS = (1 << 63) - 1
_LONGEST_MS = 86_400_000  # a deadline further away than a day is a mistake


def spec_of(
    k: Any,
    collection: Any,
    stage: Any,
    top_m: Any,
    search_width: Any,
    patience: Any,
    deadline_ns: Any = 0,
    wanted: Wanted = None,
) -> SearchSpec:
    """Checked, integers of any kind as Python's own. Raises `InvalidRequest` that names the value and its limit."""
    k = _integer("k", k, 1, _MOST)
    if top_m is not None:
        top_m = _integer("top_m", top_m, 1, _MOST)
        if k > top_m:
            raise InvalidRequest(f"k is {k}, more than top_m, which is {top_m}: no more than those are kept", "k")
    if type(collection) is not str:
        raise InvalidRequest(f"collection must be a name, not {collection!r}", "collection")
    if stage not in STAGES:
        raise InvalidRequest(f"stage must be one of {STAGES}, not {stage!r}", "stage")
    return SearchSpec(
        collection,
        k,
        stage,
        top_m,
        _integer("search_width", search_width, 1, _MOST),
        None if patience is None else _integer("patience", patience, 1, _MOST),
        deadline_at(deadline_ns),
        filter_bytes(wanted),
    )


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise InvalidRequest(f"{name} must be an integer, not {value!r}", name) from None
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}, outside {least}..{most}", name)
    return int(value)  # not of a subclass


def deadline_at(deadline_ns: Any) -> int:
    """A deadline on the monotonic clock, checked. Raises `InvalidRequest`."""
    return _integer("deadline_ns", deadline_ns, 0, _LATEST_NS)


def deadline_of(deadline_ms: Any) -> int:
    """`deadline_ms` from now on, on the monotonic clock in ns; 0 for none. Raises `InvalidRequest`."""
    if deadline_ms is None:
        return 0
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, numbers.Real):
        raise InvalidRequest(f"deadline_ms must be a number, not {deadline_ms!r}", "deadline_ms")
    number: Any = deadline_ms
    if not 0 < number <= _LONGEST_MS:
        raise InvalidRequest(f"deadline_ms is {deadline_ms}, outside 0..{_LONGEST_MS}", "deadline_ms")
    return time.monotonic_ns() + int(float(number) * 1e6)


def check_finite(vector: npt.NDArray[np.float32]) -> None:
    """Raises `InvalidRequest` that names the first value of `vector` [d] that is none."""
    finite = np.isfinite(vector)
    if not finite.all():
        place = int(np.argmin(finite))
        raise InvalidRequest(f"vector[{place}] is {vector[place]}: not finite", "vector")
