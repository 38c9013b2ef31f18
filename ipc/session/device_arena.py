"""Arena of query vectors: memory of a pool's device, into which clients copy vectors directly from their own device.

```
byte 0      magic | version | slots | stride | payload bytes | epoch | payload offset | 0     int64, written once
64 + 128·i  ready word of slot i: the generation that its client has written               uint32, stored by the client
128 + 128·i ack word of slot i: the generation that the pool has copied out                uint32, stored by the pool
offset      payload of slot 0 | of slot 1 | …                                               stride bytes each
```
A client leases slots exclusively for its session. Each use of a slot has a generation: the client writes the payload,
stores the generation in `ready`, and sends the handle (slot, generation) in a descriptor. The pool copies the word,
then the payload; if the word has reached the generation, the payload is complete, and the pool stores the generation in
`ack`, which frees the slot. Otherwise the client's device has not finished, and the pool copies again. Words and copies
of either side are ordered by the queue that they are put on (a CUDA stream), so no host waits for a device.

Generations wrap at 2³². A restarted pool has another epoch and another arena: leases of the old one are stale.
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
_JUMP = 1 << 20  # more uses of a slot than a client can have in flight


class Lease(msgspec.Struct, frozen=True):
    """Slots first … first + count - 1 of an epoch's arena, and their `generations` at the time of the lease."""

    epoch: int
    first: int
    generations: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.generations)


class SlotHandle(NamedTuple):
    """One use of a slot; a descriptor carries it instead of a vector."""

    slot: int
    generation: int


def arena_bytes(slots: int, payload_bytes: int) -> int:
    """Return the bytes of an arena. Raises InvalidArgument."""
    return _offset(slots, payload_bytes) + slots * _stride(payload_bytes)


class DeviceArena:
    """Pool's end of an arena: formats it, leases slots, copies payloads out. One thread."""

    def __init__(
        self, memory: DeviceMemory, slots: int, payload_bytes: int, epoch: int, *, generation: int = 0
    ) -> None:
        """Format `memory`, at least `arena_bytes(slots, payload_bytes)` of zeros. Raises InvalidArgument.

        `generation`: initial generation of the slots.
        """
        needed = arena_bytes(slots, payload_bytes)
        if memory.size < needed or not 0 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(
                f"needs {needed} bytes, the memory has {memory.size}; epoch {epoch} must be within 0..{MAX_EPOCH}"
            )
        self.memory, self.slots, self.payload_bytes, self.epoch = memory, slots, payload_bytes, epoch
        self._stride, self._offset = _stride(payload_bytes), _offset(slots, payload_bytes)
        header = (MAGIC, VERSION, slots, self._stride, payload_bytes, epoch, self._offset, 0)
        memory.write(0, np.array(header, np.int64))
        memory.flush()
        self._copies = memory.staging(slots * (_LINE + self._stride)).reshape(slots, _LINE + self._stride)
        self._claimed = [generation] * slots  # generation claimed last, by slot
        if generation:
            for slot in range(slots):
                memory.store_word(_ready(slot), generation)
        self._owner = [0] * slots  # 0: free
        self._next_lease = 1

    def lease(self, count: int) -> tuple[int, Lease]:
        """Lease `count` consecutive slots to one client. Return the lease's number for `end_lease`, and the lease.

        Raises InvalidArgument for a count that the arena cannot have, RingFull if no such run of slots is free.
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
        raise RingFull(f"no {count} consecutive slots are free ({free} of {self.slots} are free)")

    def claim(self, lease: int, handle: SlotHandle) -> None:
        """Claim a handle from a descriptor, to be copied out once.

        Raises ProtocolViolation if the slot is not in the client's lease or the generation is not the slot's next one.
        """
        slot, generation = handle
        if not 0 <= slot < self.slots or self._owner[slot] != lease:
            raise ProtocolViolation(f"slot {slot} is not in lease {lease}")
        expected = _next_generation(self._claimed[slot])
        if generation != expected:
            raise ProtocolViolation(f"generation {generation} of slot {slot}: the next one is {expected}")
        self._claimed[slot] = generation

    def copy_out(self, handle: SlotHandle) -> None:
        """Queue a copy of a claimed handle's payload. Call `copied` when the memory is idle."""
        copy = self._copies[handle.slot]
        # SYNC POINT: arena word. The payload is read after the word; the client stores the word after the payload.
        self.memory.read(_ready(handle.slot), copy[:4])
        self.memory.read(self._offset + handle.slot * self._stride, copy[_LINE : _LINE + self.payload_bytes])

    def copied(self, handle: SlotHandle) -> npt.NDArray[np.uint8] | None:
        """Return a handle's payload, valid until the slot's next copy, and free the slot.

        None: the client's device had not written it when it was copied.
        """
        copy = self._copies[handle.slot]
        if not reached(int(copy[:4].view(np.uint32)[0]), handle.generation):
            return None
        self.memory.store_word(_ack(handle.slot), handle.generation)
        payload: npt.NDArray[np.uint8] = copy[_LINE : _LINE + self.payload_bytes]
        return payload

    def end_lease(self, lease: int) -> None:
        """Free the slots of a client that is gone.

        Their generations jump, so that late writes of its device never match a generation of the next client.
        """
        for slot in range(self.slots):
            if self._owner[slot] == lease:
                self._owner[slot] = 0
                self._claimed[slot] = (self._claimed[slot] + _JUMP) & MAX_WORD
                self.memory.store_word(_ready(slot), self._claimed[slot])  # keeps comparisons modulo 2³² valid

    @property
    def free_slots(self) -> int:
        """Number of slots that are not leased."""
        return self._owner.count(0)

    def close(self) -> None:
        """Free the memory. On a GPU all clients must have closed it before. Idempotent."""
        self.memory.close()


class LeasedSlots:
    """Client's end of a lease: writes payloads into free slots. One thread."""

    def __init__(self, memory: DeviceMemory, lease: Lease) -> None:
        """Validate the arena's header. Raises ProtocolViolation, and StaleEpoch for an arena of another epoch."""
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
        """Queue a copy of a payload into a free slot and the store of its ready word. Return the handle.

        Raises RingFull if the pool has not copied out any of the slots in use, InvalidArgument for too many bytes.
        """
        if payload.nbytes > self.payload_bytes:
            raise InvalidArgument(f"a payload of {payload.nbytes} bytes; a slot has {self.payload_bytes}")
        slot = self._loan()
        generation = self._generations[slot] = _next_generation(self._generations[slot])
        word = self.memory.address + _ready(slot)
        self.memory.send(self._offset + slot * self._stride, payload, word, generation)
        handle = SlotHandle(slot, generation)
        self._used.append(handle)
        return handle

    def _loan(self) -> int:
        if not self._free:
            # The pool copies out in any order: check all slots in use.
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
        """Close the arena, before the pool frees it. Idempotent."""
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
    """Open the memory that another process has announced, from the GPU `device`. Raises MemoryRefused."""
    if isinstance(reference, MemoryReference):
        return HostMemory.open(reference)
    from ipc.memory.cuda import CudaMemory

    return CudaMemory.open(reference, device)
