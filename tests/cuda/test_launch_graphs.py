"""Tests of captured graphs: one per bucket, with the layout's kernels, grids, blocks and arguments, in order."""

from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex, InvalidParams
from gpu.cuda import batch_shape, layout
from gpu.cuda.engine import CudaEngine
from tests.cuda.recorder import Launch, RecordingDriver
from tests.cuda.scripted_device import ScriptedDevice
from tests.gpu.datasets import clustered


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(1), 300, 24), metric="l2", degree=8, neighbor_codes=False)


def opened(index: GraphIndex, driver: RecordingDriver, **options: Any) -> CudaEngine:
    ScriptedDevice(driver)
    return CudaEngine(driver, b"image", {"docs": index}, **options)


def graphs(driver: RecordingDriver) -> list[list[Launch]]:
    return list(driver.graphs.values())


def test_each_bucket_has_a_graph_of_the_two_kernels(index: GraphIndex) -> None:
    driver = RecordingDriver()
    opened(index, driver, slots=40, max_top_m=64, form="plain")
    shape = batch_shape.BatchShape.of([index.data], 40, 64, 64, 8)
    assert len(driver.graphs) == 4
    for bucket, (distances, merge) in zip((1, 8, 32, 40), graphs(driver), strict=True):
        assert (distances.kernel, merge.kernel) == ("compute_distances", "merge_and_gather")
        blocks = batch_shape.distance_blocks(shape, bucket, driver.multiprocessors)
        assert (distances.grid.x, merge.grid.x, distances.arguments[1].value) == (blocks, bucket, bucket)
        assert (distances.block.x, merge.block.x) == (layout.DISTANCE_THREADS, layout.MERGE_THREADS)
        shared_bytes = (batch_shape.distance_shared_bytes(bucket), shape.merge_shared_bytes)
        assert (distances.shared_bytes, merge.shared_bytes) == shared_bytes
        assert [argument.value for argument in merge.arguments[1:]] == [1, 0]


def test_all_kernels_receive_the_same_batch_with_the_allocated_addresses(index: GraphIndex) -> None:
    driver = RecordingDriver()
    opened(index, driver, slots=8, max_top_m=64)
    batches = {bytes(launch.arguments[0]) for graph in graphs(driver) for launch in graph}
    assert len(batches) == 1
    batch = np.frombuffer(batches.pop(), layout.BATCH)[0]
    for name, nbytes in batch_shape.BatchShape.of([index.data], 8, 64, 64, 8).array_bytes().items():
        if name not in layout.IN_PINNED_MEMORY:
            assert driver.memory_of[int(batch[name])].nbytes >= nbytes
    assert not driver.device(int(batch["slots"]), np.uint8, 8 * int(batch["line_bytes"])).any()
    assert not driver.device(int(batch["counters"]), np.uint8, layout.COUNTERS.itemsize).any()
    record = driver.device(int(batch["collections"]), layout.COLLECTION, 1)[0]
    graph = driver.device(int(record["graph"]), np.uint32, index.size * index.degree)
    assert graph.tolist() == index.data.graph.ravel().tolist()


def test_a_conditional_loop_is_captured_around_the_two_kernels(index: GraphIndex) -> None:
    driver = RecordingDriver()
    engine = opened(index, driver, slots=8, max_top_m=64, extends_per_launch=16, form="loop")
    assert (set(engine.forms.values()), engine.extends_per_launch) == ({"loop"}, 16)
    for graph in graphs(driver):
        assert [launch.kernel for launch in graph] == ["compute_distances", "merge_and_gather"]
        assert {launch.handle for launch in graph} == {graph[1].arguments[2].value} != {0}
        assert graph[1].arguments[1].value == 16


def test_a_start_makes_one_extend_in_each_graph_however_many_a_launch_may_make(index: GraphIndex) -> None:
    driver = RecordingDriver()
    device = ScriptedDevice(driver)
    CudaEngine(driver, b"image", {"docs": index}, slots=40, max_top_m=64, extends_per_launch=1024)
    assert device.covered == [1, 8, 32, 40]


@pytest.mark.parametrize("form", ["loop", None])
def test_plain_replay_is_the_fallback_on_a_limited_device(index: GraphIndex, form: Any) -> None:
    driver = RecordingDriver(can_loop=False)
    engine = opened(index, driver, slots=8, max_top_m=64, extends_per_launch=4, form=form)
    assert (engine.forms, engine.extends_per_launch) == ({1: "plain", 8: "plain"}, 1)
    assert [len(graph) for graph in graphs(driver)] == [2, 2]
    assert driver.names().count("begin_capture") - driver.names().count("abandon_capture") == 2


def test_the_number_of_extends_per_launch_is_validated(index: GraphIndex) -> None:
    with pytest.raises(InvalidParams, match=r"extends_per_launch is 0, outside 1\.\.1024"):
        opened(index, RecordingDriver(), extends_per_launch=0)
    with pytest.raises(InvalidParams, match="a plain launch makes 1 extend, not 2"):
        opened(index, RecordingDriver(), extends_per_launch=2, form="plain")
