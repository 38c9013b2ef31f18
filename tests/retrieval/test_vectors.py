"""Query vectors from host arrays, DLPack, and a GPU's memory (stood in for by the host's)."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.retrieval.vectors import as_floats

VALUES = np.arange(6, dtype=np.float32)


class OnGpu:
    """An array that says that it lies on a GPU, by `__cuda_array_interface__`; its memory is the host's."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False),
            "strides": None, "stream": None, "version": 3,
        } | changes  # fmt: skip


class DlpackOn:
    """An array that says by DLPack on which type of device it lies."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CUDA runtime whose device memory is the host's; the bytes of each copy, and -stream of each wait."""
    gpu_vectors = pytest.importorskip("runtime.retrieval.gpu_vectors", reason="needs the extra [cuda]")
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
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToHost=2),
        cudaError_t=SimpleNamespace(cudaSuccess=success),
    )
    monkeypatch.setattr(gpu_vectors, "cuda", fake)
    return done


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int32])
def test_host_arrays_become_float32_copies(dtype: type[Any]) -> None:
    source = VALUES.astype(dtype)
    found = as_floats(source)
    assert found.dtype == np.float32
    assert found.tolist() == VALUES.tolist()
    source[0] = 9
    assert found[0] == 0


def test_lists_and_dlpack_on_the_host_are_taken() -> None:
    assert as_floats([1, 2.5]).tolist() == [1, 2.5]
    assert as_floats(DlpackOn(VALUES, 1)).tolist() == VALUES.tolist()
    torch = pytest.importorskip("torch")
    assert as_floats(torch.arange(6, dtype=torch.float16)).tolist() == VALUES.tolist()
    with pytest.raises(InvalidRequest, match="cannot be read through DLPack"):
        as_floats(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_array_on_a_gpu_is_copied_once(copied: list[int], dtype: type[Any]) -> None:
    array = VALUES.astype(dtype).reshape(2, 3)
    assert as_floats(OnGpu(array)).tolist() == VALUES.reshape(2, 3).tolist()
    assert copied == [array.nbytes]


def test_dlpack_from_a_gpu_is_copied_once(copied: list[int]) -> None:
    array = VALUES.reshape(2, 3)
    assert as_floats(DlpackOn(array, 2)).tolist() == array.tolist()
    assert copied == [array.nbytes]
    with pytest.raises(InvalidRequest, match="must be contiguous"):
        as_floats(DlpackOn(array[:, :2], 2))


def test_the_stream_that_still_writes_is_waited_for(copied: list[int]) -> None:
    as_floats(OnGpu(VALUES, stream=7))
    assert copied == [-7, VALUES.nbytes]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (8,)}, r"must be contiguous; its strides are \(8,\)"),
        ({"shape": (1 << 40,)}, "over the limit of"),
        ({"shape": (-1,)}, "no shape"),
        ({"typestr": "O"}, "over the limit of|no shape"),
        ({"typestr": "nonsense"}, "cannot be read"),
        ({"data": None}, "cannot be read"),
    ],
)
def test_an_interface_that_cannot_be_is_refused_before_anything_is_copied(
    copied: list[int], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        as_floats(OnGpu(VALUES, **changes))
    assert copied == []


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="DLPack's type 10"):
        as_floats(DlpackOn(VALUES, 10))


def test_without_a_gpu_an_array_on_one_is_refused_and_the_error_says_what_to_do() -> None:
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="needs the extra [cuda]")
    if cuda.cudaGetDeviceCount()[0] == cuda.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidRequest, match=r"it lies on a GPU, and CUDA says .* copy it to the host"):
        as_floats(OnGpu(VALUES))


def test_without_the_extra_an_array_on_a_gpu_is_refused_and_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.retrieval.gpu_vectors", None)
    for array in (OnGpu(VALUES), DlpackOn(VALUES, 2)):
        with pytest.raises(InvalidRequest, match=r"needs the extra \[cuda\]"):
            as_floats(array)
