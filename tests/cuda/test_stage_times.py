"""A timed extend has the usual effect. The clock is this process's: an emulated device has no events."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.gpu_check import device_times
from gpu import GraphIndex, SearchParams
from gpu.cuda.engine import CudaEngine
from tests.cuda.conftest import NewDriver
from tests.gpu.datasets import clustered

PARAMS = SearchParams(5, 32, 2)


def test_a_timed_extend_advances_the_query_and_reports_the_rows_compared(
    new_driver: NewDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    index = GraphIndex.build(clustered(rng, 300, 24), metric="l2", degree=8, neighbor_codes=False)
    queries = clustered(rng, 3, 24)
    driver = new_driver()

    def seconds(stream: int, calls: Sequence[Callable[[], None]]) -> list[float]:
        took = []
        for call in calls:
            start = time.perf_counter()
            call()
            driver.synchronise(stream)
            took.append(time.perf_counter() - start)
        return took

    monkeypatch.setattr(device_times, "_seconds", seconds)
    engine = CudaEngine(driver, b"", {"docs": index}, slots=3, max_top_m=64)
    slots = [engine.admit(query, PARAMS, "docs") for query in queries]
    engine.extend()
    for _ in range(2):
        times = device_times.time_stages(engine)
        assert list(times.seconds) == ["compute_distances", "merge_and_gather"]
        assert times.slots == 3
        assert 0 < times.rows <= 3 * PARAMS.search_width * 8
    while engine.active_slots:
        engine.extend()
    expected, _ = index.search(queries, PARAMS.k, PARAMS.top_m, PARAMS.search_width)
    assert np.array_equal([engine.result(slot)[0] for slot in slots], expected)
    engine.close()
