"""Arrays in a GPU's memory, as they are or copied to the host. Importing this needs the extra [cuda]."""

from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime as cuda
from cuda.core.utils import StridedMemoryView

from runtime.errors import InvalidRequest
from runtime.retrieval.search.arguments import DeviceVectors

_LEGACY_STREAM = 1  # as both interfaces count: the default stream, which waits for all blocking streams
_MAX_BYTES = 1 << 32


def from_cuda_array(vectors: Any, name: str) -> DeviceVectors | npt.NDArray[Any]:
    """What is behind `__cuda_array_interface__`, once its producer's stream has written it. Raises `InvalidRequest`."""
    try:
        found = vectors.__cuda_array_interface__
        shape, dtype, address = tuple(found["shape"]), np.dtype(found["typestr"]), int(found["data"][0])
        strides, stream = found.get("strides"), found.get("stream")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: its __cuda_array_interface__ cannot be read: {error}", name) from error
    return _taken(vectors, address, shape, strides, dtype, stream or _LEGACY_STREAM, name)


def from_dlpack(vectors: Any, name: str) -> DeviceVectors | npt.NDArray[Any]:
    """What is behind `__dlpack__`, once its producer's stream has written it. Raises `InvalidRequest`."""
    try:
        view = StridedMemoryView.from_dlpack(vectors, stream_ptr=_LEGACY_STREAM)
        dtype = np.dtype(view.dtype)
        strides = None if view.strides is None else tuple(dtype.itemsize * stride for stride in view.strides)
    except Exception as error:  # the producer may raise anything
        raise InvalidRequest(f"{name}: it cannot be read through DLPack: {error}", name) from error
    return _taken(view, view.ptr, tuple(view.shape), strides, dtype, _LEGACY_STREAM, name)


def _taken(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    stream: int,
    name: str,
) -> DeviceVectors | npt.NDArray[Any]:
    """float32 as it is; anything else as a copy on the host, where it can be converted or refused."""
    nbytes = dtype.itemsize
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
    _check(cuda.cudaStreamSynchronize(stream), name)
    if dtype == np.float32 and 1 <= len(shape) <= 2:
        (place,) = _check(cuda.cudaPointerGetAttributes(address), name)
        return DeviceVectors(owner, address, shape, int(place.device), lambda to, at: _copy_out(to, at, name))
    _copy_out(target, address, name)
    return target


def _copy_out(target: npt.NDArray[Any], address: int, name: str) -> None:
    kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
    _check(cuda.cudaMemcpy(target.ctypes.data, address, target.nbytes, kind), name)


def _check(answer: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    code, *values = answer
    if code != cuda.cudaError_t.cudaSuccess:
        raise InvalidRequest(
            f"{name}: it lies on a GPU, and CUDA says {code.name} in this process; copy it to the host", name
        )
    return tuple(values)
