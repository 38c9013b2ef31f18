"""Query vectors from wherever they are.

A vector that lies on a GPU, told by `__cuda_array_interface__` (version 3) or `__dlpack__`, stays there if it is
float32: it may go to a pool on that GPU as it is. It is copied to the host when it must be, and at once if it is of
another type.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import DeviceSpan
from runtime.errors import InvalidRequest

_LEGACY_STREAM = 1  # as both interfaces count: the default stream, which waits for all blocking streams
_MAX_BYTES = 1 << 32  # of one array on a GPU


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
            found = _Gpu(name).from_cuda_array(vectors)
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
        return _Gpu(name).from_dlpack(vectors)
    if device not in (_CPU, _CUDA_HOST):
        raise InvalidRequest(f"{name}: it lies on a device of DLPack's type {device}; only CPU and CUDA are read", name)
    try:
        return np.from_dlpack(vectors)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: it cannot be read through DLPack: {error}", name) from error


def check_finite(vector: npt.NDArray[np.float32]) -> None:
    """Raises `InvalidRequest` that names the first value of `vector` [d] that is none."""
    finite = np.isfinite(vector)
    if not finite.all():
        place = int(np.argmin(finite))
        raise InvalidRequest(f"vector[{place}] is {vector[place]}: not finite", "vector")


# ---- arrays in a GPU's memory, as they are or copied to the host


class _Gpu:
    """CUDA's runtime, for the array that a caller has handed over as `name`."""

    def __init__(self, name: str) -> None:
        """Raises `InvalidRequest` without the extra [cuda]."""
        self._name = name
        try:
            from cuda.bindings import runtime
            from cuda.core.utils import StridedMemoryView
        except ImportError as error:
            raise InvalidRequest(
                f"{name}: it lies on a GPU, and reading it needs the extra [cuda] ({error}); copy it to the host first",
                name,
            ) from error
        self._cuda, self._view = runtime, StridedMemoryView

    def from_cuda_array(self, vectors: Any) -> DeviceVectors | npt.NDArray[Any]:
        """What is behind `__cuda_array_interface__`, once its producer's stream has written it."""
        try:
            found = vectors.__cuda_array_interface__
            shape, dtype, address = tuple(found["shape"]), np.dtype(found["typestr"]), int(found["data"][0])
            strides, stream = found.get("strides"), found.get("stream")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            told = f"{self._name}: its __cuda_array_interface__ cannot be read: {error}"
            raise InvalidRequest(told, self._name) from error
        return self._taken(vectors, address, shape, strides, dtype, stream or _LEGACY_STREAM)

    def from_dlpack(self, vectors: Any) -> DeviceVectors | npt.NDArray[Any]:
        """What is behind `__dlpack__`, once its producer's stream has written it."""
        try:
            view = self._view.from_dlpack(vectors, stream_ptr=_LEGACY_STREAM)
            dtype = np.dtype(view.dtype)
            strides = None if view.strides is None else tuple(dtype.itemsize * stride for stride in view.strides)
        except Exception as error:  # the producer may raise anything
            raise InvalidRequest(f"{self._name}: it cannot be read through DLPack: {error}", self._name) from error
        return self._taken(view, view.ptr, tuple(view.shape), strides, dtype, _LEGACY_STREAM)

    def _taken(
        self,
        owner: Any,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        stream: int,
    ) -> DeviceVectors | npt.NDArray[Any]:
        """float32 as it is; anything else as a copy on the host, where it can be converted or refused."""
        name, nbytes = self._name, dtype.itemsize
        for length in shape:
            nbytes *= length
        if min(shape, default=1) < 0 or not 0 <= nbytes <= _MAX_BYTES or dtype.hasobject:
            raise InvalidRequest(f"{name}: {dtype} {shape} is over the limit of {_MAX_BYTES} bytes, or no shape", name)
        target = np.empty(shape, dtype)
        if not target.size:
            return target
        if strides is not None and tuple(strides) != target.strides:
            raise InvalidRequest(f"{name}: on a GPU it must be contiguous; its strides are {tuple(strides)}", name)
        # Here, for all that will read it: the copy into a pool's arena is on a stream that waits for no other.
        self._check(self._cuda.cudaStreamSynchronize(stream))
        if dtype == np.float32 and 1 <= len(shape) <= 2:
            (place,) = self._check(self._cuda.cudaPointerGetAttributes(address))
            return DeviceVectors(owner, address, shape, int(place.device), self._copy_out)
        self._copy_out(target, address)
        return target

    def _copy_out(self, target: npt.NDArray[Any], address: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self._cuda.cudaMemcpy(target.ctypes.data, address, target.nbytes, kind))

    def _check(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        code, *values = answer
        if code != self._cuda.cudaError_t.cudaSuccess:
            told = f"{self._name}: it lies on a GPU, and CUDA says {code.name} in this process; copy it to the host"
            raise InvalidRequest(told, self._name)
        return tuple(values)
