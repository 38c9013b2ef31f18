"""Query vectors from wherever they are: sequences, host arrays, and arrays in a GPU's memory.

What lies on a GPU, told by `__cuda_array_interface__` (version 3) or `__dlpack__`, stays there if it is float32: it may
go to a pool on that GPU as it is. It is copied to the host when it must be, and at once if it is of another type.
"""

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import InvalidRequest
from runtime.retrieval.vectors.device import DeviceVectors, Vectors

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
