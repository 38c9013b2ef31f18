"""Query vectors from host arrays, DLPack and GPU memory (emulated in host memory)."""

import sys
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.retrieval.search.vectors import DeviceVectors, as_vectors, on_host
from tests.retrieval.gpu_arrays import CudaArray, DlpackArray, fake_cuda_runtime

VALUES = np.arange(6, dtype=np.float32)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy to the host, and -stream of each synchronization."""
    return fake_cuda_runtime(monkeypatch)


def read(vectors: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return on_host(as_vectors(vectors))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int32])
def test_host_arrays_become_float32_copies(dtype: type[Any]) -> None:
    source = VALUES.astype(dtype)
    found = read(source)
    assert found.dtype == np.float32
    assert found.tolist() == VALUES.tolist()
    source[0] = 9
    assert found[0] == 0


def test_lists_and_host_dlpack_arrays_are_accepted() -> None:
    assert read([1, 2.5]).tolist() == [1, 2.5]
    assert read(DlpackArray(VALUES, 1)).tolist() == VALUES.tolist()
    torch = pytest.importorskip("torch")
    assert read(torch.arange(6, dtype=torch.float16)).tolist() == VALUES.tolist()
    with pytest.raises(InvalidRequest, match="cannot be read through DLPack"):
        read(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_array_on_a_gpu_is_copied_once(copied: list[int], dtype: type[Any]) -> None:
    array = VALUES.astype(dtype).reshape(2, 3)
    assert read(CudaArray(array)).tolist() == VALUES.reshape(2, 3).tolist()
    assert copied == [-1, array.nbytes]


def test_float32_on_a_gpu_stays_there_until_read_and_its_rows_keep_their_addresses(copied: list[int]) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = as_vectors(CudaArray(array))
    assert isinstance(found, DeviceVectors)
    assert copied == [-1]
    assert (found.shape, found.ndim, len(found)) == ((4, 3), 2, 4)
    assert found.span == (array.ctypes.data, 48, 0)
    rows = list(found)
    assert [row.span.address - array.ctypes.data for row in rows] == [0, 12, 24, 36]
    assert [row.span.shape for row in rows] == [(3,)] * 4
    array[2] = 7  # changing the array changes the query
    assert rows[2].on_host().tolist() == [7, 7, 7]
    array[1:] = 8
    assert [rows[2].on_host()[0], rows[1].on_host()[0]] == [7, 3]  # one copy is made, of all rows
    assert copied == [-1, 48]


def test_the_producers_stream_is_synchronized(copied: list[int]) -> None:
    read(CudaArray(VALUES, stream=7))
    assert copied == [-7, VALUES.nbytes]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (8,)}, r"must be C-contiguous; its strides are \(8,\)"),
        ({"shape": (1 << 40,)}, "exceeds the limit of"),
        ({"shape": (-1,)}, "not a valid shape"),
        ({"typestr": "O"}, "exceeds the limit of|not a valid shape"),
        ({"typestr": "nonsense"}, "cannot be read"),
        ({"data": None}, "cannot be read"),
    ],
)
def test_an_invalid_interface_is_refused_before_anything_is_copied(
    copied: list[int], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(CudaArray(VALUES, **changes))
    assert copied == []


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="DLPack device type is 10"):
        read(DlpackArray(VALUES, 10))


def test_without_a_gpu_a_gpu_array_is_refused_with_a_remedy() -> None:
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="requires the extra [cuda]")
    if cuda.cudaGetDeviceCount()[0] == cuda.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidRequest, match=r"CUDA failed to read it in this process: .* copy it to the host"):
        read(CudaArray(VALUES))


def test_without_the_extra_a_gpu_array_is_refused_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for array in (CudaArray(VALUES), DlpackArray(VALUES, 2)):
        with pytest.raises(InvalidRequest, match=r"requires the extra \[cuda\]"):
            read(array)
