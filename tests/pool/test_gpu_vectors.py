"""Query vectors on a GPU: into the arena of a pool that has one within reach, through the host to any other.

The GPU is played: its memory is the host's, see `tests/ipc/fake_cuda.py`. Pools search on the CPU.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex
from ipc import RingServer
from ipc.device_arena import DeviceArena, arena_bytes
from ipc.device_memory import CudaReference, DeviceMemory
from runtime.errors import InvalidRequest
from runtime.node.worker import Worker
from runtime.pool import process
from runtime.retrieval.async_client import AsyncSearchClient
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere
from tests.pool.conftest import DIM, MakeClient, MakePool
from tests.pool.pools import attached, collect, plan_of
from tests.retrieval.gpu_arrays import DlpackOn, OnGpu, played_runtime

Vectors = np.ndarray[Any, np.dtype[np.float32]]
Staged = list[int]

VECTOR_BYTES = 4 * DIM
PLACES = 64  # of a pool's clients


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Staged]:
    """The bytes of each copy from the GPU to the host by clients so far."""
    done = played_runtime(monkeypatch)
    return lambda: [count for count in done if count > 0]


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Slots for each client in the arena of a pool, by the pool's name; none if it is not named."""
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra [cuda]")
    from ipc.cuda_memory import CudaMemory

    slots: dict[str, int] = {}

    def arena(worker: Worker, dim: int) -> DeviceArena | None:
        count = PLACES * slots.get(worker.name, 0)
        if not count:
            return None
        memory = CudaMemory.create(arena_bytes(count, 4 * dim), "cuda:0", FakeCuda())
        return DeviceArena(memory, count, 4 * dim, worker.epoch)

    def open_memory(reference: CudaReference, device: str) -> DeviceMemory:
        return CudaMemory.open(from_elsewhere(reference), device, FakeCuda())

    monkeypatch.setattr(process, "_arena", arena)
    monkeypatch.setattr("ipc.client_arena.open_memory", open_memory)
    return slots


def test_vectors_of_host_and_gpu_in_one_stream_get_the_indexs_answers_and_none_is_staged(
    collection: Path,
    arenas: dict[str, int],
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
) -> None:
    arenas["pool-0"] = 16
    plan = plan_of(collection)
    make_pool(plan).start()
    client = attached(make_client(plan))
    ids, _ = index.search(queries, 4, top_m=32, search_width=2)
    for start in range(0, len(queries), 12):
        asked = {}
        for number in range(start, start + 12):
            query = [queries[number], OnGpu(queries[number]), DlpackOn(queries[number], 2)][number % 3]
            asked[client.submit(query, 4, collection="docs", top_m=32, search_width=2)] = number
        for ticket, result in collect(client, len(asked)).items():
            assert result.checked().ids.tolist() == ids[asked[ticket]].tolist()
    assert staged() == []


def test_a_pool_without_an_arena_gets_them_through_the_host(
    collection: Path,
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
) -> None:
    plan = plan_of(collection)
    make_pool(plan).start()
    client = attached(make_client(plan))
    ids, _ = index.search(queries, 4, top_m=32, search_width=2)
    result = client.search(OnGpu(queries[0]), 4, top_m=32, search_width=2)
    assert result.ids.tolist() == ids[0].tolist()
    assert staged() == [VECTOR_BYTES]
    batch = client.search_batch(OnGpu(queries), 4, top_m=32, search_width=2)
    assert batch.ids.tolist() == ids.tolist()
    assert sum(staged()) == (1 + len(queries)) * VECTOR_BYTES
    assert len(staged()) < 1 + len(queries)  # together


def test_what_the_arena_has_no_slot_for_is_staged_and_every_row_of_a_matrix_is_answered(
    collection: Path,
    arenas: dict[str, int],
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
) -> None:
    arenas["pool-0"] = 3
    plan = plan_of(collection, ring_slots=16)
    pool = make_pool(plan).start()
    client = attached(make_client(plan))
    with pool.held():
        tickets = [client.submit(OnGpu(query), 4, collection="docs") for query in queries[:8]]
    assert len(staged()) == 5
    assert sorted(collect(client, 8)) == tickets
    ids, distances = index.search(queries, 4, top_m=32, search_width=2)
    batch = client.search_batch(OnGpu(queries), 4, top_m=32, search_width=2)  # more than the ring holds
    assert batch.errors == {}
    assert batch.ids.tolist() == ids.tolist()
    assert batch.distances.tolist() == distances.tolist()


@pytest.mark.parametrize("others", [0, 20])
def test_when_a_pool_dies_its_vectors_are_read_again_from_where_they_are(
    collection: Path,
    arenas: dict[str, int],
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
    others: int,
) -> None:
    arenas.update({"pool-0": 16, "pool-1": others})
    plan = plan_of(collection, workers=2, ring_slots=64)
    pools = [make_pool(plan, f"pool-{number}").start() for number in range(2)]
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(OnGpu(query.copy()), 4, collection="docs", top_m=32) for query in queries[:20]]
        before = len(staged())
        pools[0].die()
    found = collect(client, 20)
    assert sorted(found) == tickets
    ids, _ = index.search(queries[:20], 4, top_m=32, search_width=4)
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == ids.tolist()
    assert (before, len(staged())) == ((0, 0) if others else (10, 20))


def test_a_gpus_vector_with_a_value_that_is_not_finite_is_refused_by_its_place(
    collection: Path,
    arenas: dict[str, int],
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
) -> None:
    arenas["pool-0"] = 16
    plan = plan_of(collection)
    make_pool(plan).start()
    client = attached(make_client(plan))
    spoilt = queries[0].copy()
    spoilt[3] = np.nan
    with pytest.raises(InvalidRequest, match=r"vector\[3\] is nan"):
        client.search(OnGpu(spoilt), 4)
    with pytest.raises(InvalidRequest, match=r"has shape \(16,\), got \(15,\)"):
        client.search(OnGpu(queries[0, :15]), 4)
    assert len(client.search(OnGpu(queries[0]), 4).ids) == 4


def test_searches_of_an_event_loop_go_the_same_ways(
    collection: Path,
    arenas: dict[str, int],
    staged: Callable[[], Staged],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
) -> None:
    arenas["pool-0"] = 16
    plan = plan_of(collection)
    make_pool(plan).start()
    client = AsyncSearchClient(attached(make_client(plan)))
    ids, _ = index.search(queries, 4, top_m=32, search_width=2)

    async def ask() -> None:
        running = asyncio.create_task(client.run())
        async with asyncio.timeout(60):
            arrays = [OnGpu(query) if number % 2 else query for number, query in enumerate(queries[:12])]
            options: dict[str, Any] = {"collection": "docs", "top_m": 32, "search_width": 2}
            results = await asyncio.gather(*(client.search(array, 4, **options) for array in arrays))
            assert [result.ids.tolist() for result in results] == ids[:12].tolist()
            assert staged() == []
            batch = await client.search_batch(OnGpu(queries), 4, **options)
            assert batch.ids.tolist() == ids.tolist()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(ask())


def test_a_client_without_gpu_vectors_opens_no_gpus_memory(
    collection: Path,
    arenas: dict[str, int],
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arenas["pool-0"] = 16
    plan = plan_of(collection)
    pool = make_pool(plan).start()

    def open_memory(*_: object) -> DeviceMemory:
        raise AssertionError("the GPU was touched")

    monkeypatch.setattr("ipc.client_arena.open_memory", open_memory)
    client = attached(make_client(plan))
    assert len(client.search(queries[0], 4).ids) == 4
    server: RingServer = pool.pool._server
    with pool.held():
        assert [place.lease > 0 for place in server._clients.values()] == [True]
