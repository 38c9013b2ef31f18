"""Queries of a running batch that are restricted to some rows, as compiled loops restrict them; the contract of every
backend that takes filters, and how one says that it takes none."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from gpu import CpuEngine, GraphIndex
from gpu.backend import INVALID, RELEASE
from gpu.cpu.passing import ROWS_A_STEP, ROWS_AN_EXTEND, walk_length
from gpu.index_data import bitmap
from gpu.rows import Dtype, Metric
from tests.gpu.cases import DTYPES, METRICS, clustered, exact_neighbors, recall
from tests.gpu.engines import BACKENDS, Backend

K = 10


class Compiled:
    """An engine's functions, called as a compiled loop calls them."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine  # the functions work on its memory
        made = engine.backend()
        self.handle, self.number = made.handle, made.number
        self.admit, self.extend, self.harvest, self.change, self.restrict = (
            self._function(count, address)
            for count, address in zip((7, 2, 4, 3, 4), (*made[:4], made.restrict), strict=True)
        )
        self._report = np.zeros(2 + 2 * engine.limits.slots, np.int64)

    @staticmethod
    def _function(count: int, address: int) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(address)

    def ask(
        self, query: npt.NDArray[np.float32], bits: npt.NDArray[np.uint64] | None, passing: int, top_m: int = 64
    ) -> int:
        query = np.ascontiguousarray(query)
        slot = self.admit(self.handle, query.ctypes.data, 0, K, top_m, 1, 0)
        assert slot > INVALID
        if bits is not None:
            assert self.restrict(self.handle, slot, bits.ctypes.data, passing) == 0
        return slot

    def step(self) -> dict[int, int]:
        done = self.extend(self.handle, self._report.ctypes.data)
        return {slot: extends for slot, extends in self._report[2 : 2 + 2 * done].reshape(-1, 2).tolist()}

    def finish(self, slots: list[int]) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
        """What they find, int64 [slots, K], and their extends. The slots are free then."""
        extends: dict[int, int] = {}
        while set(extends) < set(slots):
            extends |= self.step()
        ids, distances = np.full((len(slots), K), -1), np.full((len(slots), K), np.inf, np.float32)
        for row, slot in enumerate(slots):
            count = self.harvest(self.handle, slot, ids[row].ctypes.data, distances[row].ctypes.data)
            assert (np.diff(distances[row, :count]) >= 0).all()
            self.change(self.handle, slot, RELEASE)
        return ids, extends


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [0.5, 0.1, 0.02, 0.002])
def test_restricted_queries_find_the_nearest_rows_that_pass_beside_others_that_find_any(
    metric: Metric, dtype: Dtype, part: float
) -> None:
    random = np.random.default_rng(7)
    vectors, queries = clustered(random, 3020, 24)[:3000], clustered(random, 20, 24)
    allowed = random.random(3000) < part
    engine = Compiled(CpuEngine({"a": GraphIndex.build(vectors, metric=metric, dtype=dtype)}, slots=40))
    bits = bitmap(allowed, 3000)
    restricted = [engine.ask(query, bits, int(allowed.sum())) for query in queries]
    free = [engine.ask(query, None, 0) for query in queries]
    found, _ = engine.finish([*restricted, *free])

    own = np.flatnonzero(allowed)
    expected = own[exact_neighbors(vectors[own], queries, metric, min(K, len(own)))]
    assert allowed[found[:20][found[:20] >= 0]].all()
    assert ((found[:20] >= 0).sum(axis=1) == min(K, len(own))).all()
    assert recall(found[:20], expected) > 0.95
    assert recall(found[20:], exact_neighbors(vectors, queries, metric, K)) > 0.95


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_that_pass_far_from_the_query_are_found_though_the_walk_does_not_come_there(dtype: Dtype) -> None:
    """A filter that goes against the query: the walk's list holds none of them."""
    random = np.random.default_rng(8)
    near, far = random.normal(0, 0.1, (3000, 16)), random.normal(50, 0.1, (1100, 16))
    vectors = np.concatenate([near, far]).astype(np.float32)
    allowed = np.arange(4100) >= 3000
    engine = Compiled(CpuEngine({"a": GraphIndex.build(vectors, metric="l2", dtype=dtype)}, slots=4, max_top_m=64))
    assert walk_length(16, 1100, 4100, 64) == 60  # a walk, at first
    found, _ = engine.finish([engine.ask(vectors[0], bitmap(allowed, 4100), 1100, top_m=16)])
    assert recall(found, 3000 + exact_neighbors(vectors[3000:], vectors[:1], "l2", K)) > 0.85


def test_a_slot_forgets_the_rows_that_its_last_query_was_restricted_to() -> None:
    vectors = clustered(np.random.default_rng(9), 500, 16)
    engine = Compiled(CpuEngine({"a": GraphIndex.build(vectors, metric="l2")}, slots=1))
    one = np.arange(500) == 499
    assert engine.finish([engine.ask(vectors[0], bitmap(one, 500), 1)])[0][0].tolist() == [499] + [-1] * 9
    assert engine.finish([engine.ask(vectors[0], None, 0)])[0][0, 0] == 0


def test_where_no_row_passes_nothing_is_found_and_the_query_ends() -> None:
    vectors = clustered(np.random.default_rng(9), 500, 16)
    engine = Compiled(CpuEngine({"a": GraphIndex.build(vectors)}, slots=2))
    found, extends = engine.finish([engine.ask(vectors[0], bitmap(np.zeros(500, bool), 500), 0)])
    assert (found == -1).all()
    assert extends == {0: 1}


def test_rows_are_compared_a_few_an_extend_so_that_other_slots_have_their_turn() -> None:
    vectors = clustered(np.random.default_rng(9), 3 * ROWS_AN_EXTEND, 16)
    engine = Compiled(CpuEngine({"a": GraphIndex.build(vectors)}, slots=2))
    all_rows = bitmap(np.ones(len(vectors), bool), len(vectors))
    _, extends = engine.finish([engine.ask(vectors[0], all_rows, len(vectors))])
    assert extends == {0: 3}


def test_the_walk_is_as_much_longer_as_fewer_rows_pass_until_comparing_them_is_cheaper() -> None:
    assert walk_length(64, 100_000, 100_000, 512) == 64
    assert walk_length(64, 50_000, 100_000, 512) == 128
    assert walk_length(64, 10_000, 100_000, 512) == 512  # 640 would be due: it is not far from that
    assert walk_length(64, 6_000, 100_000, 512) == 0  # 1,067 would be
    assert walk_length(64, ROWS_A_STEP * 512, 8 * ROWS_A_STEP * 512, 512) == 0  # as dear as comparing
    assert walk_length(64, 0, 100_000, 512) == 0


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.device != "cpu"], ids=str)
def test_an_engine_that_takes_no_filters_says_so(backend: Backend) -> None:
    index = GraphIndex.build(clustered(np.random.default_rng(1), 50, 16))
    with backend.engine({"a": index}, slots=2) as engine:
        assert engine.backend().restrict == 0
    assert CpuEngine({"a": index}).backend().restrict != 0
