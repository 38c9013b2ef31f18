"""Tests specific to sessions whose vectors go through the pool's arena. Other session tests also run over an arena."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ipc import InvalidArgument, MemoryRefused, PeerLost, RingClient, SearchSpec
from ipc.memory.device import CudaReference, DeviceMemory, DeviceSpan, HostMemory
from ipc.ring.descriptors import SEARCH_ARENA
from ipc.session.device_arena import DeviceArena, Lease, arena_bytes
from ipc.session.messages import Catalogue, Grant, Served
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere
from tests.ipc.processes import attach, child, endpoint
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, SLOTS, answer, ask, forge_requests, vector


@contextmanager
def pool_with(memory: DeviceMemory, slots: int, places: int) -> Iterator[tuple[RingServer, DeviceArena]]:
    arena = DeviceArena(memory, slots, 4 * DIM, epoch=5)
    server = RingServer(endpoint(), {"docs": DIM}, epoch=5, ring_slots=SLOTS, max_k=6, max_clients=places, arena=arena)
    with server:
        yield server, arena
    arena.close()


@pytest.fixture
def pool() -> Iterator[tuple[RingServer, DeviceArena]]:
    """A pool for two clients, each with as many arena slots as its ring has."""
    with pool_with(HostMemory.create(arena_bytes(2 * SLOTS, 4 * DIM)), 2 * SLOTS, 2) as made:
        yield made


@pytest.fixture
def gpu_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RingServer, FakeCuda]]:
    """Like `pool` with the arena in the memory of a fake GPU; its clients appear to be other processes."""
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra [cuda]")
    from ipc.memory.cuda import CudaMemory

    cuda = FakeCuda()

    def open_memory(reference: CudaReference, device: str) -> DeviceMemory:
        return CudaMemory.open(from_elsewhere(reference), device, cuda)

    monkeypatch.setattr("ipc.client.arena.open_memory", open_memory)
    with pool_with(CudaMemory.create(arena_bytes(2 * SLOTS, 4 * DIM), "cuda:0", cuda), 2 * SLOTS, 2) as (server, _):
        yield server, cuda


def span(array: npt.NDArray[np.float32], device: int = 0) -> DeviceSpan:
    """Return an array in the fake GPU's memory, which is host memory."""
    return DeviceSpan(array.ctypes.data, array.nbytes, device)


def test_a_vector_in_the_arena_takes_no_ring_payload_and_arrives_intact(
    pool: tuple[RingServer, DeviceArena],
) -> None:
    server, _ = pool
    with attach(server, arena=True) as client:
        assert client.has_arena
        for round_number in range(3 * SLOTS):
            ask(client, seed=round_number)
            (request,) = server.receive()
            assert np.array_equal(request.vector, vector(round_number))
            server.publish(request.client, request.request_id)
            assert len(client.poll()) == 1


def test_arena_slots_are_divided_among_clients_and_a_client_without_one_uses_the_ring() -> None:
    memory = HostMemory.create(arena_bytes(1, 4 * DIM))
    with (
        pool_with(memory, 1, 2) as (server, arena),
        attach(server, arena=True) as first,
        attach(server, arena=True) as second,
    ):
        assert (first.has_arena, second.has_arena, arena.free_slots) == (True, False, 0)
        ask(second, seed=7)
        assert np.array_equal(server.receive()[0].vector, vector(7))
        with pytest.raises(MemoryRefused, match="this client has none"):
            second.submit(DeviceSpan(0x1000, 4 * DIM), SearchSpec("docs", 1, "prefill"))
        with pytest.raises(InvalidArgument, match=rf"has shape \({DIM},\), got \(1,\)"):
            second.submit(DeviceSpan(0x1000, 4), SearchSpec("docs", 1, "prefill"))
        assert second.outstanding == 1


def test_gpu_vectors_use_the_arena_and_host_vectors_the_ring(
    gpu_pool: tuple[RingServer, FakeCuda],
) -> None:
    server, cuda = gpu_pool
    with attach(server, arena=True) as client:
        ask(client, seed=0)
        assert "open" not in {call[0] for call in cuda.calls}  # host vectors make no GPU call
        for seed in range(1, 4 * SLOTS):
            if seed % 2:
                client.submit(span(vector(seed)), SearchSpec("docs", 1, "prefill"))
            else:
                ask(client, seed=seed)
            found = server.receive()
            assert np.array_equal(found[-1].vector, vector(seed))
            for request in found:
                server.publish(request.client, request.request_id)
            client.poll()
        assert [call[0] for call in cuda.calls].count("open") == 1
        assert [call[0] for call in cuda.calls].count("on device") == 2 * SLOTS
    assert [call[0] for call in cuda.calls].count("close") == 1


def test_a_gpu_vector_without_a_free_slot_is_rejected_until_a_request_ends(
    gpu_pool: tuple[RingServer, FakeCuda],
) -> None:
    server, _ = gpu_pool
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


def test_a_slot_is_the_clients_again_once_its_request_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, vectors = SearchSpec("docs", 1), [vector(seed) for seed in range(4)]
    memory = HostMemory.create(arena_bytes(2, 4 * DIM))
    with pool_with(memory, 2, 1) as (server, _), attach(server, arena=True) as client:
        sent: list[bool] = []
        write = client.arena.write if client.arena else None

        def recorded(*arguments: Any) -> Any:
            assert write is not None
            payload = write(*arguments)
            sent.append(payload is not None)
            return payload

        monkeypatch.setattr(client.arena, "write", recorded)
        for one in vectors[:3]:
            client.submit(one, spec)
        assert sent == [True, True, False], "the third went through the ring"
        first, second, third = server.receive()
        assert [np.array_equal(r.vector, v) for r, v in zip((first, second, third), vectors, strict=False)] == [
            True
        ] * 3
        server.publish(second.client, second.request_id, "cancelled")
        client.submit(vectors[3], spec)  # reads the ring for ended requests
        assert sent[-1]
        assert np.array_equal(server.receive()[0].vector, vectors[3])
        assert [result.status for result in client.poll()] == ["cancelled"]


def test_a_vector_on_a_second_gpu_is_rejected(gpu_pool: tuple[RingServer, FakeCuda]) -> None:
    server, _ = gpu_pool
    array = vector(1)
    with attach(server, arena=True) as client:
        client.submit(span(array, 0), SearchSpec("docs", 1, "prefill"))
        with pytest.raises(MemoryRefused, match="open from cuda:0, the vector lies on cuda:1"):
            client.submit(span(array, 1), SearchSpec("docs", 1, "prefill"))


def test_an_arena_that_cannot_be_opened_is_tried_once_and_then_disabled(
    gpu_pool: tuple[RingServer, FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, cuda = gpu_pool
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
        ask(client, seed=2)
        assert np.array_equal(server.receive()[0].vector, vector(2))


def test_a_failed_copy_disables_the_arena_and_leaves_nothing_outstanding(
    gpu_pool: tuple[RingServer, FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, cuda = gpu_pool
    code = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(cuda, "cuMemcpyDtoDAsync", lambda *_: (code,), raising=False)
    array = vector(1)
    with attach(server, arena=True) as client:
        for _ in range(2):
            with pytest.raises(MemoryRefused, match="cuMemcpyDtoDAsync failed"):
                client.submit(span(array), SearchSpec("docs", 1, "prefill"))
        assert client.outstanding == 0
        assert server.receive() == []
        ask(client, seed=2)
        assert np.array_equal(server.receive()[0].vector, vector(2))


def test_a_request_waits_for_its_vector_without_delaying_others(
    pool: tuple[RingServer, DeviceArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = pool
    with attach(server, arena=True) as slow, attach(server) as other:
        ask(slow)
        assert answer(server) == 1
        assert slow.arena is not None
        assert slow.arena.slots is not None
        memory, stores = slow.arena.slots.memory, []
        send = memory.send

        def write_later(*arguments: Any) -> None:  # its device is still writing
            stores.append(arguments)

        monkeypatch.setattr(memory, "send", write_later)
        late, prompt = ask(slow, seed=1), ask(other, seed=2)
        assert [request.request_id for request in (*server.receive(), *server.receive())] == [prompt]
        assert not server.has_requests(), "a launch is not interrupted for it"
        send(*stores[0])
        assert server.has_requests()
        (request,) = server.receive()
        assert request.request_id == late
        assert np.array_equal(request.vector, vector(1))


def test_a_pool_serves_others_while_gpu_vectors_are_in_flight(
    gpu_pool: tuple[RingServer, FakeCuda],
) -> None:
    server, cuda = gpu_pool
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
        assert server.wait(60_000), "vectors are in flight: the pool must not sleep"
        cuda.run()
        found = server.receive()
        assert len(found) == SLOTS
        assert all(np.array_equal(request.vector, one) for request, one in zip(found, vectors, strict=True))
        assert {call[0] for call in cuda.calls} == {"on device", "store"}, "and the pool calls no driver"
        cuda.lazy = False


def test_vectors_in_flight_for_a_departed_client_are_dropped(gpu_pool: tuple[RingServer, FakeCuda]) -> None:
    server, cuda = gpu_pool
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


def test_a_filtered_request_and_a_collection_that_the_host_reads_go_through_the_host() -> None:
    memory = HostMemory.create(arena_bytes(SLOTS, 4 * DIM))
    arena = DeviceArena(memory, SLOTS, 4 * DIM, epoch=5)
    catalogue = Catalogue((Served("docs", DIM), Served("notes", DIM, in_place=False)))
    server = RingServer(endpoint(), catalogue, epoch=5, ring_slots=SLOTS, max_k=6, max_clients=1, arena=arena)
    with server, attach(server, arena=True) as client:
        specs = [SearchSpec("docs", 1, filter=b"{}"), SearchSpec("notes", 1), SearchSpec("docs", 1)]
        assert [client.takes_in_place(spec) for spec in specs] == [False, False, True]
        for spec in specs:
            client.submit(vector(3), spec)
        assert client.arena is not None
        assert client.arena.slots is not None
        assert client.arena.slots.free_slots == SLOTS - 1
        assert all(np.array_equal(request.vector, vector(3)) for request in server.receive())
    arena.close()


def test_a_forged_filtered_request_in_the_arena_is_invalid(pool: tuple[RingServer, DeviceArena]) -> None:
    server, _ = pool
    with attach(server, arena=True) as client:
        forge_requests(client, [1], kind=SEARCH_ARENA, filter=1)
        assert server.receive() == []
        assert [result.status for result in client.poll()] == ["invalid_request"]


@pytest.mark.parametrize("handle", [(SLOTS, 0), (1 << 31, 0), ((1 << 32) - 1, 0)])
def test_a_client_that_names_a_slot_outside_its_lease_is_evicted(
    pool: tuple[RingServer, DeviceArena], monkeypatch: pytest.MonkeyPatch, handle: tuple[int, int]
) -> None:
    server, arena = pool
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
        ask(client, seed=1)
        signal.pause()


def test_the_lease_of_a_killed_client_is_reclaimed(pool: tuple[RingServer, DeviceArena]) -> None:
    server, arena = pool
    with child(attached_process, server.endpoint) as process:
        while not server.receive():
            server.wait(5)
        assert arena.free_slots == SLOTS
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while arena.free_slots < 2 * SLOTS:
            server.wait(5)
    assert arena.free_slots == 2 * SLOTS


def test_a_grant_is_of_host_memory_or_of_a_gpus() -> None:
    with pytest.raises(InvalidArgument, match="either in host memory or"):
        Grant(Lease(1, 0, 1))
    reference = CudaReference(1, "cuda:0", bytes(64), 4096)
    assert Grant(Lease(1, 0, 1), gpu=reference).memory == reference
