"""Arrays that say that they lie on a GPU; their memory is the host's, and so is what the played CUDA runtime copies."""

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

    def reshaped(self, *shape: int) -> "CudaArray":
        """A view of it, which keeps it alive."""
        view = CudaArray(self.array.reshape(shape))
        view.base = self  # type: ignore[attr-defined]
        return view


class DlpackArray:
    """An array that says by DLPack on which type of device it lies."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()


def fake_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CUDA runtime whose one device has the host's memory; the bytes of each copy out, and -stream of each wait."""
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
