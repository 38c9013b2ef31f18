"""Tests of per-kernel timing: the events around each launch, and that a timed extend has the usual effect."""

import numpy as np
import pytest

from gpu import DeviceError, GraphIndex, SearchParams
from gpu.cuda.engine import CudaEngine
from tests.cuda.conftest import NewDriver
from tests.cuda.recorder import RecordingDriver
from tests.cuda.scripted_device import ScriptedDevice
from tests.gpu.datasets import clustered

STAGES = ["compute_distances", "merge_and_gather"]
PARAMS = SearchParams(5, 32, 2)


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(1), 300, 24), metric="l2", degree=8, neighbor_codes=False)


def test_each_kernel_is_between_two_events(index: GraphIndex) -> None:
    driver = RecordingDriver()
    ScriptedDevice(driver, length=4)
    engine = CudaEngine(driver, b"image", {"docs": index}, slots=4, max_top_m=64)
    engine.admit(np.ones(24, np.float32), PARAMS, "docs")
    with pytest.raises(DeviceError, match="since the last extend"):
        engine.time_stages()
    engine.extend()
    driver.calls.clear()
    times = engine.time_stages()
    assert list(times.seconds) == STAGES
    work = [call[1] if call[0] == "launch" else call[0] for call in driver.calls if call[0] in ("launch", "record")]
    assert work == ["record", STAGES[0], "record", STAGES[1], "record"]
    engine.close()


def test_a_timed_extend_advances_the_query_and_reports_the_rows_compared(
    index: GraphIndex, new_driver: NewDriver
) -> None:
    queries = clustered(np.random.default_rng(2), 3, 24)
    expected, _ = index.search(queries, PARAMS.k, PARAMS.top_m, PARAMS.search_width)
    took = []
    for timed in (0, 2):
        engine = CudaEngine(new_driver(), b"", {"docs": index}, slots=5, max_top_m=64)
        slots = [engine.admit(query, PARAMS, "docs") for query in queries]
        engine.extend()
        for _ in range(timed):
            times = engine.time_stages()
            assert list(times.seconds) == STAGES
            assert all(seconds > 0 for seconds in times.seconds.values())
            assert times.slots == 3
            assert 0 < times.rows <= 3 * PARAMS.search_width * 8
        while engine.active_slots:
            engine.extend()
        assert np.array_equal([engine.result(slot)[0] for slot in slots], expected)
        took.append([engine.extends(slot) for slot in slots])
        engine.close()
    assert took[0] == took[1]


def test_a_fused_extend_is_one_kernel_with_the_same_effect(index: GraphIndex, new_driver: NewDriver) -> None:
    queries = clustered(np.random.default_rng(2), 2, 24)
    engine = CudaEngine(new_driver(), b"", {"docs": index}, slots=2, max_top_m=64)
    slots = [engine.admit(query, PARAMS, "docs") for query in queries]
    engine.extend()
    times = engine.time_stages(fused=True)
    assert (list(times.seconds), times.slots, times.rows > 0) == (["extend_fused"], 2, True)
    while engine.active_slots:
        engine.extend()
    expected, _ = index.search(queries, PARAMS.k, PARAMS.top_m, PARAMS.search_width)
    assert np.array_equal([engine.result(slot)[0] for slot in slots], expected)
    engine.close()
