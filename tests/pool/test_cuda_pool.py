"""A pool whose engine is the CUDA engine, over an emulated device: the same answers as on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpu import DeviceError, GraphIndex
from gpu.cuda.engine import CudaEngine
from runtime.node.metrics.columns import PoolMetrics
from runtime.pool import process
from tests.cuda.emulation import EmulatedDriver, emulator
from tests.pool.conftest import MakePool
from tests.pool.pools import Vectors
from tests.pool.test_process import ask, collect


@pytest.fixture(params=[1, 8])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaEngine]]:
    """Engines that pools open, of one extend or up to eight a launch."""
    drivers: list[EmulatedDriver] = []
    engines: list[CudaEngine] = []

    def open_engine(device: str, collections: Any, *, extends_per_launch: int, **limits: Any) -> CudaEngine:
        assert (device, extends_per_launch) == ("cpu", 1)
        drivers.append(EmulatedDriver(emulator(), block_threads=64))
        engines.append(CudaEngine(drivers[-1], b"", collections, extends_per_launch=request.param, **limits))
        return engines[-1]

    monkeypatch.setattr(process, "open_engine", open_engine)
    yield engines
    for driver in drivers:
        driver.close()


def test_a_pool_on_a_device_answers_as_the_index_does(
    opened: list[CudaEngine], make_pool: MakePool, index: GraphIndex, queries: Vectors
) -> None:
    pool = make_pool(slots=4, max_top_m=64, max_k=32, top_m=32)
    stages, asked = ["prefill", "decode"], queries[:12]
    with pool.attach() as client:
        numbers = [ask(client, query, stages[n % 2], search_width=2) for n, query in enumerate(asked)]
        found = collect(pool, client, len(asked))
    scored = GraphIndex(replace(index.data, codes=None))  # a device scores every candidate, and estimates none
    ids, _ = scored.search(asked, 5, top_m=32, search_width=2)
    assert [found[number].ids.tolist() for number in numbers] == ids.tolist()
    assert {found[number].status for number in numbers} == {"ok"}
    extends = [found[number].extends for number in numbers]
    assert pool.metric(PoolMetrics.EXTENDS) >= max(extends) > 1
    assert opened[0].extends_per_launch in (1, 8)
    assert pool.metric(PoolMetrics.PADDED_SLOT_STEPS) > 0, "at last fewer run than a graph has"


def test_a_device_that_fails_ends_the_pool_with_its_own_error(
    opened: list[CudaEngine], make_pool: MakePool, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(slots=4, max_top_m=64, max_k=32, top_m=32)

    def fail(self: EmulatedDriver, stream: int, graph: int) -> None:
        raise DeviceError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    with pool.attach() as client:
        ask(client, queries[0], "prefill", search_width=2)
        monkeypatch.setattr(EmulatedDriver, "replay", fail)
        with pytest.raises(DeviceError, match="cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
            collect(pool, client, 1)
