"""The memory of the KV hand-over: owned and written by prefill, mapped read-only by decode.

```
arena, byte 0     magic | version | slots | payload offset | payload bytes | epoch | 0 | 0       int64, written once
            64    generation of slot 0 | of slot 1 | …                                           int64
payload offset    payload: what it means is the users' business (a KV tensor)
```
Only the owner can map it writable. A slot's generation rises in `begin`, before the slot is written anew; an offer
carries the generation it was made under. So the puller copies first and asks `current` then: if the generation
moved, the copy may be torn and is thrown away.
"""

import contextlib
import os

from ipc import atomics
from ipc.errors import InvalidArgument, MemoryRefused, ProtocolViolation, StaleEpoch
from ipc.memory import MemoryReference, SharedMemory
from ipc.ring import MAX_EPOCH

MAGIC = 0x3141564B49525254  # "TRRIKVA1"
VERSION = 1
HEADER_BYTES = 64
MAX_SLOTS = 1 << 20
MAX_ARENA_BYTES = 1 << 42
_PAGE = 4096


class KvArena:
    """The owner's end: `payload` (writable memoryview of `payload_bytes`), and a generation for each of `slots`."""

    def __init__(self, memory: SharedMemory, slots: int, payload_offset: int, payload_bytes: int, epoch: int) -> None:
        self.memory = memory
        self.slots = slots
        self.epoch = epoch
        self.payload = memory.view[payload_offset : payload_offset + payload_bytes]
        self._generations = [0] * slots

    @classmethod
    def create(cls, slots: int, payload_bytes: int, epoch: int) -> "KvArena":
        """An arena of zeros. `epoch` is another one in every life of the owner. Raises `InvalidArgument`."""
        if not 1 <= slots <= MAX_SLOTS or not 0 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(f"slots {slots} must be within 1..{MAX_SLOTS}, epoch {epoch} within 0..{MAX_EPOCH}")
        offset = -(-(HEADER_BYTES + 8 * slots) // _PAGE) * _PAGE
        if not 1 <= payload_bytes <= MAX_ARENA_BYTES - offset:
            raise InvalidArgument(f"payload must be within 1..{MAX_ARENA_BYTES - offset} bytes, got {payload_bytes}")
        memory = SharedMemory.create("trinity-kv", offset + payload_bytes, peers_write=False)
        header = memory.view[:HEADER_BYTES].cast("q")
        for i, word in enumerate((MAGIC, VERSION, slots, offset, payload_bytes, epoch)):
            header[i] = word
        return cls(memory, slots, offset, payload_bytes, epoch)

    def begin(self, slot: int) -> int:
        """The slot is about to be written anew: every offer of its old content turns stale. Returns the generation."""
        if not 0 <= slot < self.slots:
            raise InvalidArgument(f"slot must be within 0..{self.slots - 1}, got {slot}")
        self._generations[slot] += 1
        # SYNC POINT: generation. The fence keeps the writes that follow behind the store; it pairs with the fence in
        # `MappedArena.generation`, which keeps the reads of the copy before its load.
        atomics.store_release(self.memory.address + HEADER_BYTES + 8 * slot, self._generations[slot])
        atomics.fence()
        return self._generations[slot]

    def generation(self, slot: int) -> int:
        """How often the slot was begun."""
        return self._generations[slot]

    def close(self) -> None:
        """Give the memory back; who has mapped it keeps it until they close theirs. Idempotent."""
        with contextlib.suppress(BufferError):
            self.payload.release()
        self.memory.close()


class MappedArena:
    """A source's arena as mapped by a sink: checked header, read-only payload."""

    def __init__(self, reference: MemoryReference, epoch: int) -> None:
        self.memory = SharedMemory.open(reference, max_size=MAX_ARENA_BYTES)
        try:
            if self.memory.size < HEADER_BYTES:
                raise ProtocolViolation(f"an arena has at least {HEADER_BYTES} bytes, got {self.memory.size}")
            magic, version, slots, offset, length, found, *_ = self.memory.view[:HEADER_BYTES].cast("q").tolist()
            if (magic, version) != (MAGIC, VERSION):
                raise ProtocolViolation(f"not an arena of version {VERSION}: magic {magic:#x}, version {version}")
            if found != epoch:
                raise StaleEpoch(f"the offer is of epoch {epoch}, the arena of epoch {found}")
            if not 1 <= slots <= MAX_SLOTS or offset < HEADER_BYTES + 8 * slots or length < 1:
                raise ProtocolViolation(f"impossible arena: {slots} slots, payload of {length} bytes at {offset}")
            if offset + length != self.memory.size:
                raise ProtocolViolation(f"payload of {length} bytes at {offset} in a memory of {self.memory.size}")
            self.slots = slots
            self.epoch = epoch
            self.payload = self.memory.view[offset : offset + length]
            self.pidfd = os.pidfd_open(reference.pid)
        except OSError as error:
            self.memory.close()
            raise MemoryRefused(f"the arena's owner (process {reference.pid}) is gone: {error.strerror}") from error
        except BaseException:
            self.memory.close()
            raise

    def generation(self, slot: int) -> int:
        # SYNC POINT: generation, see `KvArena.begin`.
        atomics.fence()
        return atomics.load_acquire(self.memory.address + HEADER_BYTES + 8 * slot)

    def close(self) -> None:
        os.close(self.pidfd)
        with contextlib.suppress(BufferError):
            self.payload.release()
        self.memory.close()
