"""Conversion of query vectors: sequences, numpy arrays, DLPack, CUDA arrays.

A float32 vector in GPU memory (`__cuda_array_interface__` version 3, or `__dlpack__`) stays there: a pool on that GPU
can read it. It is copied to the host only when needed; a vector of another dtype is copied immediately.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.index.rows import LARGEST_SQUARE
from ipc import DeviceSpan
from runtime.errors import InvalidRequest

_LEGACY_STREAM = 1  # in both interfaces: the legacy default stream, which synchronizes with all blocking streams
_MAX_BYTES = 1 << 32  # of one array on a GPU


Floats = npt.NDArray[np.float32]
CopyOut = Callable[[Floats, int], None]


class DeviceVectors:
    """float32 [d] or [n, d], C-contiguous, at `address` of a GPU (by its ordinal in this process).

    A view: it keeps `owner` alive, whose content must not change until the queries have ended.
    copy_out: fills a host array from a device address.
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

    def __iter__(self) -> Iterator["DeviceVectors"]:
        """Iterate over the rows of [n, d], each as [d]; one copy to the host is for all of them."""
        for row in range(len(self)):
            address, copy_out = self._address + 4 * self.shape[1] * row, partial(self._copy_row, row)
            yield DeviceVectors(self, address, self.shape[1:], self._device, copy_out)

    def _copy_row(self, row: int, target: Floats, _: int) -> None:
        target[:] = self.on_host()[row]

    @property
    def span(self) -> DeviceSpan:
        """Their memory range."""
        return DeviceSpan(self._address, 4 * int(np.prod(self.shape)), self._device)

    def on_host(self) -> Floats:
        """Return a host copy, made once. Raises `InvalidRequest` if CUDA fails."""
        if self._staged is None:
            staged = np.empty(self.shape, np.float32)
            self._copy_out(staged, self._address)
            self._staged = staged
        return self._staged


Vectors = Floats | DeviceVectors


def on_host(vectors: Vectors) -> Floats:
    """Return the vectors themselves, or a host copy."""
    return vectors.on_host() if isinstance(vectors, DeviceVectors) else vectors


_NUMBERS = "fiub"  # kinds of dtype
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType, dlpack.h


def as_vectors(vectors: Any, name: str = "vector") -> Vectors:
    """Convert to float32: host memory is always copied, GPU memory never. Raises `InvalidRequest`."""
    read = vectors
    if type(vectors) is not np.ndarray:
        if hasattr(vectors, "__cuda_array_interface__"):
            read = _CudaReader(name).from_cuda_array(vectors)
        elif hasattr(vectors, "__dlpack_device__"):
            read = _from_dlpack(vectors, name)
    if isinstance(read, DeviceVectors):
        return read
    try:
        array = np.asarray(read)
        if array.dtype.kind not in _NUMBERS:
            raise InvalidRequest(f"{name}: not an array of real numbers: its type is {array.dtype}", name)
        return np.array(array, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name}: not an array of numbers: {error}", name) from error


def query_vector(vector: Any) -> Vectors:
    """Convert the vector of a query, [d]; one on a GPU is checked by the pool. Raises `InvalidRequest`."""
    is_plain = type(vector) is np.ndarray and vector.dtype.kind in _NUMBERS
    row = np.array(vector, dtype=np.float32) if is_plain else as_vectors(vector)
    if row.ndim != 1:
        raise InvalidRequest(f"vector must have the shape (d,), got {row.shape}", "vector")
    if type(row) is np.ndarray and not np.logical_and.reduce(np.isfinite(row)):
        check_finite(row)
    return row


def _from_dlpack(vectors: Any, name: str) -> DeviceVectors | npt.NDArray[Any]:
    device = int(vectors.__dlpack_device__()[0])
    if device in (_CUDA, _CUDA_MANAGED):
        return _CudaReader(name).from_dlpack(vectors)
    if device not in (_CPU, _CUDA_HOST):
        raise InvalidRequest(f"{name}: its DLPack device type is {device}; only CPU and CUDA are supported", name)
    try:
        return np.from_dlpack(vectors)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: it cannot be read through DLPack: {error}", name) from error


def check_finite(vector: npt.NDArray[np.float32]) -> None:
    """Raise `InvalidRequest` that names the first non-finite value of `vector` [d]."""
    finite = np.isfinite(vector)
    if not finite.all():
        position = int(np.argmin(finite))
        raise InvalidRequest(f"vector[{position}] is {vector[position]}: not finite", "vector")


def check_length(vector: npt.NDArray[np.float32]) -> None:
    """Raise `InvalidRequest` if the squared norm of `vector` [d] exceeds the engines' limit, which cosine has not."""
    square = float(np.square(vector, dtype=np.float64).sum())
    if square > LARGEST_SQUARE:
        raise InvalidRequest(
            f"vector is too long: its squared norm is {square:.3g}, the limit is {LARGEST_SQUARE:.3g}", "vector"
        )


# ---- arrays in GPU memory


class _CudaReader:
    """Reader of arrays in GPU memory through the CUDA runtime. `name`: the caller's argument, for errors."""

    def __init__(self, name: str) -> None:
        """Raises `InvalidRequest` if the extra [cuda] is not installed."""
        self._name = name
        try:
            from cuda.bindings import runtime
            from cuda.core.utils import StridedMemoryView
        except ImportError as error:
            raise InvalidRequest(
                f"{name}: reading it from a GPU requires the extra [cuda] ({error}); copy it to the host first",
                name,
            ) from error
        self._cuda, self._view = runtime, StridedMemoryView

    def from_cuda_array(self, vectors: Any) -> DeviceVectors | npt.NDArray[Any]:
        """Read `__cuda_array_interface__`, after its producer's stream has written the array."""
        try:
            interface = vectors.__cuda_array_interface__
            shape, dtype, address = tuple(interface["shape"]), np.dtype(interface["typestr"]), int(interface["data"][0])
            strides, stream = interface.get("strides"), interface.get("stream")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"{self._name}: its __cuda_array_interface__ cannot be read: {error}"
            raise InvalidRequest(message, self._name) from error
        return self._convert(vectors, address, shape, strides, dtype, stream or _LEGACY_STREAM)

    def from_dlpack(self, vectors: Any) -> DeviceVectors | npt.NDArray[Any]:
        """Read `__dlpack__`, after its producer's stream has written the array."""
        try:
            view = self._view.from_dlpack(vectors, stream_ptr=_LEGACY_STREAM)
            dtype = np.dtype(view.dtype)
            strides = None if view.strides is None else tuple(dtype.itemsize * stride for stride in view.strides)
        except Exception as error:  # the producer may raise anything
            raise InvalidRequest(f"{self._name}: it cannot be read through DLPack: {error}", self._name) from error
        return self._convert(view, view.ptr, tuple(view.shape), strides, dtype, _LEGACY_STREAM)

    def _convert(
        self,
        owner: Any,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        stream: int,
    ) -> DeviceVectors | npt.NDArray[Any]:
        """Return float32 as a view; other dtypes as a host copy, to be converted or refused there."""
        name, nbytes = self._name, dtype.itemsize
        for length in shape:
            nbytes *= length
        if min(shape, default=1) < 0 or not 0 <= nbytes <= _MAX_BYTES or dtype.hasobject:
            raise InvalidRequest(
                f"{name}: {dtype} {shape} exceeds the limit of {_MAX_BYTES} bytes, or is not a valid shape", name
            )
        target = np.empty(shape, dtype)
        if not target.size:
            return target
        if strides is not None and tuple(strides) != target.strides:
            raise InvalidRequest(f"{name}: on a GPU it must be C-contiguous; its strides are {tuple(strides)}", name)
        # Synchronize here: the copy into a pool's arena runs on a stream that does not wait for others.
        self._check(self._cuda.cudaStreamSynchronize(stream))
        if dtype == np.float32 and 1 <= len(shape) <= 2:
            (attributes,) = self._check(self._cuda.cudaPointerGetAttributes(address))
            return DeviceVectors(owner, address, shape, int(attributes.device), self._copy_out)
        self._copy_out(target, address)
        return target

    def _copy_out(self, target: npt.NDArray[Any], address: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self._cuda.cudaMemcpy(target.ctypes.data, address, target.nbytes, kind))

    def _check(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        code, *values = answer
        if code != self._cuda.cudaError_t.cudaSuccess:
            message = f"{self._name}: CUDA failed to read it in this process: {code.name}; copy it to the host"
            raise InvalidRequest(message, self._name)
        return tuple(values)
