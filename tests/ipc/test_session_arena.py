"""Tests specific to sessions whose vectors go through the pool's arena. Other session tests also run over an arena."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from ipc import InvalidArgument, MemoryRefused, PeerLost, RingClient, SearchSpec
from ipc.ring.descriptors import SEARCH_ARENA
from ipc.session.device_arena import DeviceArena
from ipc.session.messages import Catalogue, Served
from tests.ipc.arenas import clients_on, make_arena, span
from tests.ipc.fake_cuda import FakeCuda
from tests.ipc.processes import attach, child, endpoint
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, SLOTS, answer, ask, forge_requests, vector

pytest.importorskip("cuda.bindings.driver", reason="needs the extra [cuda]")


class Pool(NamedTuple):
    """A pool with an arena in the memory of a fake GPU; its clients appear to be other processes."""

    server: RingServer
    arena: DeviceArena
    cuda: FakeCuda


DOCS = Catalogue((Served("docs", DIM),))


@contextmanager
def pool_with(slots: int, clients: int, catalogue: Catalogue = DOCS) -> Iterator[Pool]:
    cuda = FakeCuda()
    arena, options = make_arena(cuda, slots, DIM, epoch=5), {"ring_slots": SLOTS, "max_k": 6, "max_clients": clients}
    with clients_on(cuda), RingServer(endpoint(), catalogue, epoch=5, arena=arena, **options) as server:
        yield Pool(server, arena, cuda)
    arena.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool for two clients, each with as many arena slots as its ring has."""
    with pool_with(2 * SLOTS, 2) as made:
        yield made


def test_arena_slots_are_divided_among_clients_and_a_client_without_one_uses_the_ring() -> None:
    with (
        pool_with(1, 2) as (server, arena, _),
        attach(server, arena=True) as first,
        attach(server, arena=True) as second,
    ):
        assert (first.has_arena, second.has_arena, arena.free_slots) == (True, False, 0)
        ask(second, seed=7)
        assert np.array_equal(server.receive()[0].vector, vector(7))
        with pytest.raises(MemoryRefused, match="this client has none"):
            second.submit(span(vector()), SearchSpec("docs", 1, "prefill"))
        with pytest.raises(InvalidArgument, match=rf"has shape \({DIM},\), got \(1,\)"):
            second.submit(span(vector(dim=1)), SearchSpec("docs", 1, "prefill"))
        assert second.outstanding == 1


def test_gpu_vectors_use_the_arena_and_host_vectors_the_ring(pool: Pool) -> None:
    server, _, cuda = pool
    with attach(server, arena=True) as client:
        client.submit(vector(0), SearchSpec("docs", 1))
        assert "open" not in {call[0] for call in cuda.calls}  # host vectors make no GPU call
        for seed in range(1, 4 * SLOTS):
            one = vector(seed)
            client.submit(span(one) if seed % 2 else one, SearchSpec("docs", 1, "prefill"))
            found = server.receive()
            assert np.array_equal(found[-1].vector, vector(seed))
            for request in found:
                server.publish(request.client, request.request_id)
            client.poll()
        assert [call[0] for call in cuda.calls].count("open") == 1
        assert [call[0] for call in cuda.calls].count("on device") == 2 * SLOTS
    assert [call[0] for call in cuda.calls].count("close") == 1


def test_a_gpu_vector_without_a_free_slot_is_rejected_until_a_request_ends(pool: Pool) -> None:
    server, _, _ = pool
    spec = SearchSpec("docs", 1)
    vectors = [vector(seed) for seed in range(SLOTS)]
    with attach(server, arena=True) as client:
        assert client.arena is not None
        client.arena.write(span(vectors[0]), 1 << 40, 0)  # a slot that no request frees
        for one in vectors[1:]:
            client.submit(span(one), spec)
        with pytest.raises(MemoryRefused, match=f"all {SLOTS} leased slots of the arena are in use"):
            client.submit(span(vectors[0]), spec)
        assert client.outstanding == SLOTS - 1
        assert answer(server) == SLOTS - 1
        client.submit(span(vectors[0]), spec)
        assert np.array_equal(server.receive()[0].vector, vectors[0])


def test_a_vector_on_a_second_gpu_is_rejected(pool: Pool) -> None:
    server, _, _ = pool
    array = vector(1)
    with attach(server, arena=True) as client:
        client.submit(span(array, 0), SearchSpec("docs", 1, "prefill"))
        with pytest.raises(MemoryRefused, match="open from cuda:0, the vector lies on cuda:1"):
            client.submit(span(array, 1), SearchSpec("docs", 1, "prefill"))


def test_an_arena_that_cannot_be_opened_is_tried_once_and_then_disabled(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, cuda = pool
    code, tries = cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, []

    def refused(handle: object, flags: int) -> tuple[object]:
        tries.append(flags)
        return (code,)

    monkeypatch.setattr(cuda, "cuIpcOpenMemHandle", refused, raising=False)
    array = vector(1)
    with attach(server, arena=True) as client:
        for _ in range(3):
            with pytest.raises(MemoryRefused, match=r"cuIpcOpenMemHandle failed: .*NOT_SUPPORTED"):
                client.submit(span(array), SearchSpec("docs", 1, "prefill"))
        assert len(tries) == 1
        client.submit(vector(2), SearchSpec("docs", 1))
        assert np.array_equal(server.receive()[0].vector, vector(2))


def test_a_failed_copy_disables_the_arena_and_leaves_nothing_outstanding(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, cuda = pool
    code = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(cuda, "cuMemcpyDtoDAsync", lambda *_: (code,), raising=False)
    array = vector(1)
    with attach(server, arena=True) as client:
        for _ in range(2):
            with pytest.raises(MemoryRefused, match="cuMemcpyDtoDAsync failed"):
                client.submit(span(array), SearchSpec("docs", 1, "prefill"))
        assert client.outstanding == 0
        assert server.receive() == []
        client.submit(vector(2), SearchSpec("docs", 1))
        assert np.array_equal(server.receive()[0].vector, vector(2))


def test_a_pool_serves_others_while_gpu_vectors_are_in_flight(
    pool: Pool,
) -> None:
    server, _, cuda = pool
    vectors = [vector(seed) for seed in range(SLOTS)]
    with attach(server, arena=True) as there, attach(server) as other:
        there.submit(span(vectors[0]), SearchSpec("docs", 1))
        assert answer(server) == 1
        there.poll()
        cuda.lazy = True
        cuda.calls.clear()
        for one in vectors:
            there.submit(span(one), SearchSpec("docs", 1))
        for seed in range(SLOTS):
            late = ask(other, seed=50 + seed)
            (request,) = server.receive()
            assert (request.request_id, request.client) == (late, 2)
            server.publish(request.client, request.request_id)
            assert len(other.poll()) == 1
        assert not server.has_requests(), "a launch is not interrupted for them"
        assert server.wait(60_000), "vectors are in flight: the pool must not sleep"
        cuda.run()
        assert server.has_requests()
        found = server.receive()
        assert len(found) == SLOTS
        assert all(np.array_equal(request.vector, one) for request, one in zip(found, vectors, strict=True))
        assert {call[0] for call in cuda.calls} == {"on device", "store"}, "and the pool calls no driver"
        cuda.lazy = False


def test_vectors_in_flight_for_a_departed_client_are_dropped(pool: Pool) -> None:
    server, _, cuda = pool
    one = vector(1)
    with attach(server, arena=True) as gone:
        gone.submit(span(one), SearchSpec("docs", 1))
        assert answer(server) == 1
        gone.poll()
        cuda.lazy = True
        gone.submit(span(one), SearchSpec("docs", 1))
        assert server.receive() == []
        cuda.lazy = False
    while server.client_count:
        server.wait(1)
    with attach(server, arena=True) as next_one:
        next_one.submit(span(one), SearchSpec("docs", 1))
        (request,) = server.receive()
        assert request.client == 2
        assert np.array_equal(request.vector, one)


def test_filtered_requests_and_collections_that_the_host_reads_cannot_use_the_arena() -> None:
    catalogue, one = Catalogue((Served("docs", DIM), Served("notes", DIM, in_place=False))), vector(3)
    with pool_with(SLOTS, 1, catalogue) as (server, _, _), attach(server, arena=True) as client:
        specs = [SearchSpec("docs", 1, filter=b"{}"), SearchSpec("notes", 1), SearchSpec("docs", 1)]
        assert [client.takes_in_place(spec) for spec in specs] == [False, False, True]
        for spec in specs[:2]:
            with pytest.raises(MemoryRefused, match="the pool's host reads the vectors"):
                client.submit(span(one), spec)
        client.submit(span(one), specs[2])
        assert np.array_equal(server.receive()[0].vector, one)


def test_a_forged_filtered_request_in_the_arena_is_invalid(pool: Pool) -> None:
    server, _, _ = pool
    with attach(server, arena=True) as client:
        forge_requests(client, [1], kind=SEARCH_ARENA, filter=1)
        assert server.receive() == []
        assert [result.status for result in client.poll()] == ["invalid_request"]


@pytest.mark.parametrize("handle", [(SLOTS, 0), (1 << 31, 0), ((1 << 32) - 1, 0)])
def test_a_client_that_names_a_slot_outside_its_lease_is_evicted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, handle: tuple[int, int]
) -> None:
    server, arena, _ = pool
    with attach(server, arena=True) as client:
        assert client.arena is not None
        monkeypatch.setattr(client.arena, "write", lambda *_: np.array(handle, np.uint32).view(np.float32))
        ask(client)
        assert server.receive() == []
        assert server.client_count == 0
        client.wait(1000)
        with pytest.raises(PeerLost):
            ask(client)
    assert arena.free_slots == 2 * SLOTS


def test_a_forged_arena_request_without_an_arena_evicts_the_client() -> None:
    server = RingServer(endpoint(), {"docs": DIM}, epoch=5, ring_slots=SLOTS, max_k=6)
    with server, attach(server, arena=True) as client:
        assert not client.has_arena
        forge_requests(client, [1], kind=SEARCH_ARENA)
        assert server.receive() == []
        assert server.client_count == 0


def attached_process(where: str) -> None:
    with RingClient(where, "doomed", timeout_ms=60_000.0, arena=True) as client:
        client.submit(vector(1), SearchSpec("docs", 1))
        signal.pause()


def test_the_lease_of_a_killed_client_is_reclaimed(pool: Pool) -> None:
    server, arena, _ = pool
    with child(attached_process, server.endpoint) as process:
        while not server.receive():
            server.wait(5)
        assert arena.free_slots == SLOTS
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while arena.free_slots < 2 * SLOTS:
            server.wait(5)
    assert arena.free_slots == 2 * SLOTS
