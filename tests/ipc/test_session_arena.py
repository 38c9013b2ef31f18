"""Sessions whose vectors go through the pool's arena: what is special about them. Other session tests use it too."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ipc import InvalidArgument, PeerLost, RingClient, RingServer
from ipc.device_arena import DeviceArena, Place, arena_bytes
from ipc.device_memory import CudaReference, DeviceSpan, HostMemory
from ipc.session import Grant
from tests.ipc.processes import attach, child, endpoint
from tests.ipc.sessions import DIM, SLOTS, ask, vector


@pytest.fixture
def pool() -> Iterator[tuple[RingServer, DeviceArena]]:
    """A pool whose arena is large enough for one client."""
    arena = DeviceArena(HostMemory.create(arena_bytes(SLOTS, 4 * DIM)), SLOTS, 4 * DIM, epoch=5)
    with RingServer(endpoint(), {"docs": DIM}, epoch=5, ring_slots=SLOTS, max_k=6, arena=arena) as server:
        yield server, arena
    arena.close()


def test_a_vector_in_the_arena_takes_no_room_in_the_ring_and_arrives_whole(
    pool: tuple[RingServer, DeviceArena],
) -> None:
    server, _ = pool
    with attach(server, device="cpu") as client:
        assert client.uses_arena
        for round_number in range(3 * SLOTS):
            ask(client, seed=round_number)
            (request,) = server.receive()
            assert np.array_equal(request.vector, vector(round_number))
            server.publish(request.client, request.request_id)
            assert len(client.poll()) == 1


def test_a_client_for_whom_no_slots_are_left_uses_the_ring(pool: tuple[RingServer, DeviceArena]) -> None:
    server, arena = pool
    with attach(server, device="cpu") as first, attach(server, device="cpu") as second:
        assert (first.uses_arena, second.uses_arena, arena.free_slots) == (True, False, 0)
        ask(second, seed=7)
        assert np.array_equal(server.receive()[0].vector, vector(7))
        with pytest.raises(InvalidArgument, match="needs a slot of the pool's arena"):
            second.submit(DeviceSpan(0x1000, 4 * DIM), collection="docs", stage="prefill", k=1)
        with pytest.raises(InvalidArgument, match=rf"has shape \({DIM},\), got \(1,\)"):
            second.submit(DeviceSpan(0x1000, 4), collection="docs", stage="prefill", k=1)


def test_a_client_that_does_not_ask_for_the_arena_takes_no_slots_of_it(pool: tuple[RingServer, DeviceArena]) -> None:
    server, arena = pool
    with attach(server) as client:
        assert (client.uses_arena, arena.free_slots) == (False, SLOTS)
        ask(client, seed=3)
        assert np.array_equal(server.receive()[0].vector, vector(3))


def test_a_request_waits_in_the_ring_until_its_vector_is_written_and_others_do_not_wait_for_it(
    pool: tuple[RingServer, DeviceArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = pool
    with attach(server, device="cpu") as slow, attach(server) as other:
        assert slow._arena is not None
        memory, stores = slow._arena._memory, []
        store = memory.store_word
        monkeypatch.setattr(memory, "store_word", lambda *word: stores.append(word))  # its device is still at it
        late = ask(slow, seed=1)
        prompt = ask(other, seed=2)
        assert [request.request_id for request in (*server.receive(), *server.receive())] == [prompt]
        store(*stores[0])
        (request,) = server.receive()
        assert request.request_id == late
        assert np.array_equal(request.vector, vector(1))


@pytest.mark.parametrize("place", [Place(SLOTS - 1, 9), Place(1 << 30, 1), Place(0, 0)])
def test_a_client_that_names_a_place_it_cannot_have_is_evicted(
    pool: tuple[RingServer, DeviceArena], monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    server, arena = pool
    with attach(server, device="cpu") as client:
        assert client._arena is not None
        monkeypatch.setattr(client._arena, "write", lambda row: place)
        ask(client)
        assert server.receive() == []
        assert server.statistics().evicted == 1
        client.wait(1000)
        with pytest.raises(PeerLost):
            ask(client)
    assert arena.free_slots == SLOTS


def test_a_place_without_an_arena_is_no_request() -> None:
    server = RingServer(endpoint(), {"docs": DIM}, epoch=5, ring_slots=SLOTS, max_k=6)
    with server, attach(server, device="cpu") as client:
        assert not client.uses_arena
        client._packed[("docs", "prefill", 1, 64, 1, None)] = _arena_words(client)
        client.submit(vector(1), collection="docs", stage="prefill", k=1)
        assert server.receive() == []
        assert server.statistics().evicted == 1


def _arena_words(client: RingClient) -> Any:
    from ipc.descriptors import SEARCH_ARENA
    from ipc.parameters import Limits, pack

    limits = Limits(client.collections, client.max_k, client.max_top_m)
    return pack(("docs", "prefill", 1, 64, 1, None), client.epoch, limits, SEARCH_ARENA)


def test_a_client_that_reconnects_has_a_lease_anew(pool: tuple[RingServer, DeviceArena]) -> None:
    server, arena = pool
    with attach(server, device="cpu") as client:
        ask(client, seed=1)
        server.receive()
        client.close()
    server.wait(1)
    assert arena.free_slots == SLOTS
    with attach(server, device="cpu") as client:
        assert client.uses_arena
        ask(client, seed=2)
        assert np.array_equal(server.receive()[0].vector, vector(2))


def attached_process(where: str) -> None:
    with RingClient(where, "doomed", device="cpu") as client:
        ask(client, seed=1)
        signal.pause()


def test_the_lease_of_a_killed_client_comes_back(pool: tuple[RingServer, DeviceArena]) -> None:
    server, arena = pool
    with child(attached_process, server.endpoint) as process:
        while not server.receive():
            server.wait(5)
        assert arena.free_slots == 0
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while arena.free_slots == 0:
            server.wait(5)
    assert arena.free_slots == SLOTS


def test_a_grant_is_of_host_memory_or_of_a_gpus() -> None:
    from ipc.device_arena import Lease

    with pytest.raises(InvalidArgument, match="one of both"):
        Grant(Lease(1, 0, (0,)))
    reference = CudaReference(1, "cuda:0", bytes(64), 4096)
    assert Grant(Lease(1, 0, (0,)), gpu=reference).memory == reference
