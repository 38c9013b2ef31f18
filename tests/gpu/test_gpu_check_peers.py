"""Tests of how the GPU check calls cuVS: ids of the type that its version takes, its persistent kernel with blocks of
64 and of 128 threads, and eight threads through its C library.

The fakes have the documented signatures of cuVS 26, of its C headers and of CuPy, over host memory.
"""

import ctypes
import itertools
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import nearest
from benchmarks.gpu_check import cuvs_threads
from benchmarks.gpu_check.cuvs_threads import SearchParams
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.sections import peers
from benchmarks.gpu_check.sections.peers import Peer
from benchmarks.gpu_check.synthetic import random_set
from gpu import GraphIndex

BLOCKS = {"a call": 0, "its persistent kernel, blocks of 64": 64, "its persistent kernel, blocks of 128": 128}
DEFAULTS: dict[str, Any] = {"itopk_size": 64, "algo": 100}


class OnDevice(np.ndarray):
    """A device array of CuPy, in host memory."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class FakeCuvs:
    """`cuvs.neighbors.cagra` and `cuvs.common`: takes device arrays and one type of ids; records its searches."""

    ids_dtype: Any = np.uint32
    Resources = staticmethod(lambda: SimpleNamespace(sync=lambda: None))
    SearchParams = staticmethod(lambda **params: params)

    def __init__(self) -> None:
        self.searches: list[tuple[dict[str, Any], int]] = []

    def from_graph(self, graph: Any, dataset: Any, metric: str, resources: Any) -> Any:
        assert (type(graph), type(dataset), graph.dtype) == (OnDevice, OnDevice, np.uint32)
        return dataset

    def search(
        self, params: Any, index: Any, queries: Any, k: int, neighbors: Any, distances: Any, resources: Any
    ) -> None:
        assert {type(one) for one in (queries, neighbors, distances)} == {OnDevice}
        if neighbors.dtype != self.ids_dtype:
            raise TypeError(f"dtype {neighbors.dtype} not supported")
        neighbors[:] = nearest(np.asarray(index, np.float32), np.asarray(queries, np.float32), k)
        self.searches.append((params, neighbors.ctypes.data))


class FakeLibrary:
    """cuVS's C library: every function returns 1, or 0 after it has set the text of the last error."""

    def __init__(self) -> None:
        self.defaults, self.error = DEFAULTS, b""
        self.params: list[SearchParams] = []
        self.searches: list[tuple[int, int]] = []  # thread, resources
        self.streams: dict[int, int] = {}
        self._resources = itertools.count(1)
        self.cuvsGetLastErrorText = lambda: self.error

    def __getattr__(self, name: str) -> Any:
        """Return a function without an effect here."""
        assert name in ("cuvsResourcesDestroy", "cuvsStreamSync", "cuvsCagraIndexCreate"), name
        return lambda *arguments: 1

    def cuvsResourcesCreate(self, resources: Any) -> int:  # noqa: N802
        resources._obj.value = next(self._resources)  # noqa: SLF001
        return 1

    def cuvsStreamSet(self, resources: Any, stream: Any) -> int:  # noqa: N802
        self.streams[resources.value] = stream.value
        return 1

    def cuvsCagraIndexFromArgs(self, resources: Any, metric: Any, graph: Any, rows: Any, index: Any) -> int:  # noqa: N802
        assert metric.value == 0
        assert array_of(graph, np.uint32).shape[1] == 8
        self.rows = array_of(rows, np.float16).astype(np.float32)
        return 1

    def cuvsCagraSearchParamsCreate(self, params: Any) -> int:  # noqa: N802
        self.params.append(SearchParams(**self.defaults))
        params._obj.contents = self.params[-1]  # noqa: SLF001
        return 1

    def cuvsCagraSearch(  # noqa: N802
        self, resources: Any, params: Any, index: Any, query: Any, nodes: Any, distances: Any, none: Any
    ) -> int:
        if self.error:
            return 0
        assert (array_of(distances, np.float32).shape, none.type) == ((1, 10), 0)
        array_of(nodes, np.uint32)[:] = nearest(self.rows, array_of(query, np.float16).astype(np.float32), 10)
        self.searches.append((threading.get_ident(), resources.value))
        return 1


def array_of(reference: Any, dtype: Any) -> np.ndarray:
    """Return the device array that a reference to DLPack's description describes."""
    described, each = reference._obj, np.dtype(dtype).itemsize  # noqa: SLF001
    assert (described.device, described.lanes, described.bits) == (2, 1, 8 * each)
    shape = tuple(described.shape[i] for i in range(described.ndim))
    memory = (ctypes.c_uint8 * (int(np.prod(shape)) * each)).from_address(described.data)
    return np.frombuffer(memory, dtype).reshape(shape)


@pytest.fixture
def cuvs(monkeypatch: pytest.MonkeyPatch) -> FakeCuvs:
    fake, package = FakeCuvs(), ModuleType("cuvs")
    package.__version__ = "26.6"  # type: ignore[attr-defined]
    streams = iter(range(100, 200))
    cupy = SimpleNamespace(
        asarray=lambda array: array.view(OnDevice),
        empty=lambda shape, dtype: np.zeros(shape, dtype).view(OnDevice),
        asnumpy=np.array,
        cuda=SimpleNamespace(Stream=lambda non_blocking: SimpleNamespace(ptr=next(streams))),
    )
    modules = {"cupy": cupy, "cuvs": package, "cuvs.neighbors": ModuleType("cuvs.neighbors"), "rmm": None}
    for name, module in {**modules, "cuvs.neighbors.cagra": fake, "cuvs.common": fake}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(cuvs_threads, "load_library", lambda: fake)
    return fake


@pytest.fixture
def setup() -> Any:
    data = random_set(300, 16, 20, seed=0)
    index = GraphIndex.build(data.base, metric="l2", dtype="float16", degree=8)
    return SimpleNamespace(data=data, index=index)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_ids_have_the_type_that_this_version_of_cuvs_takes_and_arrays_are_reused(
    cuvs: FakeCuvs, setup: Any, dtype: Any
) -> None:
    cuvs.ids_dtype = dtype
    peer = Peer(setup)
    queries = peer.put(setup.data.queries)
    for _ in range(3):
        found = peer.search(queries, 10, 64)
        assert found.dtype == dtype
        assert setup.data.recall(peer.ids(found)) > 0.99
    assert len({into for _, into in cuvs.searches}) == 1


def test_an_error_that_no_other_type_of_ids_avoids_is_raised(cuvs: FakeCuvs, setup: Any) -> None:
    cuvs.ids_dtype = np.float64
    peer = Peer(setup)
    with pytest.raises(TypeError, match="int64 not supported"):
        peer.search(peer.put(setup.data.queries), 10, 64)


def test_a_single_query_is_timed_by_a_call_and_by_persistent_kernels_with_blocks_of_64_and_of_128_threads(
    cuvs: FakeCuvs, setup: Any
) -> None:
    outcome, queries = Outcome(), setup.data.queries
    assert list(peers.one_query(Peer(setup), queries, 48, outcome)) == list(BLOCKS)
    assert len(outcome.lines) == 3
    kernel = {"itopk_size": 48, "algo": "single_cta", "persistent": True, "persistent_lifetime": 0.5}
    made = [{"itopk_size": 48}, *({**kernel, "thread_block_size": block} for block in (64, 128))]
    assert [params for params, _ in cuvs.searches] == [one for one in made for _ in range(len(queries) + 1)]


def test_eight_threads_search_single_queries_through_the_c_library_by_calls_and_by_both_persistent_kernels(
    cuvs: FakeCuvs, library: FakeLibrary, setup: Any
) -> None:
    outcome, count = Outcome(), len(setup.data.queries)
    found = peers.by_threads(setup, Peer(setup), 48, outcome, seconds=0.0)  # every query once
    assert list(found) == list(BLOCKS), outcome.lines
    assert min(one["recall"] for one in found.values()) > 0.99
    assert min(min(one["per_s"], one["p50_s"]) for one in found.values()) > 0.0
    each = count + 8  # a thread's first search is not timed
    assert len(library.searches) == 3 * each
    for first in range(0, 3 * each, each):
        users = set(library.searches[first : first + each])
        assert len({resources for _, resources in users}) == len(users) == 8
    assert len(set(library.streams.values())) == 24
    made = [(one.itopk_size, one.algo, one.persistent, one.thread_block_size) for one in library.params]
    assert made == [(48, 100, False, 0), (48, 0, True, 64), (48, 0, True, 128)]
    assert [one.persistent_lifetime for one in library.params] == [0.0, 0.5, 0.5]


def test_another_layout_of_parameters_and_an_error_of_a_search_are_lines_of_the_report(
    cuvs: FakeCuvs, library: FakeLibrary, setup: Any
) -> None:
    library.defaults = {"itopk_size": 100, "algo": 64}
    outcome = Outcome()
    assert peers.by_threads(setup, Peer(setup), 48, outcome) == {}
    assert {value for _, value in outcome.lines} == {"skipped: this version's search parameters have another layout"}
    assert {one.itopk_size for one in library.params} == {100}
    library.defaults, library.error, outcome = DEFAULTS, b"out of memory\nat line 7", Outcome()
    assert peers.by_threads(setup, Peer(setup), 48, outcome) == {}
    assert {value for _, value in outcome.lines} == {"not possible: cuvsCagraSearch: out of memory"}
