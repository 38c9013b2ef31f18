"""The arena of query vectors: one piece of memory a pool device, into which clients write from where their vectors are.

```
byte 0      magic | version | slots | stride | payload bytes | epoch | payload offset | 0     int64, written once
64 + 128·i  ready word of slot i: the generation that its client has written               uint32, stored by the client
128 + 128·i ack word of slot i: the generation that the pool has taken out                 uint32, stored by the pool
offset      payload of slot 0 | of slot 1 | …                                               stride bytes each
```
A client leases some slots for its session and has them to itself. It counts a generation for each use of a slot: it
writes the payload, then stores the generation in `ready`, and tells the pool (slot, generation) in a descriptor. The
pool copies the word out, then the payload; if the word was the generation, the payload is whole, and the pool stores
the generation in `ack`: the slot is free again. If not, the client's device is still at it, and the pool copies anew.
Words and copies of either side are ordered by the queue that they are put on (a CUDA stream), so nobody's host waits
for a device.

Generations go round 2³². A pool in its next life has another epoch and another arena: leases of the old one are stale.
"""

from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.errors import InvalidArgument, ProtocolViolation, RingFull, StaleEpoch
from ipc.memory.device import MAX_BYTES, MAX_WORD, DeviceMemory, HostMemory, Reference, Source, reached
from ipc.memory.shared import MemoryReference
from ipc.ring.ring import MAX_EPOCH

MAGIC = 0x3141564449525254  # "TRRIDVA1"
VERSION = 1
MAX_SLOTS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 20
_WORDS = 64
_LINE = 64
_PAGE = 4096
_JUMP = 1 << 20  # more uses of a slot than a client has under way


class Lease(msgspec.Struct, frozen=True):
    """Slots first … first + count - 1 of the arena of one epoch; `generations` are those that they had when leased."""

    epoch: int
    first: int
    generations: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.generations)


class SlotHandle(NamedTuple):
    """One use of a slot: what a descriptor carries instead of a vector."""

    slot: int
    generation: int


def arena_bytes(slots: int, payload_bytes: int) -> int:
    """Bytes of an arena. Raises InvalidArgument."""
    return _offset(slots, payload_bytes) + slots * _stride(payload_bytes)


class DeviceArena:
    """The pool's end: makes the arena, leases slots, takes payloads out. One thread."""

    def __init__(
        self, memory: DeviceMemory, slots: int, payload_bytes: int, epoch: int, *, generation: int = 0
    ) -> None:
        """Lay out `memory`, at least `arena_bytes(slots, payload_bytes)` of zeros. Raises InvalidArgument.

        `generation`: that its slots begin with.
        """
        needed = arena_bytes(slots, payload_bytes)
        if memory.size < needed or not 0 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(
                f"{needed} bytes are needed, {memory.size} are there; epoch {epoch} must be within 0..{MAX_EPOCH}"
            )
        self.memory, self.slots, self.payload_bytes, self.epoch = memory, slots, payload_bytes, epoch
        self._stride, self._offset = _stride(payload_bytes), _offset(slots, payload_bytes)
        header = (MAGIC, VERSION, slots, self._stride, payload_bytes, epoch, self._offset, 0)
        memory.write(0, np.array(header, np.int64))
        memory.flush()
        self._copies = memory.staging(slots * (_LINE + self._stride)).reshape(slots, _LINE + self._stride)
        self._claimed = [generation] * slots  # generation that was claimed last
        if generation:
            for slot in range(slots):
                memory.store_word(_ready(slot), generation)
        self._owner = [0] * slots  # 0: free
        self._next_lease = 1

    def lease(self, count: int) -> tuple[int, Lease]:
        """`count` neighbouring slots for one client: a number for `end_lease`, and what the client needs.

        Raises InvalidArgument for a count that no arena could have, RingFull where no such run of slots is free.
        """
        if not 1 <= count <= self.slots:
            raise InvalidArgument(f"a lease of {count} slots, from an arena of {self.slots}")
        run = 0
        for slot in range(self.slots):
            run = 0 if self._owner[slot] else run + 1
            if run == count:
                first, number = slot - count + 1, self._next_lease
                self._next_lease += 1
                self._owner[first : first + count] = [number] * count
                return number, Lease(self.epoch, first, tuple(self._claimed[first : first + count]))
        free = self._owner.count(0)
        raise RingFull(f"{count} neighbouring slots are wanted, {free} of {self.slots} are free, in pieces")

    def claim(self, lease: int, handle: SlotHandle) -> None:
        """A descriptor names this handle: it is to be taken out, once.

        Raises ProtocolViolation for a place outside of the client's lease or not its slot's next generation.
        """
        slot, generation = handle
        if not 0 <= slot < self.slots or self._owner[slot] != lease:
            raise ProtocolViolation(f"slot {slot} is not of lease {lease}")
        expected = _next_generation(self._claimed[slot])
        if generation != expected:
            raise ProtocolViolation(f"generation {generation} of slot {slot}: the next one is {expected}")
        self._claimed[slot] = generation

    def copy_out(self, handle: SlotHandle) -> None:
        """Queue: copy what a claimed place holds. Look at it with `taken_out` when the memory is idle."""
        copy = self._copies[handle.slot]
        # SYNC POINT: arena word. The payload is read after the word; the client stores the word after the payload.
        self.memory.read(_ready(handle.slot), copy[:4])
        self.memory.read(self._offset + handle.slot * self._stride, copy[_LINE : _LINE + self.payload_bytes])

    def copied(self, handle: SlotHandle) -> npt.NDArray[np.uint8] | None:
        """A place's payload, as long as nothing else is copied out of its slot; the client may have the slot again.

        None: its device had not written it when it was copied.
        """
        copy = self._copies[handle.slot]
        if not reached(int(copy[:4].view(np.uint32)[0]), handle.generation):
            return None
        self.memory.store_word(_ack(handle.slot), handle.generation)
        payload: npt.NDArray[np.uint8] = copy[_LINE : _LINE + self.payload_bytes]
        return payload

    def end_lease(self, lease: int) -> None:
        """The client is gone, and its slots are free.

        Their generations jump, so that what its device may still write never passes for the next client's.
        """
        for slot in range(self.slots):
            if self._owner[slot] == lease:
                self._owner[slot] = 0
                self._claimed[slot] = (self._claimed[slot] + _JUMP) & MAX_WORD
                self.memory.store_word(_ready(slot), self._claimed[slot])  # never far behind

    @property
    def free_slots(self) -> int:
        """Slots that no client has."""
        return self._owner.count(0)

    def close(self) -> None:
        """Give the memory back. Who has it open must close first: on a GPU the order matters. Idempotent."""
        self.memory.close()


class LeasedSlots:
    """The client's end of a lease: loans a free slot, writes a payload into it. One thread."""

    def __init__(self, memory: DeviceMemory, lease: Lease) -> None:
        """Check the arena's header. Raises ProtocolViolation, and StaleEpoch for the arena of another life."""
        header = np.zeros(8, np.int64)
        memory.read(0, header)
        memory.flush()
        magic, version, slots, stride, payload, epoch, offset, _ = header.tolist()
        if (magic, version) != (MAGIC, VERSION):
            raise ProtocolViolation(f"not an arena of version {VERSION}: magic {magic:#x}, version {version}")
        if epoch != lease.epoch:
            raise StaleEpoch(f"the lease is of epoch {lease.epoch}, the arena of epoch {epoch}")
        if not 1 <= slots <= MAX_SLOTS or not 1 <= payload <= MAX_PAYLOAD_BYTES or stride != _stride(payload):
            raise ProtocolViolation(f"impossible arena: {slots} slots of {payload} bytes, {stride} apart")
        if offset != _offset(slots, payload) or offset + slots * stride > memory.size:
            raise ProtocolViolation(f"{slots} slots of {stride} bytes from {offset} on, in {memory.size} bytes")
        if lease.count < 1 or lease.first < 0 or lease.first + lease.count > slots:
            raise ProtocolViolation(f"a lease of {lease.count} slots from {lease.first} on, in an arena of {slots}")
        self.payload_bytes = payload
        self.memory, self._stride, self._offset = memory, stride, offset
        self._first = lease.first
        self._generations = dict(enumerate(lease.generations, lease.first))
        self._free = deque(self._generations)
        self._used: deque[SlotHandle] = deque()

    def write(self, payload: Source) -> SlotHandle:
        """Queue: copy a payload into a free slot and mark it as written. Returns what the descriptor must carry.

        Raises RingFull when the pool has not taken out any of the slots in use, InvalidArgument for too many bytes.
        """
        if payload.nbytes > self.payload_bytes:
            raise InvalidArgument(f"a payload of {payload.nbytes} bytes; a slot has {self.payload_bytes}")
        slot = self._loan()
        generation = self._generations[slot] = _next_generation(self._generations[slot])
        self.memory.write(self._offset + slot * self._stride, payload)
        self.memory.store_word(_ready(slot), generation)
        handle = SlotHandle(slot, generation)
        self._used.append(handle)
        return handle

    def _loan(self) -> int:
        if not self._free:
            # The pool takes out in any order: look through all that are in use.
            acks = self.memory.words(_ack(self._first), len(self._generations), _ack(1) - _ack(0))
            for _ in range(len(self._used)):
                handle = self._used.popleft()
                if reached(acks[handle.slot - self._first], handle.generation):
                    self._free.append(handle.slot)
                else:
                    self._used.append(handle)
        if not self._free:
            raise RingFull(f"all {len(self._used)} leased slots of the arena are in use")
        return self._free.popleft()

    def close(self) -> None:
        """Let go of the arena, before the pool does. Idempotent."""
        self.memory.close()


def _ready(slot: int) -> int:
    return _WORDS + 2 * _LINE * slot


def _ack(slot: int) -> int:
    return _WORDS + 2 * _LINE * slot + _LINE


def _next_generation(generation: int) -> int:
    return (generation + 1) & MAX_WORD


def _stride(payload_bytes: int) -> int:
    return -(-payload_bytes // 256) * 256


def _offset(slots: int, payload_bytes: int) -> int:
    if not 1 <= slots <= MAX_SLOTS or not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidArgument(
            f"slots {slots} must be within 1..{MAX_SLOTS}, payload {payload_bytes} within 1..{MAX_PAYLOAD_BYTES} bytes"
        )
    offset = -(-(_WORDS + 2 * _LINE * slots) // _PAGE) * _PAGE
    if offset + slots * _stride(payload_bytes) > MAX_BYTES:
        raise InvalidArgument(f"{slots} slots of {payload_bytes} bytes exceed {MAX_BYTES} bytes")
    return offset


def open_memory(reference: Reference, device: str) -> DeviceMemory:
    """Open what another process announced; `device` is the GPU to work from. Raises MemoryRefused."""
    if isinstance(reference, MemoryReference):
        return HostMemory.open(reference)
    from ipc.memory.cuda import CudaMemory

    return CudaMemory.open(reference, device)
