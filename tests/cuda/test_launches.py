"""Tests of launches of several extends: their length, what ends them, and results equal to those of single extends."""

import numpy as np
import pytest

from gpu import GraphIndex, SearchParams
from gpu.cuda import layout
from gpu.index.data import IndexData
from tests.cuda.conftest import NewDriver
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.backends import Backend
from tests.gpu.datasets import exact_vectors, random_index
from tests.gpu.reference import search_reference

LONG = SearchParams(k=4, top_m=60, search_width=1)
SHORT = SearchParams(k=4, top_m=5, search_width=1)


def loop(bench: Workbench, limit: int) -> None:
    """Replay the two kernels in a conditional WHILE node once."""
    driver = bench.driver
    driver.begin_capture(bench.stream)
    node = driver.begin_while(bench.stream)
    outer, bench.stream = bench.stream, node.stream
    bench.stages(bench.shape.slots, blocks=2, limit=limit, condition=node.handle)
    bench.stream = outer
    driver.end_while(node)
    graph = driver.end_capture(bench.stream)
    driver.replay(bench.stream, graph)
    driver.synchronise(bench.stream)
    driver.destroy_graph(graph)


@pytest.fixture
def data() -> IndexData:
    return random_index(np.random.default_rng(1), 300, "l2", "float32", 8, 12)


def running(new_driver: NewDriver, data: IndexData, *params: SearchParams) -> tuple[Workbench, np.ndarray]:
    queries = exact_vectors(np.random.default_rng(2), len(params))
    bench = Workbench(new_driver(), [data], Limits(slots=len(params)))
    for slot, (query, wanted) in enumerate(zip(queries, params, strict=True)):
        bench.admit(slot, query, wanted)
    return bench, queries


def test_a_launch_runs_to_its_limit_and_counts_as_one(new_driver: NewDriver, data: IndexData) -> None:
    bench, _ = running(new_driver, data, LONG, LONG)
    loop(bench, 7)
    assert [bench.extends(0), bench.extends(1)] == [7, 7]
    loop(bench, 5)
    assert [bench.extends(0), bench.extends(1)] == [12, 12]
    assert bench.progress.view.view(layout.PROGRESS)[["launches", "extends"]][0].tolist() == (2, 12)


def test_a_launch_ends_when_a_slot_is_done_and_the_others_continue_in_the_next(
    new_driver: NewDriver, data: IndexData
) -> None:
    params = (SHORT, LONG)
    bench, queries = running(new_driver, data, *params)
    for launches in (1, 2):
        loop(bench, 1000)
        finished = [slot for slot in range(2) if bench.done(slot)]
        assert len(finished) == launches
        for slot in finished:
            bench.command(slot, layout.FREE)
    for slot in range(2):
        ids, distances, extends = search_reference(data, queries[slot], params[slot])
        assert bench.result(slot, 4) == (ids.tolist(), distances.tolist())
        assert bench.extends(slot) == extends
    assert bench.launches == 2


def test_a_doorbell_ends_a_launch_after_the_extend_that_observes_it(new_driver: NewDriver, data: IndexData) -> None:
    bench, _ = running(new_driver, data, LONG, LONG)
    bench.doorbell.view.view(np.uint32)[0] = 1
    loop(bench, 1000)
    assert [bench.extends(0), bench.extends(1)] == [1, 1]
    bench.doorbell.view.view(np.uint32)[0] = 0
    loop(bench, 9)
    assert [bench.extends(0), bench.extends(1)] == [10, 10]


def test_a_query_writes_to_the_host_only_when_it_is_done(new_driver: NewDriver, data: IndexData) -> None:
    bench, queries = running(new_driver, data, SHORT)
    extends = search_reference(data, queries[0], SHORT)[2]
    bench.results.view[:] = 0xA5
    loop(bench, extends - 1)
    assert set(bench.results.view) == {0xA5}
    loop(bench, 1)
    assert int(bench.results.view[: layout.RESULT.itemsize].view(layout.RESULT)[0]["extends"]) == extends


def test_a_launch_without_work_ends(new_driver: NewDriver, data: IndexData) -> None:
    bench, _ = running(new_driver, data, LONG)
    bench.command(0, layout.PAUSED)
    loop(bench, 3)
    assert bench.launches == 1
    assert int(bench.slot(0)["extends"]) == 0


@pytest.mark.parametrize("limit", [3, 50])
def test_an_engine_of_long_launches_serves_arrivals_and_matches_the_reference(limit: int, data: IndexData) -> None:
    random = np.random.default_rng(3)
    params = [SearchParams(k=5, top_m=int(random.integers(5, 40)), search_width=2) for _ in range(12)]
    queries = exact_vectors(random, len(params))
    waiting, done = list(range(len(params))), 0
    running: dict[int, int] = {}
    with Backend("emulated", "loop").engine({"docs": GraphIndex(data)}, slots=3, extends_per_launch=limit) as engine:
        while waiting or running:
            while waiting and engine.free_slots:
                number = waiting.pop()
                running[engine.admit(queries[number], params[number], "docs")] = number
            for slot in engine.extend().tolist():
                number = running.pop(slot)
                ids, distances, extends = search_reference(data, queries[number], params[number])
                assert engine.extends(slot) == extends
                assert engine.result(slot)[0].tolist() == ids.tolist()
                assert engine.result(slot)[1].tolist() == distances.tolist()
                engine.release(slot)
                done += 1
    assert done == len(params)
