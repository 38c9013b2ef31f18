"""Arena of query vectors: memory of a pool's device, into which clients copy vectors directly from their own device.

```
byte 0      magic | version | slots | stride | payload bytes | epoch | payload offset | 0     int64, written once
offset      payload of slot 0 | of slot 1 | …                                               stride bytes each
```
A client leases slots exclusively for its session, and the pool reads a vector where it lies: a slot is in use until its
request has ended. Whether the client's device has written a vector is said by a word in host memory, in the request's
slot of the ring (`ring.descriptors`): the client's device stores the use's generation there behind the vector (on the
same CUDA stream), so no host waits for a device and the pool polls nothing but its own memory.

The pool owns the memory, so it outlives its clients. CUDA IPC opens it whole: a client could write into others' slots,
which spoils their queries' results; it can neither move nor free them.

A restarted pool has another epoch and another arena: leases of the old one are stale.
"""

from collections import deque

import msgspec
import numpy as np

from ipc.errors import InvalidArgument, ProtocolViolation, RingFull, StaleEpoch
from ipc.memory.device import MAX_BYTES, DeviceMemory, DeviceSpan
from ipc.ring.ring import MAX_EPOCH

MAGIC = 0x3141564449525254  # "TRRIDVA1"
VERSION = 2
MAX_SLOTS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 20
_HEADER_BYTES = 64
_PAGE = 4096


class Lease(msgspec.Struct, frozen=True):
    """Slots first … first + count - 1 of an epoch's arena."""

    epoch: int
    first: int
    count: int


def arena_bytes(slots: int, payload_bytes: int) -> int:
    """Return the bytes of an arena. Raises InvalidArgument."""
    _check(slots, payload_bytes)
    return _PAGE + slots * _stride(payload_bytes)


class DeviceArena:
    """Pool's end of an arena: formats it and leases slots. One thread."""

    def __init__(self, memory: DeviceMemory, slots: int, payload_bytes: int, epoch: int) -> None:
        """Format `memory`, at least `arena_bytes(slots, payload_bytes)`. Raises InvalidArgument."""
        needed = arena_bytes(slots, payload_bytes)
        if memory.size < needed or not 0 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(
                f"needs {needed} bytes, the memory has {memory.size}; epoch {epoch} must be within 0..{MAX_EPOCH}"
            )
        self.memory, self.slots, self.payload_bytes, self.epoch = memory, slots, payload_bytes, epoch
        self.stride = _stride(payload_bytes)
        """Bytes from slot to slot."""
        memory.write(0, np.array((MAGIC, VERSION, slots, self.stride, payload_bytes, epoch, _PAGE, 0), np.int64))
        memory.flush()
        self._leased = [False] * slots

    def address_of(self, slot: int) -> int:
        """Return the address of a slot's payload, for the pool's device."""
        return self.memory.address + _PAGE + slot * self.stride

    def lease(self, count: int) -> Lease:
        """Lease `count` consecutive slots to one client.

        Raises InvalidArgument for a count that the arena cannot have, RingFull if no such run of slots is free.
        """
        if not 1 <= count <= self.slots:
            raise InvalidArgument(f"a lease of {count} slots, from an arena of {self.slots}")
        run = 0
        for slot in range(self.slots):
            run = 0 if self._leased[slot] else run + 1
            if run == count:
                first = slot - count + 1
                self._leased[first : first + count] = [True] * count
                return Lease(self.epoch, first, count)
        raise RingFull(f"no {count} consecutive slots are free ({self.free_slots} of {self.slots} are free)")

    def end_lease(self, lease: Lease) -> None:
        """Free the slots of a client that is gone. What it still writes there is read as a later client's vector at
        worst; whether that one is complete is said elsewhere."""
        self._leased[lease.first : lease.first + lease.count] = [False] * lease.count

    @property
    def free_slots(self) -> int:
        """Number of slots that are not leased."""
        return self._leased.count(False)

    def close(self) -> None:
        """Free the memory, which all clients must have closed before. Idempotent."""
        self.memory.close()


class LeasedSlots:
    """Client's end of a lease: writes payloads into free slots. One thread."""

    def __init__(self, memory: DeviceMemory, lease: Lease) -> None:
        """Validate the arena's header. Raises ProtocolViolation, and StaleEpoch for an arena of another epoch."""
        header = np.zeros(_HEADER_BYTES // 8, np.int64)
        memory.read(0, header)
        memory.flush()
        magic, version, slots, stride, payload, epoch, offset, _ = header.tolist()
        if (magic, version) != (MAGIC, VERSION):
            raise ProtocolViolation(f"not an arena of version {VERSION}: magic {magic:#x}, version {version}")
        if epoch != lease.epoch:
            raise StaleEpoch(f"the lease is of epoch {lease.epoch}, the arena of epoch {epoch}")
        if not 1 <= slots <= MAX_SLOTS or not 1 <= payload <= MAX_PAYLOAD_BYTES or stride != _stride(payload):
            raise ProtocolViolation(f"impossible arena: {slots} slots of {payload} bytes, {stride} apart")
        if offset != _PAGE or offset + slots * stride > memory.size:
            raise ProtocolViolation(f"{slots} slots of {stride} bytes from {offset} on, in {memory.size} bytes")
        if lease.count < 1 or lease.first < 0 or lease.first + lease.count > slots:
            raise ProtocolViolation(f"a lease of {lease.count} slots from {lease.first} on, in an arena of {slots}")
        self.payload_bytes = payload
        self.memory, self._stride = memory, stride
        self._first, self._count = _PAGE + lease.first * stride, lease.count
        self._free = deque(range(lease.count))

    def write(self, payload: DeviceSpan, word: int, generation: int) -> int:
        """Queue a copy of a payload into a free slot, and the store of a generation at the address `word` behind it.

        `word`: as the memory's device reaches it. Return the slot's index in the lease; it is in use until `release`.
        Raises RingFull if no slot is free, InvalidArgument for too many bytes.
        """
        if payload.nbytes > self.payload_bytes:
            raise InvalidArgument(f"a payload of {payload.nbytes} bytes; a slot has {self.payload_bytes}")
        if not self._free:
            raise RingFull(f"all {self._count} leased slots of the arena are in use")
        self.memory.send(self._first + self._free[0] * self._stride, payload, word, generation)
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Free a slot, once its request has ended."""
        self._free.append(slot)

    @property
    def free_slots(self) -> int:
        """Number of slots that can be written."""
        return len(self._free)

    def close(self) -> None:
        """Close the arena, before the pool frees it. Idempotent."""
        self.memory.close()


def _stride(payload_bytes: int) -> int:
    return -(-payload_bytes // 256) * 256


def _check(slots: int, payload_bytes: int) -> None:
    if not 1 <= slots <= MAX_SLOTS or not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidArgument(
            f"slots {slots} must be within 1..{MAX_SLOTS}, payload {payload_bytes} within 1..{MAX_PAYLOAD_BYTES} bytes"
        )
    if _PAGE + slots * _stride(payload_bytes) > MAX_BYTES:
        raise InvalidArgument(f"{slots} slots of {payload_bytes} bytes exceed {MAX_BYTES} bytes")
