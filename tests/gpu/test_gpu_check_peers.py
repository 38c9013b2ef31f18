"""Tests of how the GPU check calls cuVS: with device arrays, one set of resources, and its persistent kernel.

The fakes have the documented signatures of cuVS 26 and of CuPy, and reject host arrays.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import nearest
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.sections import peers
from benchmarks.gpu_check.sections.peers import Peer
from benchmarks.gpu_check.synthetic import random_set
from gpu import GraphIndex


class OnDevice(np.ndarray):
    """A device array."""


def on_device(*arrays: Any) -> bool:
    return all(isinstance(array, OnDevice) for array in arrays)


class FakeCuvs:
    """`cuvs.neighbors.cagra` and `cuvs.common.Resources`; records its calls in `calls`."""

    def __init__(self, persistent: bool) -> None:
        self.persistent = persistent
        self.ids_dtype: Any = np.uint32
        self.calls: list[dict[str, Any]] = []
        self.pending: set[int] = set()
        outer = self

        class Resources:
            def sync(self) -> None:
                outer.pending.discard(id(self))

        class SearchParams:
            def __init__(
                self, *, itopk_size: int = 64, algo: str = "auto", persistent: bool = False,
                persistent_lifetime: float | None = None, thread_block_size: int = 0,
            ) -> None:  # fmt: skip
                self.__dict__ |= {"itopk_size": itopk_size, "algo": algo, "persistent": persistent}
                self.__dict__ |= {"thread_block_size": thread_block_size}

        self.Resources, self.SearchParams = Resources, SearchParams

    def from_graph(self, graph: Any, dataset: Any, metric: str = "sqeuclidean", resources: Any = None) -> Any:
        assert on_device(graph, dataset)
        assert (graph.dtype, dataset.dtype) == (np.uint32, np.float16)
        self.pending.add(id(resources))
        return dataset

    def search(
        self, params: Any, index: Any, queries: Any, k: int, neighbors: Any = None, distances: Any = None,
        resources: Any = None, filter: Any = None,
    ) -> None:  # fmt: skip
        assert on_device(queries, neighbors, distances)
        if neighbors.dtype != self.ids_dtype:
            raise TypeError(f"dtype {neighbors.dtype} not supported")
        if params.persistent and not self.persistent:
            raise RuntimeError("not supported here")
        neighbors[:] = nearest(np.asarray(index, np.float32), np.asarray(queries, np.float32), k)
        self.pending.add(id(resources))
        self.calls.append(dict(vars(params), resources=id(resources), into=neighbors.ctypes.data))


@pytest.fixture(params=[True, False], ids=["with its persistent kernel", "without"])
def cuvs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuvs:
    fake = FakeCuvs(request.param)
    cupy = SimpleNamespace(
        asarray=lambda array: array.view(OnDevice),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(OnDevice),
        asnumpy=lambda array: np.array(array),
    )
    package = ModuleType("cuvs")
    package.__version__ = "26.2"  # type: ignore[attr-defined]
    modules = {"cupy": cupy, "cuvs": package, "cuvs.neighbors": ModuleType("cuvs.neighbors"), "rmm": None}
    for name, module in {**modules, "cuvs.neighbors.cagra": fake, "cuvs.common": fake}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def setup() -> Any:
    data = random_set(300, 16, 20, seed=0)
    index = GraphIndex.build(data.base, metric="l2", dtype="float16", degree=8)
    return SimpleNamespace(data=data, index=index)


def test_searches_reuse_resources_and_result_arrays_and_are_complete_when_they_return(
    cuvs: FakeCuvs, setup: Any
) -> None:
    peer = Peer(setup)
    queries = peer.put(setup.data.queries)
    for _ in range(3):
        found = peer.search(queries, 10, 64)
        assert cuvs.pending == set()
    assert setup.data.recall(peer.ids(found)) > 0.99
    assert len({(one["resources"], one["into"]) for one in cuvs.calls}) == 1


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_ids_have_the_type_that_this_version_of_cuvs_accepts(cuvs: FakeCuvs, setup: Any, dtype: Any) -> None:
    cuvs.ids_dtype = dtype
    peer = Peer(setup)
    queries = peer.put(setup.data.queries)
    for _ in range(2):
        assert setup.data.recall(peer.ids(peer.search(queries, 10, 64))) > 0.99


def test_an_error_that_no_other_type_of_ids_avoids_is_raised(cuvs: FakeCuvs, setup: Any) -> None:
    cuvs.ids_dtype = np.float64
    peer = Peer(setup)
    with pytest.raises(TypeError, match="int64 not supported"):
        peer.search(peer.put(setup.data.queries), 10, 64)


def test_a_single_query_is_timed_in_every_way_and_the_best_counts(cuvs: FakeCuvs, setup: Any) -> None:
    outcome = Outcome()
    found = peers.one_query(Peer(setup), setup.data.queries, 48, outcome)
    kernels = [f"its persistent kernel, blocks of {block}" for block in (64, 128)]
    assert list(found) == ["a call", *(kernels if cuvs.persistent else [])]
    assert cuvs.calls[0] == {**cuvs.calls[0], "itopk_size": 48, "algo": "auto", "persistent": False}
    told = dict(outcome.lines)[f"one query alone, p50, cuVS, {kernels[1]}"]
    if cuvs.persistent:
        last = {"algo": "single_cta", "persistent": True, "thread_block_size": 128}
        assert cuvs.calls[-1] == {**cuvs.calls[-1], **last}
        assert told.endswith("µs")
    else:
        assert told == "not possible: not supported here"
