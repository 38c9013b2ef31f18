"""Arrays in a GPU's memory, copied to the host. Importing this needs the extra [cuda]."""

from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime as cuda
from cuda.core.utils import StridedMemoryView

from runtime.errors import InvalidRequest

_LEGACY_STREAM = 1  # as both interfaces count: the default stream, which waits for all blocking streams
_MAX_BYTES = 1 << 32


def from_cuda_array(vectors: Any, name: str) -> npt.NDArray[Any]:
    """The array behind `__cuda_array_interface__`. Raises `InvalidRequest`."""
    try:
        found = vectors.__cuda_array_interface__
        shape, dtype, address = tuple(found["shape"]), np.dtype(found["typestr"]), int(found["data"][0])
        strides, stream = found.get("strides"), found.get("stream")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: its __cuda_array_interface__ cannot be read: {error}", name) from error
    if stream:
        _check(cuda.cudaStreamSynchronize(stream), name)
    return _copied(address, shape, strides, dtype, name)


def from_dlpack(vectors: Any, name: str) -> npt.NDArray[Any]:
    """The array behind `__dlpack__`, once its producer's stream has written it. Raises `InvalidRequest`."""
    try:
        view = StridedMemoryView.from_dlpack(vectors, stream_ptr=_LEGACY_STREAM)
        dtype = np.dtype(view.dtype)
        strides = None if view.strides is None else tuple(dtype.itemsize * stride for stride in view.strides)
    except Exception as error:  # the producer may raise anything
        raise InvalidRequest(f"{name}: it cannot be read through DLPack: {error}", name) from error
    return _copied(view.ptr, tuple(view.shape), strides, dtype, name)


def _copied(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any], name: str
) -> npt.NDArray[Any]:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    if min(shape, default=1) < 0 or not 0 <= nbytes <= _MAX_BYTES or dtype.hasobject:
        raise InvalidRequest(f"{name}: {dtype} {shape} is over the limit of {_MAX_BYTES} bytes, or no shape", name)
    target = np.empty(shape, dtype)
    if strides is not None and tuple(strides) != target.strides and target.size:
        raise InvalidRequest(f"{name}: on a GPU it must be contiguous; its strides are {tuple(strides)}", name)
    if target.size:
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _check(cuda.cudaMemcpy(target.ctypes.data, address, nbytes, kind), name)
    return target


def _check(answer: tuple[Any, ...], name: str) -> None:
    if answer[0] != cuda.cudaError_t.cudaSuccess:
        raise InvalidRequest(
            f"{name}: it lies on a GPU, and CUDA says {answer[0].name} in this process; copy it to the host", name
        )
