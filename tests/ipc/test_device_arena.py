"""Tests of the arena of query vectors in every type of memory, and between two processes."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import (
    InvalidArgument,
    MemoryRefused,
    ProtocolViolation,
    RingConsumer,
    RingFull,
    RingLayout,
    RingProducer,
    StaleEpoch,
    format_ring,
)
from ipc.memory.device import (
    MAX_WORD,
    CudaReference,
    DeviceMemory,
    DeviceSpan,
    HostMemory,
    Source,
    reached,
)
from ipc.memory.shared import MemoryReference, SharedMemory
from ipc.session.device_arena import DeviceArena, Lease, LeasedSlots, SlotHandle, arena_bytes, open_memory
from tests.ipc import fake_cuda
from tests.ipc.processes import child, succeeded

DIM = 6
EPOCH = 5
Pair = Callable[[int], tuple[DeviceMemory, DeviceMemory]]


def host_pair(size: int) -> tuple[DeviceMemory, DeviceMemory]:
    owner = HostMemory.create(size)
    assert isinstance(owner.reference, MemoryReference)
    return owner, HostMemory.open(owner.reference)


def fake_cuda_pair(size: int) -> tuple[DeviceMemory, DeviceMemory]:
    from ipc.memory.cuda import CudaMemory

    cuda = fake_cuda.FakeCuda()
    owner = CudaMemory.create(size, "cuda:0", cuda)
    reference = owner.reference
    assert isinstance(reference, CudaReference)
    elsewhere = CudaReference(1, reference.device, reference.handle, reference.size)
    return owner, CudaMemory.open(elsewhere, "cuda:0", cuda)


@pytest.fixture(params=["host", "cuda"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "host":
        return host_pair
    pytest.importorskip("cuda.bindings.driver")
    return fake_cuda_pair


@pytest.fixture
def ends(pair: Pair) -> Iterator[Callable[..., tuple[DeviceArena, LeasedSlots, int]]]:
    """Return a factory of arenas with one lease: the pool's end, the client's end, the lease's number."""
    opened: list[Any] = []

    def make(slots: int = 4, count: int = 4) -> tuple[DeviceArena, LeasedSlots, int]:
        owner, peer = pair(arena_bytes(slots, 4 * DIM))
        arena = DeviceArena(owner, slots, 4 * DIM, EPOCH)
        number, lease = arena.lease(count)
        client = LeasedSlots(peer, lease)
        opened.extend([client, arena])
        return arena, client, number

    yield make
    for one in opened:
        one.close()


Ends = Callable[..., tuple[DeviceArena, LeasedSlots, int]]


def vector(number: int) -> np.ndarray:
    return np.arange(DIM, dtype=np.float32) + 100 * number


def taken(arena: DeviceArena, lease: int, handle: SlotHandle) -> list[float]:
    """Take a vector as the pool does."""
    arena.claim(lease, handle)
    arena.copy_out(handle)
    arena.memory.flush()
    payload = arena.copied(handle)
    assert payload is not None
    found: list[float] = payload.view(np.float32).tolist()
    return found


def test_the_pool_takes_a_clients_vectors_in_any_order(ends: Ends) -> None:
    arena, client, lease = ends()
    places = [client.write(vector(number)) for number in range(4)]
    for number in (2, 0, 3, 1):
        assert taken(arena, lease, places[number]) == vector(number).tolist()


def held_back(memory: DeviceMemory, stores: list[Callable[[], None]]) -> Callable[[int, Source, int, int], None]:
    """Return a `send` of a device that copies and has not stored the word yet; `stores` do."""

    def send(offset: int, source: Source, word: int, value: int) -> None:
        memory.write(offset, source)
        stores.append(lambda: memory.store_word(word - memory.address, value))

    return send


def test_a_vector_that_the_device_has_not_written_is_not_taken(ends: Ends) -> None:
    arena, client, lease = ends()
    memory = client.memory
    stores: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "send", held_back(memory, stores))
        place = client.write(vector(7))
    arena.claim(lease, place)
    for _ in range(2):
        arena.copy_out(place)
        arena.memory.flush()
        assert arena.copied(place) is None
    assert arena.memory.word(128) == 0, "its slot is not the client's again"
    stores[0]()
    memory.flush()
    arena.copy_out(place)
    arena.memory.flush()
    payload = arena.copied(place)
    assert payload is not None
    assert payload.view(np.float32).tolist() == vector(7).tolist()
    arena.memory.flush()
    assert arena.memory.word(128) == place.generation


def test_a_long_leased_slot_that_was_never_written_is_not_ready(pair: Pair) -> None:
    owner, peer = pair(arena_bytes(1, 4 * DIM))
    arena = DeviceArena(owner, 1, 4 * DIM, EPOCH)
    for _ in range(3000):  # leases, each of which jumps by 2²⁰
        lease, lent = arena.lease(1)
        place = SlotHandle(0, (lent.generations[0] + 1) & MAX_WORD)
        arena.claim(lease, place)
        arena.copy_out(place)
        owner.flush()
        assert arena.copied(place) is None
        arena.end_lease(lease)
    peer.close()
    arena.close()


def test_a_full_lease_rejects_writes_until_the_pool_takes_one(ends: Ends) -> None:
    arena, client, lease = ends()
    places = [client.write(vector(number)) for number in range(4)]
    with pytest.raises(RingFull, match="all 4 leased slots"):
        client.write(vector(9))
    assert taken(arena, lease, places[1]) == vector(1).tolist()
    again = client.write(vector(9))
    assert (again.slot, again.generation) == (places[1].slot, places[1].generation + 1)
    assert taken(arena, lease, again) == vector(9).tolist()
    assert taken(arena, lease, places[0]) == vector(0).tolist()


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["write", "take", "take last"]), max_size=60), st.integers(1, 5))
def test_every_payload_is_taken_once_and_intact_in_any_order(operations: list[str], slots: int) -> None:
    owner, peer = host_pair(arena_bytes(slots, 4 * DIM))
    arena = DeviceArena(owner, slots, 4 * DIM, EPOCH)
    lease, lent = arena.lease(slots)
    client = LeasedSlots(peer, lent)
    waiting: deque[tuple[int, SlotHandle]] = deque()
    for number, operation in enumerate(operations):
        if operation == "write" and len(waiting) < slots:
            waiting.append((number, client.write(vector(number))))
        elif operation == "write":
            with pytest.raises(RingFull):
                client.write(vector(number))
        elif waiting:
            written, place = waiting.popleft() if operation == "take" else waiting.pop()
            assert taken(arena, lease, place) == vector(written).tolist()
    client.close()
    arena.close()


def test_a_slot_is_taken_once_and_only_from_its_own_lease(ends: Ends) -> None:
    arena, client, lease = ends(slots=6, count=4)
    other, _ = arena.lease(2)
    place = client.write(vector(1))
    with pytest.raises(ProtocolViolation, match=f"slot {place.slot} is not in lease {other}"):
        taken(arena, other, place)
    with pytest.raises(ProtocolViolation, match="the next one is 1"):
        taken(arena, lease, SlotHandle(place.slot, 2))
    assert taken(arena, lease, place) == vector(1).tolist()
    with pytest.raises(ProtocolViolation, match="the next one is 2"):
        taken(arena, lease, place)
    with pytest.raises(ProtocolViolation, match="slot 6 is not in lease"):
        taken(arena, lease, SlotHandle(6, 1))


def test_leases_do_not_overlap_and_are_reused_after_their_end(ends: Ends) -> None:
    arena, _, lease = ends(slots=6, count=3)
    second, lent = arena.lease(3)
    assert (lent.first, lent.count, arena.free_slots) == (3, 3, 0)
    with pytest.raises(RingFull, match="0 of 6 are free"):
        arena.lease(1)
    arena.end_lease(lease)
    assert arena.free_slots == 3
    with pytest.raises(InvalidArgument, match="a lease of 7 slots, from an arena of 6"):
        arena.lease(7)
    arena.end_lease(second)
    assert arena.free_slots == 6


def test_a_dead_clients_writes_are_not_mistaken_for_its_successors(pair: Pair) -> None:
    owner, peer = pair(arena_bytes(1, 4 * DIM))
    arena = DeviceArena(owner, 1, 4 * DIM, EPOCH)
    first, lent = arena.lease(1)
    LeasedSlots(peer, lent).write(vector(1))  # its descriptor is never sent
    arena.end_lease(first)
    second, lent = arena.lease(1)
    assert not reached(peer.word(64), lent.generations[0] + 1)
    client = LeasedSlots(peer, lent)
    assert taken(arena, second, client.write(vector(2))) == vector(2).tolist()


def test_generations_wrap_around(pair: Pair) -> None:
    owner, peer = pair(arena_bytes(1, 4 * DIM))
    arena = DeviceArena(owner, 1, 4 * DIM, EPOCH, generation=MAX_WORD - 1)
    lease, lent = arena.lease(1)
    client = LeasedSlots(peer, lent)
    generations = []
    for number in range(3):
        place = client.write(vector(number))
        generations.append(place.generation)
        assert taken(arena, lease, place) == vector(number).tolist()
    assert generations == [MAX_WORD, 0, 1]


def test_words_are_compared_modulo_their_size() -> None:
    assert reached(5, 5)
    assert reached(6, 5)
    assert not reached(4, 5)
    assert reached(1, MAX_WORD)
    assert not reached(MAX_WORD, 1)


def test_an_arena_of_another_epoch_or_no_arena_is_rejected(pair: Pair) -> None:
    owner, peer = pair(arena_bytes(4, 4 * DIM))
    with pytest.raises(ProtocolViolation, match="not an arena of version 1: magic 0x0"):
        LeasedSlots(peer, Lease(EPOCH, 0, (0,)))
    DeviceArena(owner, 4, 4 * DIM, EPOCH)
    with pytest.raises(StaleEpoch, match="the lease is of epoch 4, the arena of epoch 5"):
        LeasedSlots(peer, Lease(4, 0, (0,)))
    with pytest.raises(ProtocolViolation, match="a lease of 3 slots from 2 on, in an arena of 4"):
        LeasedSlots(peer, Lease(EPOCH, 2, (0, 0, 0)))


@pytest.mark.parametrize("field", range(8))
def test_an_overwritten_header_is_rejected_or_harmless(field: int) -> None:
    owner, peer = host_pair(arena_bytes(4, 4 * DIM))
    DeviceArena(owner, 4, 4 * DIM, EPOCH)
    owner.write(8 * field, np.array([1 << 60], np.int64))
    if field == 7:
        LeasedSlots(peer, Lease(EPOCH, 0, (0,)))
    else:
        with pytest.raises((ProtocolViolation, StaleEpoch)):
            LeasedSlots(peer, Lease(EPOCH, 0, (0,)))


def test_sizes_are_validated_before_anything_is_allocated() -> None:
    with pytest.raises(InvalidArgument, match=r"slots 0 must be within 1\.\.65536"):
        arena_bytes(0, 16)
    with pytest.raises(InvalidArgument, match=r"payload 1048577 within 1\.\.1048576"):
        arena_bytes(1, (1 << 20) + 1)
    small = HostMemory.create(4096)
    with pytest.raises(InvalidArgument, match="bytes, the memory has 4096"):
        DeviceArena(small, 16, 4 * DIM, EPOCH)
    small.close()


def test_a_payload_that_is_too_long_is_rejected(ends: Ends) -> None:
    _, client, _ = ends()
    with pytest.raises(InvalidArgument, match="a payload of 28 bytes; a slot has 24"):
        client.write(np.zeros(DIM + 1, np.float32))


def test_gpu_memory_is_not_copied_to_an_arena_on_the_host() -> None:
    memory = HostMemory.create(4096)
    with pytest.raises(MemoryRefused, match="16 bytes of GPU memory"):
        memory.write(0, DeviceSpan(0x1000, 16))
    memory.close()


LAYOUT = RingLayout(8, 16)


def client_process(arena: MemoryReference, descriptors: MemoryReference, lease: Lease, rounds: int) -> None:
    client = LeasedSlots(open_memory(arena, "cpu"), lease)
    with SharedMemory.open(descriptors, max_size=LAYOUT.size, writable=True) as memory:
        ring = RingProducer(memory.view, LAYOUT, EPOCH)
        words = ring.payload(np.int64, 0, 2)
        for number in range(rounds):
            place = persistently(partial(client.write, vector(number)))
            slot = persistently(ring.loan)
            words[slot] = (place.slot, place.generation)
            ring.send()
        del ring, words
    client.close()


def persistently(act: Callable[[], Any]) -> Any:
    while True:
        with contextlib.suppress(RingFull):
            return act()
        os.sched_yield()  # the other side may need this core


def test_two_processes_exchange_vectors_without_torn_reads() -> None:
    memory = HostMemory.create(arena_bytes(3, 4 * DIM))
    arena = DeviceArena(memory, 3, 4 * DIM, EPOCH)
    number, lease = arena.lease(3)
    with SharedMemory.create("descriptors", LAYOUT.size) as descriptors:
        format_ring(descriptors.view, LAYOUT, EPOCH)
        ring = RingConsumer(descriptors.view, LAYOUT, EPOCH)
        words = ring.payload(np.int64, 0, 2)
        with child(client_process, memory.reference, descriptors.reference, lease, 2000) as process:
            for i in range(2000):
                while not ring.ready(1):
                    assert process.is_alive() or ring.ready(1)
                    os.sched_yield()  # the other side may need this core
                place = SlotHandle(*words[ring.first].tolist())
                ring.release(1)
                assert taken(arena, number, place) == vector(i).tolist()
            assert succeeded(process)
        del ring, words
    arena.close()
