"""Contract tests of every backend: queries of a running batch restricted to some rows, by the compiled functions."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from gpu import Engine, GraphIndex
from gpu.cpu.extend.filtered import SCAN_ROWS_PER_ENTRY, SCAN_ROWS_PER_EXTEND, filtered_top_m
from gpu.engine import INVALID, PAUSE, RELEASE, RESUME
from gpu.index.data import IndexData, bitmap
from gpu.index.rows import Dtype, Metric
from tests.gpu import datasets
from tests.gpu.backends import BACKENDS, Backend
from tests.gpu.datasets import clustered, exact_neighbors, recall

Vectors = npt.NDArray[np.float32]
K = 10


class Compiled:
    """Calls an engine's functions as a compiled loop does."""

    def __init__(self, engine: Engine, slots: int) -> None:
        self._engine = engine  # the functions work on its memory
        made = engine.backend()
        self.handle, self.number = made.handle, made.number
        self.admit, self.extend, self.read_result, self.change, self.set_filter = (
            self._function(count, address)
            for count, address in zip((7, 2, 4, 3, 4), (*made[:4], made.set_filter), strict=True)
        )
        self.prioritize = self._function(2, made.prioritize)
        self._report = np.zeros(2 + 2 * slots, np.int64)

    @staticmethod
    def _function(count: int, address: int) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(address)

    def load(self, name: str, index: GraphIndex) -> int:
        self._engine.load(name, index)
        return self.number(name)

    def forget(self, name: str) -> bool:
        return self._engine.unload(name)

    def ask(
        self,
        query: npt.NDArray[np.float32],
        bits: npt.NDArray[np.uint64] | None,
        passing: int,
        top_m: int = 64,
        collection: int = 0,
    ) -> int:
        query = np.ascontiguousarray(query)
        slot = self.admit(self.handle, query.ctypes.data, collection, K, top_m, 1, 0)
        assert slot > INVALID
        if bits is not None:
            assert self.set_filter(self.handle, slot, bits.ctypes.data, passing) == 0
        return slot

    def step(self) -> dict[int, int]:
        done = self.extend(self.handle, self._report.ctypes.data)
        return {slot: extends for slot, extends in self._report[2 : 2 + 2 * done].reshape(-1, 2).tolist()}

    def finish(self, slots: list[int]) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
        """Return results, int64 [slots, K], and extends of slots, and release them."""
        extends: dict[int, int] = {}
        while set(extends) < set(slots):
            extends |= self.step()
        ids, distances = np.full((len(slots), K), -1), np.full((len(slots), K), np.inf, np.float32)
        for row, slot in enumerate(slots):
            count = self.read_result(self.handle, slot, ids[row].ctypes.data, distances[row].ctypes.data)
            assert (np.diff(distances[row, :count]) >= 0).all()
            self.change(self.handle, slot, RELEASE)
        return ids, extends


@contextmanager
def compiled(backend: Backend, index: GraphIndex, slots: int, **limits: int) -> Iterator[Compiled]:
    with backend.engine({"a": index}, slots=slots, **limits) as engine:
        yield Compiled(engine, slots)


@functools.cache
def many(count: int) -> npt.NDArray[np.float32]:
    return clustered(np.random.default_rng(5), count, 24)


@functools.cache
def many_indexed(count: int, metric: Metric, dtype: Dtype) -> GraphIndex:
    return GraphIndex.build(many(count), metric=metric, dtype=dtype, neighbor_codes=False)


@functools.cache
def near_and_far() -> tuple[npt.NDArray[np.float32], GraphIndex]:
    """Return 3,000 rows in one cluster and 1,100 in another."""
    random = np.random.default_rng(8)
    vectors = np.concatenate([random.normal(0, 0.1, (3000, 16)), random.normal(50, 0.1, (1100, 16))])
    return vectors.astype(np.float32), GraphIndex.build(vectors.astype(np.float32), metric="l2")


ON_EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=str)
# Every form of launch has the same filter: each is asked for a walk and for a comparison of all, one for each type.
KINDS = [
    (backend, metric, dtype, part)
    for backend in BACKENDS
    for metric, dtype in datasets.KINDS
    for part in (0.5, 0.1, 0.02, 0.002)
    if (backend.device == "cpu" and (part in (0.5, 0.002) or metric == "l2"))
    or (metric == "ip" and part in (0.5, 0.002))
    or (backend.form, part) == ("loop", 0.5)
]


@pytest.mark.parametrize(("backend", "metric", "dtype", "part"), KINDS, ids=str)
def test_restricted_and_unrestricted_queries_share_a_batch(
    backend: Backend, metric: Metric, dtype: Dtype, part: float
) -> None:
    count, query_count = (3000, 20) if backend.device == "cpu" else (1500, 6)
    vectors, queries = many(count), clustered(np.random.default_rng(6), query_count, 24)
    allowed = np.random.default_rng(7).random(count) < part
    bits = bitmap(allowed, count)
    with compiled(backend, many_indexed(count, metric, dtype), slots=2 * query_count) as engine:
        restricted = [engine.ask(query, bits, int(allowed.sum())) for query in queries]
        free = [engine.ask(query, None, 0) for query in queries]
        found, _ = engine.finish([*restricted, *free])

    own = np.flatnonzero(allowed)
    expected = own[exact_neighbors(vectors[own], queries, metric, min(K, len(own)))]
    assert allowed[found[:query_count][found[:query_count] >= 0]].all()
    assert ((found[:query_count] >= 0).sum(axis=1) == min(K, len(own))).all()
    assert recall(found[:query_count], expected) > 0.95
    assert recall(found[query_count:], exact_neighbors(vectors, queries, metric, K)) > 0.95


@ON_EVERY_BACKEND
def test_passing_rows_far_from_the_query_are_found_although_the_walk_does_not_reach_them(backend: Backend) -> None:
    """The filter excludes everything near the query: the walk's list holds none of the passing rows."""
    vectors, index = near_and_far()
    allowed = np.arange(4100) >= 3000
    assert filtered_top_m(16, 1100, 4100, 64) == 60  # a walk at first
    bits = bitmap(allowed, 4100)
    with compiled(backend, index, slots=4, max_top_m=64) as engine:
        found, _ = engine.finish([engine.ask(vectors[0], bits, 1100, top_m=16)])
    assert recall(found, 3000 + exact_neighbors(vectors[3000:], vectors[:1], "l2", K)) > 0.85


@pytest.mark.parametrize("neighbor_codes", [True, False])
def test_a_filter_that_excludes_the_querys_neighbourhood_loses_no_recall(neighbor_codes: bool) -> None:
    """A walk finds enough rows that pass, but not the nearest ones: it has to notice that few of those near it pass."""
    random = np.random.default_rng(12)
    centres = random.normal(size=(60, 96)).astype(np.float32)
    label = random.integers(0, 60, 9000)
    vectors = (centres[label] + random.normal(size=(9000, 96))).astype(np.float32)
    index = GraphIndex.build(vectors, metric="l2", neighbor_codes=neighbor_codes)
    recalls, (backend,) = [], (one for one in BACKENDS if one.device == "cpu")
    with compiled(backend, index, slots=1) as engine:
        for query in vectors[::300] + np.float32(0.01):
            order = exact_neighbors(centres, query[None], "l2", 60)[0]
            for near in (1, 10, 20, 30):  # of the forty clusters that are excluded, so many are the nearest
                excluded = np.concatenate([order[:near], random.permutation(order[near:])[: 40 - near]])
                allowed = ~np.isin(label, excluded)
                own, bits = np.flatnonzero(allowed), bitmap(allowed, 9000)
                found, _ = engine.finish([engine.ask(query, bits, len(own))])
                recalls.append(recall(found, own[exact_neighbors(vectors[own], query[None], "l2", K)]))
    assert np.mean(recalls) > 0.995


@pytest.mark.parametrize(("metric", "dtype"), [("l2", "float32"), ("cosine", "float16"), ("ip", "float32")])
def test_a_scan_of_codes_finds_the_nearest_rows_that_pass(metric: Metric, dtype: Dtype) -> None:
    """The filter excludes all rows near the query, so the walk finds none; many are as far away as the nearest."""
    random = np.random.default_rng(13)
    vectors, queries = clustered(random, 6000, 48), clustered(random, 10, 48)
    index = GraphIndex.build(vectors, metric=metric, dtype=dtype, neighbor_codes=True)
    order = exact_neighbors(vectors, queries, metric, 6000)
    (backend,) = (one for one in BACKENDS if one.device == "cpu")
    with compiled(backend, index, slots=10, max_top_m=64) as engine:
        for excluded in (2000, 4000):
            allowed = np.ones((10, 6000), bool)
            np.put_along_axis(allowed, order[:, :excluded], values=False, axis=1)
            bits = [bitmap(one, 6000) for one in allowed]
            slots = [
                engine.ask(query, own, 6000 - excluded, top_m=16) for query, own in zip(queries, bits, strict=True)
            ]
            found, extends = engine.finish(slots)
            assert recall(found, order[:, excluded : excluded + K]) > 0.95
            assert all(steps < (6000 - excluded) / SCAN_ROWS_PER_EXTEND + 64 for steps in extends.values())


@ON_EVERY_BACKEND
def test_a_slot_does_not_keep_the_restriction_of_its_previous_query(backend: Backend) -> None:
    vectors = clustered(np.random.default_rng(9), 500, 16)
    with compiled(backend, GraphIndex.build(vectors, metric="l2"), slots=1) as engine:
        one = np.arange(500) == 499
        assert engine.finish([engine.ask(vectors[0], bitmap(one, 500), 1)])[0][0].tolist() == [499] + [-1] * 9
        assert engine.finish([engine.ask(vectors[0], None, 0)])[0][0, 0] == 0


@ON_EVERY_BACKEND
def test_a_query_without_passing_rows_ends_with_an_empty_result(backend: Backend) -> None:
    vectors = clustered(np.random.default_rng(9), 500, 16)
    with compiled(backend, GraphIndex.build(vectors), slots=2) as engine:
        found, extends = engine.finish([engine.ask(vectors[0], bitmap(np.zeros(500, bool), 500), 0)])
    assert (found == -1).all()
    assert extends == {0: 1}


@ON_EVERY_BACKEND
def test_exhaustive_comparison_is_spread_over_extends_so_other_slots_progress(backend: Backend) -> None:
    vectors = clustered(np.random.default_rng(9), 2 * SCAN_ROWS_PER_EXTEND + 40, 16)  # too few for a walk to pay off
    with compiled(backend, GraphIndex.build(vectors), slots=2) as engine:
        all_rows = bitmap(np.ones(len(vectors), bool), len(vectors))
        _, extends = engine.finish([engine.ask(vectors[0], all_rows, len(vectors))])
    assert extends == {0: 3}


@ON_EVERY_BACKEND
def test_rows_without_a_graph_are_compared_in_their_current_state_even_after_a_pause(backend: Backend) -> None:
    """Growing rows: bits are cleared and rows written in place while they are searched."""
    vectors = clustered(np.random.default_rng(9), 3 * SCAN_ROWS_PER_EXTEND, 16)
    graph = GraphIndex.build(vectors, metric="l2")
    bare = IndexData(graph.data.rows, np.zeros((len(vectors), 0), np.uint32), np.zeros(0, np.uint32), None)
    with compiled(backend, graph, slots=3) as engine:
        number = engine.load("bare", GraphIndex(bare))
        bits = bitmap(np.ones(len(vectors), bool), len(vectors))
        paused = engine.ask(vectors[-1], None, 0, collection=number)
        others = [engine.ask(vectors[-1], bits, len(vectors), collection=number), engine.ask(vectors[-1], None, 0)]
        engine.step()
        engine.change(engine.handle, paused, PAUSE)
        bits[-1] &= ~(np.uint64(1) << np.uint64(len(vectors) - 1 & 63))  # the nearest row of all is deleted
        found, extends = engine.finish(others)
        assert found[0, 0] != len(vectors) - 1
        assert found[1, 0] == len(vectors) - 1
        assert extends[others[0]] == 3
        engine.change(engine.handle, paused, RESUME)
        found, extends = engine.finish([paused])
        assert found[0].tolist() == exact_neighbors(vectors, vectors[-1:], "l2", K)[0].tolist()
        assert extends[paused] == 3
        assert engine.forget("bare")


@pytest.mark.parametrize("neighbor_codes", [True, False])
def test_a_walk_ends_early_if_the_pass_rate_is_higher_near_the_query(neighbor_codes: bool) -> None:
    random = np.random.default_rng(11)
    vectors = clustered(random, 6000, 16)
    order = exact_neighbors(vectors, vectors[:1], "l2", 6000)[0]
    near, mixed = np.zeros(6000, bool), np.zeros(6000, bool)
    near[order[:1200]] = mixed[random.permutation(6000)[:1200]] = True
    index = GraphIndex.build(vectors, metric="l2", neighbor_codes=neighbor_codes)
    queries = vectors[order[:12]] + np.float32(0.01)
    steps = []
    (backend,) = (one for one in BACKENDS if one.device == "cpu")
    with compiled(backend, index, slots=12) as engine:
        for allowed in (near, mixed, np.ones(6000, bool)):
            bits = bitmap(allowed, 6000)
            found, extends = engine.finish([engine.ask(query, bits, int(allowed.sum()), top_m=32) for query in queries])
            own = np.flatnonzero(allowed)
            assert recall(found, own[exact_neighbors(vectors[own], queries, "l2", K)]) > 0.95
            steps.append(sum(extends.values()))
    assert steps[0] < 1.5 * steps[2] < steps[1]


def test_the_walk_lengthens_as_fewer_rows_pass_until_comparing_all_is_cheaper() -> None:
    assert filtered_top_m(64, 100_000, 100_000, 512) == 64
    assert filtered_top_m(64, 50_000, 100_000, 512) == 128
    assert filtered_top_m(64, 10_000, 100_000, 512) == 512  # 640 in theory
    assert filtered_top_m(64, 6_000, 100_000, 512) == 0  # 1,067 in theory
    # As expensive as comparing all passing rows.
    assert filtered_top_m(64, SCAN_ROWS_PER_ENTRY * 512, 8 * SCAN_ROWS_PER_ENTRY * 512, 512) == 0
    assert filtered_top_m(64, 0, 100_000, 512) == 0
