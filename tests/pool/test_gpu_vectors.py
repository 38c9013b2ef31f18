"""Tests of query vectors on a GPU: written to the pool's arena if it is reachable, otherwise staged through the host.

The GPU is fake: its memory is host memory, see `tests/ipc/fake_cuda.py`. Pools search on the CPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from gpu import GraphIndex
from ipc.session.device_arena import DeviceArena
from runtime.errors import DeadlineExceeded, InvalidRequest
from runtime.node.worker import Worker
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.ipc.arenas import clients_on, make_arena
from tests.ipc.fake_cuda import FakeCuda
from tests.pool.client_helpers import Vectors, attached, collect
from tests.pool.conftest import DIM, NUMBERED, MakeClient, MakePool
from tests.pool.test_filter_waits import Evaluations, number_is
from tests.retrieval.gpu_arrays import CudaArray, DlpackArray, fake_cuda_runtime

Start = Callable[..., tuple[SearchClient, list[InProcessPool]]]
Staged = Callable[[], list[int]]

VECTOR_BYTES = 4 * DIM
ATTACH_PENDING: dict[str, Any] = {"collection": "docs", "top_m": 32, "search_width": 2}
_CLIENTS = 64  # clients of a pool, which divide its arena's slots


class Nearest(NamedTuple):
    """Ids and distances [n, 4]."""

    ids: npt.NDArray[np.int64]
    distances: Vectors


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Staged:
    """Record the bytes of each copy from the GPU to the host by clients."""
    done = fake_cuda_runtime(monkeypatch)
    return lambda: [count for count in done if count > 0]


@pytest.fixture
def gpus() -> dict[str, FakeCuda]:
    """Map each pool's name to the device of its arena."""
    return {}


@pytest.fixture
def start(
    collection: Path,
    make_pool: MakePool,
    make_client: MakeClient,
    gpus: dict[str, FakeCuda],
) -> Iterator[Start]:
    """Return a function that starts pools, each with so many arena slots per client (0: no arena), and a client."""
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra [cuda]")
    places_of: dict[str, int] = {}

    def arena(worker: Worker, dim: int) -> DeviceArena | None:
        places = places_of[worker.name]
        if not places:
            return None
        cuda = gpus[worker.name] = FakeCuda()
        return make_arena(cuda, places, dim, worker.epoch)

    def begin(*slots: int, at: Path = collection, **pool: Any) -> tuple[SearchClient, list[InProcessPool]]:
        places_of.update({f"pool-{number}": _CLIENTS * count for number, count in enumerate(slots)})
        plan = plan_of(at, workers=len(slots), **pool)
        pools = [make_pool(plan, name, make_arena=arena).start() for name in places_of]
        return attached(make_client(plan)), pools

    with clients_on(FakeCuda()):
        yield begin


@pytest.fixture(scope="module")
def nearest(index: GraphIndex, queries: Vectors) -> Nearest:
    """Return the index's answers to `queries` submitted as `ATTACH_PENDING`."""
    return Nearest(*index.search(queries, 4, top_m=32, search_width=2))


def test_interleaved_host_and_gpu_vectors_get_the_indexs_answers_without_staging(
    start: Start, staged: Staged, queries: Vectors, nearest: Nearest
) -> None:
    client, _ = start(16)
    for first in range(0, len(queries), 12):
        query_of = {}
        for number in range(first, first + 12):
            query = [queries[number], CudaArray(queries[number]), DlpackArray(queries[number], 2)][number % 3]
            query_of[client.submit(query, 4, **ATTACH_PENDING)] = number
        for ticket, result in collect(client, len(query_of)).items():
            assert result.checked().ids.tolist() == nearest.ids[query_of[ticket]].tolist()
    assert staged() == []


def test_gpu_vectors_with_filters_are_staged_wait_for_them_and_each_ends_once(
    start: Start, staged: Staged, numbered: Path
) -> None:
    vectors = NUMBERED
    client, (pool,) = start(16, at=numbered)
    slow = Evaluations(pool, 0)
    try:
        tickets = {client.submit(CudaArray(vectors[n]), 1, filter=number_is(n)): n for n in range(6)}
        until(lambda: len(pool.pool.loop.filtered) == 6)
        assert client.search(CudaArray(vectors[9]), 1).ids.tolist() == [9]  # others go on
        client.cancel(cancelled := next(iter(tickets)))
        until(lambda: len(pool.pool.loop.filtered) == 5)
        with pytest.raises(DeadlineExceeded):
            client.search(CudaArray(vectors[7]), 1, filter=number_is(7), deadline_ms=50)
    finally:
        slow.release()
    found = collect(client, 6)
    assert isinstance(found.pop(cancelled).error, DeadlineExceeded)
    assert {tickets[ticket]: one.checked().ids.tolist() for ticket, one in found.items()} == {
        n: [n] for n in range(1, 6)
    }
    evaluated = slow.begun
    assert client.search(CudaArray(vectors[3]), 1, filter=number_is(3)).ids.tolist() == [3]  # its scope is known
    assert slow.begun == evaluated
    assert staged() == [VECTOR_BYTES] * 8, "the pool's host reads those of filtered queries"


@pytest.mark.parametrize("others", [0, 20])
def test_when_a_pool_dies_its_vectors_are_read_again_from_gpu_memory(
    start: Start, staged: Staged, queries: Vectors, nearest: Nearest, others: int
) -> None:
    client, pools = start(16, others, ring_slots=64)
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(CudaArray(query.copy()), 4, **ATTACH_PENDING) for query in queries[:20]]
        before = len(staged())
        pools[0].die()
    found = collect(client, 20)
    assert sorted(found) == tickets
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == nearest.ids[:20].tolist()
    assert (before, len(staged())) == ((0, 0) if others else (10, 20))


@pytest.mark.usefixtures("staged")
def test_a_non_finite_gpu_vector_is_rejected_with_its_position(start: Start, queries: Vectors) -> None:
    client, _ = start(16)
    spoilt = queries[0].copy()
    spoilt[3] = np.nan
    with pytest.raises(InvalidRequest, match=r"vector\[3\] is nan"):
        client.search(CudaArray(spoilt), 4)
    with pytest.raises(InvalidRequest, match=r"has shape \(16,\), got \(15,\)"):
        client.search(CudaArray(queries[0, :15]), 4)
    assert len(client.search(CudaArray(queries[0]), 4).ids) == 4
