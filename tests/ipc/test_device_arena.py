"""Tests of the arena of query vectors, in the memory of a fake GPU."""

import ctypes
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import InvalidArgument, ProtocolViolation, RingFull, StaleEpoch
from ipc.session.device_arena import DeviceArena, Lease, LeasedSlots, arena_bytes
from tests.ipc.arenas import span
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere

pytest.importorskip("cuda.bindings.driver")
from ipc.memory.cuda import CudaMemory

DIM = 6
EPOCH = 5


def pair(size: int) -> tuple[CudaMemory, CudaMemory]:
    """Return the pool's and a client's end of a memory."""
    cuda = FakeCuda()
    owner = CudaMemory.create(size, "cuda:0", cuda)
    return owner, CudaMemory.open(from_elsewhere(owner.reference), "cuda:0", cuda)


class Ends:
    """Both ends of a lease, with the word that the client's device stores behind each vector."""

    def __init__(self, slots: int = 4, count: int = 4) -> None:
        owner, peer = pair(arena_bytes(slots, 4 * DIM))
        self.arena = DeviceArena(owner, slots, 4 * DIM, EPOCH)
        self.lease = self.arena.lease(count)
        self.client = LeasedSlots(peer, self.lease)
        self._word = np.zeros(1, np.int64)
        self._address = peer.reach(int(self._word.ctypes.data), 8)
        self._generation = 0

    def write(self, number: int) -> int:
        self._generation += 1
        one = vector(number)
        slot = self.client.write(span(one), self._address, self._generation)
        assert self._word[0] == self._generation
        return slot

    def read(self, slot: int) -> list[float]:
        """Read a vector where it lies, as the pool's device does."""
        return list((ctypes.c_float * DIM).from_address(self.arena.address_of(self.lease.first + slot)))

    def close(self) -> None:
        self.client.close()
        self.arena.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def vector(number: int) -> np.ndarray:
    return np.arange(DIM, dtype=np.float32) + 100 * number


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["write", "end", "end last"]), max_size=60), st.integers(1, 5))
def test_a_vector_in_use_is_never_overwritten(operations: list[str], slots: int) -> None:
    ends = Ends(slots, slots)
    in_use: deque[tuple[int, int]] = deque()
    for number, operation in enumerate(operations):
        if operation == "write" and len(in_use) < slots:
            in_use.append((number, ends.write(number)))
        elif operation == "write":
            with pytest.raises(RingFull):
                ends.write(number)
        elif in_use:
            written, slot = in_use.popleft() if operation == "end" else in_use.pop()
            assert ends.read(slot) == vector(written).tolist()
            ends.client.release(slot)
    ends.close()


def test_leases_do_not_overlap_and_are_reused_after_their_end() -> None:
    ends = Ends(slots=6, count=3)
    second = ends.arena.lease(3)
    assert (second.first, second.count, ends.arena.free_slots) == (3, 3, 0)
    with pytest.raises(RingFull, match="0 of 6 are free"):
        ends.arena.lease(1)
    ends.arena.end_lease(ends.lease)
    assert ends.arena.free_slots == 3
    with pytest.raises(InvalidArgument, match="a lease of 7 slots, from an arena of 6"):
        ends.arena.lease(7)
    ends.arena.end_lease(second)
    assert ends.arena.free_slots == 6
    ends.close()


def test_an_arena_of_another_epoch_or_no_arena_is_rejected() -> None:
    owner, peer = pair(arena_bytes(4, 4 * DIM))
    with pytest.raises(ProtocolViolation, match="not an arena of version 2: magic 0x0"):
        LeasedSlots(peer, Lease(EPOCH, 0, 1))
    DeviceArena(owner, 4, 4 * DIM, EPOCH)
    with pytest.raises(StaleEpoch, match="the lease is of epoch 4, the arena of epoch 5"):
        LeasedSlots(peer, Lease(4, 0, 1))
    with pytest.raises(ProtocolViolation, match="a lease of 3 slots from 2 on, in an arena of 4"):
        LeasedSlots(peer, Lease(EPOCH, 2, 3))


@pytest.mark.parametrize("field", range(8))
def test_an_overwritten_header_is_rejected_or_harmless(field: int) -> None:
    owner, peer = pair(arena_bytes(4, 4 * DIM))
    DeviceArena(owner, 4, 4 * DIM, EPOCH)
    owner.write(8 * field, np.array([1 << 60], np.int64))
    if field == 7:
        LeasedSlots(peer, Lease(EPOCH, 0, 1))
    else:
        with pytest.raises((ProtocolViolation, StaleEpoch)):
            LeasedSlots(peer, Lease(EPOCH, 0, 1))


def test_sizes_are_validated_before_anything_is_allocated() -> None:
    with pytest.raises(InvalidArgument, match=r"slots 0 must be within 1\.\.65536"):
        arena_bytes(0, 16)
    with pytest.raises(InvalidArgument, match=r"payload 1048577 within 1\.\.1048576"):
        arena_bytes(1, (1 << 20) + 1)
    small = CudaMemory.create(4096, "cuda:0", FakeCuda())
    with pytest.raises(InvalidArgument, match="bytes, the memory has 4096"):
        DeviceArena(small, 16, 4 * DIM, EPOCH)
    small.close()


def test_a_payload_that_is_too_long_is_rejected(ends: Ends) -> None:
    long = np.zeros(DIM + 1, np.float32)
    with pytest.raises(InvalidArgument, match="a payload of 28 bytes; a slot has 24"):
        ends.client.write(span(long), 0, 1)
