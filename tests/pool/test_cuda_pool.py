"""Tests of a pool with the CUDA engine on an emulated device: answers as on the CPU, also while collections change."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import DeviceError, GraphIndex
from gpu.cuda.engine import CudaEngine
from gpu.cuda.graphs import LaunchForm
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import process
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.cuda.conftest import NewDriver
from tests.cuda.conftest import new_driver as new_driver
from tests.cuda.emulation import LOOK_NS, EmulatedDriver, emulator
from tests.gpu.datasets import clustered
from tests.pool.client_helpers import Vectors, attached
from tests.pool.conftest import MakeClient, MakePool
from tests.pool.test_process import ask, collect
from tests.pool.written_collection import DIM, SEALED, Served, WrittenCollection, tenant_filter


@pytest.fixture(params=[8, "resident"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaEngine]]:
    """Open pools' engines with up to eight extends per launch, or the resident kernel."""
    drivers: list[EmulatedDriver] = []
    engines: list[CudaEngine] = []

    def open_engine(device: str, collections: Any, *, resident: bool, **limits: Any) -> CudaEngine:
        assert not resident
        drivers.append(EmulatedDriver(emulator(), block_threads=64))
        form: LaunchForm | None = "resident" if request.param == "resident" else None
        limits |= {"extends_per_launch": 1024 if form else request.param, "max_top_m": 128, "fault_poll_ns": LOOK_NS}
        engines.append(CudaEngine(drivers[-1], b"", collections, form=form, **limits))
        return engines[-1]

    monkeypatch.setattr(process, "open_engine", open_engine)
    yield engines
    for driver in drivers:
        driver.close()


def test_a_pool_on_a_device_returns_the_index_s_answers(
    opened: list[CudaEngine], make_pool: MakePool, index: GraphIndex, queries: Vectors
) -> None:
    pool = make_pool(slots=4, max_k=32, top_m=32)
    stages, vectors = ["prefill", "decode"], queries[:12]
    with pool.attach() as client:
        numbers = [ask(client, query, stages[n % 2], search_width=2) for n, query in enumerate(vectors)]
        found = collect(pool, client, len(vectors))
    scored = GraphIndex(replace(index.data, codes=None))  # a device scores every candidate and uses no estimates
    ids, _ = scored.search(vectors, 5, top_m=32, search_width=2)
    assert [found[number].ids.tolist() for number in numbers] == ids.tolist()
    assert {found[number].status for number in numbers} == {"ok"}
    extends = [found[number].extends for number in numbers]
    assert pool.metric(PoolMetrics.EXTENDS) >= max(extends) > 1
    assert opened[0].extends_per_launch in (1, 8, 1024)
    padded = pool.metric(PoolMetrics.PADDED_SLOT_STEPS)
    assert (padded == 0) == opened[0].resident, (
        "fewer slots run at the end than a graph covers; the resident kernel has no padding"
    )


def test_a_device_failure_ends_the_pool_with_its_error(
    opened: list[CudaEngine], make_pool: MakePool, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(slots=4, max_k=32, top_m=32)

    def fail(self: EmulatedDriver, stream: int, graph: int) -> None:
        raise DeviceError("cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    with pool.attach() as client:
        ask(client, queries[0], "prefill", search_width=2)
        opened[0].stop()  # a resident kernel would not launch again
        monkeypatch.setattr(EmulatedDriver, "replay", fail)
        with pytest.raises(DeviceError, match="cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
            collect(pool, client, 1)


def test_a_single_search_on_a_shared_gpu_takes_one_or_two_launches(
    new_driver: NewDriver, make_pool: MakePool, collection: Path, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch waits for its turn there: 2.4 ms beside a model, and a search had one launch an extend."""
    engines: list[CudaEngine] = []
    driver = new_driver()

    def open_emulated(device: str, collections: Any, **options: Any) -> CudaEngine:
        engines.append(CudaEngine(driver, b"", collections, fault_poll_ns=LOOK_NS, **(options | {"max_top_m": 64})))
        return engines[-1]

    monkeypatch.setattr("gpu.backends.check_device", lambda device: None)
    monkeypatch.setattr(CudaEngine, "open", open_emulated)
    plan = plan_of(collection, devices=["cuda:0"], slots=4, max_k=32, top_m=64)
    pool = make_pool(plan, make_arena=lambda worker, dim: None)
    with pool.attach() as client:
        for query in queries[:3]:
            before = engines[0].handle.host.launches
            number = ask(client, query, "prefill", top_m=64, search_width=1)
            assert collect(pool, client, 1)[number].extends > 41
            assert engines[0].handle.host.launches - before <= 2


LIVE: dict[str, Any] = {"devices": ["cuda:0"], "slots": 4, "max_k": 32, "top_m": 32}


@pytest.fixture
def served(
    harness: WrittenCollection, opened: list[CudaEngine], make_pool: MakePool, make_client: MakeClient
) -> Served:
    """Serve the collection of `harness` on a device."""
    plan = plan_of(harness.path, **LIVE)
    pool = make_pool(plan, make_arena=lambda worker, dim: None).start()
    return Served(plan, [pool], attached(make_client(plan)))


def test_a_live_collection_on_a_device_is_searched_while_segments_are_loaded_and_unloaded(
    harness: WrittenCollection, served: Served, opened: list[CudaEngine]
) -> None:
    queries = clustered(np.random.default_rng(9), 3, DIM)
    assert served.find(queries[0]) == []
    for change in range(4):
        harness.upsert(*(f"{change}-{n}" for n in range(SEALED)), tenant="acme" if change % 2 else "blue")
        harness.delete(*(f"0-{n}" for n in range(change, SEALED, 7)))
        if change == 2:
            harness.writer.compact()
        elif change != 3:
            harness.writer.flush()
        for query in queries:
            served.until_found(query, harness.nearest(query, 10))
            for tenant in ("acme", "blue") if change else ("blue",):
                served.until_found(query, harness.nearest(query, 10, {"tenant": tenant}), filter=tenant_filter(tenant))
    until(lambda: len(opened[0].dims) == 2)  # one merged segment and the growing rows; the others were unloaded


def test_no_search_on_a_device_finds_an_acknowledged_delete(harness: WrittenCollection, served: Served) -> None:
    for sealed in (False, True):
        harness.upsert(*(f"{sealed}-{n}" for n in range(SEALED)))
        if sealed:
            harness.writer.flush()
        query = harness.held[f"{sealed}-0"][0]
        served.until_found(query, harness.nearest(query, 10))
        for name in harness.nearest(query, 5):
            harness.delete(name)
            assert name not in served.find(query)


def test_a_new_segment_is_copied_to_a_device_in_parts_while_the_old_ones_are_searched(
    harness: WrittenCollection, served: Served, opened: list[CudaEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.upsert(*(f"old-{n}" for n in range(SEALED)))
    harness.writer.flush()
    query = harness.held["old-0"][0]
    served.until_found(query, harness.nearest(query, 10))
    until(lambda: len(opened[0].dims) == 2)
    device_has, parts, may_end = dict(opened[0].dims), [0], threading.Event()
    load_part = CudaEngine.load_part

    def held_up(engine: CudaEngine, collection: str, index: GraphIndex) -> bool:
        if may_end.is_set() or not index.data.graph.shape[1]:
            return load_part(engine, collection, index)
        parts[0] += 1
        return False

    monkeypatch.setattr(CudaEngine, "load_part", held_up)
    harness.upsert(*(f"new-{n}" for n in range(SEALED)))
    harness.writer.compact()
    until(lambda: parts[0] > 3)
    harness.upsert("later")
    served.until_found(harness.held["later"][0], harness.nearest(harness.held["later"][0], 10))
    for name in ("old-0", "new-5", "later"):
        near = harness.held[name][0]
        harness.delete(name)  # acknowledged once the pool has applied it
        assert served.find(near) == harness.nearest(near, 10)
    assert dict(opened[0].dims).keys() <= device_has.keys() | {f"{next(iter(device_has)).rsplit('/', 1)[0]}/growing-2"}
    may_end.set()
    until(lambda: any(name.endswith("/2") for name in opened[0].dims))
    until(lambda: len(opened[0].dims) == 2)
    served.until_found(query, harness.nearest(query, 10))
