"""Arrays that claim to be on a GPU but use host memory, and a fake CUDA runtime that copies host memory."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


class CudaArray:
    """An array that claims by `__cuda_array_interface__` to be on a GPU."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False),
            "strides": None, "stream": None, "version": 3,
        } | changes  # fmt: skip


class DlpackArray:
    """An array that reports a device type through DLPack."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()


def fake_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install a CUDA runtime over host memory; return a list: bytes of each copy, -stream of each synchronization."""
    bindings = pytest.importorskip("cuda.bindings", reason="needs the extra [cuda]")
    done: list[int] = []
    success = SimpleNamespace(name="cudaSuccess")

    def memcpy(target: int, source: int, count: int, kind: object) -> tuple[object]:
        ctypes.memmove(target, source, count)
        done.append(count)
        return (success,)

    def synchronize(stream: int) -> tuple[object]:
        done.append(-stream)
        return (success,)

    fake = SimpleNamespace(
        cudaMemcpy=memcpy,
        cudaStreamSynchronize=synchronize,
        cudaPointerGetAttributes=lambda address: (success, SimpleNamespace(device=0)),
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToHost=2),
        cudaError_t=SimpleNamespace(cudaSuccess=success),
    )
    monkeypatch.setattr(bindings, "runtime", fake, raising=False)
    return done
