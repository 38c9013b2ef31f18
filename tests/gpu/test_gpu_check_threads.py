"""Tests of how the GPU check drives cuVS's C library: one query a call, in several threads, each with its own stream.

The library is a fake with the functions of cuVS's C headers, over host memory.
"""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import nearest
from benchmarks.gpu_check.cuvs_threads import SearchParams, ThreadedCuvs, load_library
from benchmarks.gpu_check.synthetic import random_set
from benchmarks.gpu_check.time_limit import Skipped
from gpu import GraphIndex


class OnDevice(np.ndarray):
    """A CuPy array in host memory."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def referred(reference: Any) -> Any:
    """What ctypes' `byref` refers to."""
    return reference._obj  # noqa: SLF001


def view(tensor: Any, dtype: Any) -> np.ndarray:
    described = referred(tensor)
    shape = tuple(described.shape[i] for i in range(described.ndim))
    assert (described.device, described.lanes, described.bits) == (2, 1, 8 * np.dtype(dtype).itemsize)
    buffer = (ctypes.c_uint8 * (int(np.prod(shape)) * np.dtype(dtype).itemsize)).from_address(described.data)
    return np.frombuffer(buffer, dtype).reshape(shape)


class FakeLibrary:
    """cuVS's C library: every function returns 1, or 0 after it has set the text of the last error."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.made = SearchParams(**defaults)
        self.searches: list[tuple[int, int, int]] = []
        self.streams: dict[int, int] = {}
        self.ids: dict[int, int] = {}
        self.error = b""
        self.cuvsGetLastErrorText = lambda: self.error

    def cuvsResourcesCreate(self, resources: Any) -> int:  # noqa: N802
        referred(resources).value = len(self.ids) + 1
        self.ids[referred(resources).value] = threading.get_ident()
        return 1

    def cuvsResourcesDestroy(self, resources: Any) -> int:  # noqa: N802
        return 1

    def cuvsStreamSet(self, resources: Any, stream: Any) -> int:  # noqa: N802
        self.streams[resources.value] = stream.value
        return 1

    def cuvsStreamSync(self, resources: Any) -> int:  # noqa: N802
        return 1

    def cuvsCagraIndexCreate(self, index: Any) -> int:  # noqa: N802
        referred(index).value = 77
        return 1

    def cuvsCagraIndexFromArgs(self, resources: Any, metric: Any, graph: Any, rows: Any, index: Any) -> int:  # noqa: N802
        assert (metric.value, index.value) == (0, 77)
        assert view(graph, np.uint32).shape[1] == 8
        self.rows = view(rows, np.float16).astype(np.float32)
        return 1

    def cuvsCagraSearchParamsCreate(self, params: Any) -> int:  # noqa: N802
        referred(params).contents = self.made
        return 1

    def cuvsCagraSearch(  # noqa: N802
        self, resources: Any, params: Any, index: Any, queries: Any, nodes: Any, distances: Any, none: Any
    ) -> int:
        if self.error:
            return 0
        assert (index.value, none.type, view(distances, np.float32).shape) == (77, 0, (1, 10))
        query = view(queries, np.float16).astype(np.float32)
        view(nodes, np.uint32)[:] = nearest(self.rows, query, 10)
        self.searches.append((threading.get_ident(), resources.value, len(query)))
        return 1


DEFAULTS = {"itopk_size": 64, "algo": 100}


def threaded(defaults: dict[str, Any]) -> tuple[Any, FakeLibrary, ThreadedCuvs, Any]:
    data = random_set(300, 16, 20, seed=0)
    index = GraphIndex.build(data.base, metric="l2", dtype="float16", degree=8)
    streams = iter(range(100, 200))
    cupy = SimpleNamespace(
        empty=lambda shape, dtype: np.zeros(shape, dtype).view(OnDevice),
        asnumpy=np.asarray,
        cuda=SimpleNamespace(Stream=lambda non_blocking: SimpleNamespace(ptr=next(streams))),
    )
    library = FakeLibrary(defaults)
    rows, graph = (array.view(OnDevice) for array in (data.base.astype(np.float16), index.data.graph))
    return data, library, ThreadedCuvs(cupy, graph, rows, "l2", library), data.queries.astype(np.float16).view(OnDevice)


def test_each_thread_searches_its_share_of_the_queries_on_a_stream_of_its_own() -> None:
    data, library, peer, queries = threaded(DEFAULTS)
    rate, ids = peer.single_queries(queries, 10, peer.params(48), threads=3, seconds=0.0)
    assert data.recall(ids) > 0.99
    assert {count for _, _, count in library.searches} == {1}
    assert len(library.searches) == len(queries) + 3  # each thread begins with one that is not timed
    users = {(thread, resources) for thread, resources, _ in library.searches}
    assert len(users) == 3
    assert len(set(library.streams.values())) == 3
    assert rate.per_s > 0.0
    assert rate.p50_s > 0.0


def test_the_persistent_kernel_has_the_requested_block_size_and_lifetime() -> None:
    _, library, peer, _ = threaded(DEFAULTS)
    peer.params(48)
    assert (library.made.itopk_size, library.made.algo, library.made.persistent) == (48, 100, False)
    library.made = SearchParams(**DEFAULTS)
    peer.params(48, 128, 0.5)
    made = library.made
    assert (made.algo, made.persistent, made.thread_block_size, made.persistent_lifetime) == (0, True, 128, 0.5)


def test_parameters_of_another_layout_are_not_written() -> None:
    _, library, peer, _ = threaded({"itopk_size": 100, "algo": 64})
    with pytest.raises(Skipped, match="another layout"):
        peer.params(48)
    assert library.made.itopk_size == 100


def test_an_error_of_a_search_in_a_thread_is_raised_with_cuvs_message() -> None:
    _, library, peer, queries = threaded(DEFAULTS)
    library.error = b"out of memory\nat line 7"
    with pytest.raises(RuntimeError, match=r"cuvsCagraSearch: out of memory\Z"):
        peer.single_queries(queries, 10, peer.params(48), threads=2, seconds=0.0)


def test_without_the_library_the_measurement_is_skipped() -> None:
    with pytest.raises(Skipped, match="C library is not available"):
        load_library()
