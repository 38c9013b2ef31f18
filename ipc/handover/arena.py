"""The memory of the KV hand-over: owned and written by prefill, mapped read-only by decode.

```
arena, byte 0     magic | version | slots | payload offset | payload bytes | epoch | 0 | 0       int64, written once
            64    generation of slot 0 | of slot 1 | …                                           int64
payload offset    payload: what it means is the users' business (a KV tensor)
```
The payload may lie in a GPU's memory instead; then the offset is 0 and nothing follows the generations. These stay in
host memory, so that looking at one is a load and never a question to a device.

Only the owner can map it writable. A slot's generation rises in `begin`, before the slot is written anew; an offer
carries the generation it was made under. So the puller copies first and asks `current` then: if the generation
moved, the copy may be torn and is thrown away. On a GPU the same holds because the owner's kernels that write a slot
anew are launched after `begin`, and the puller asks after its copy has ended.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable

from ipc.errors import InvalidArgument, MemoryRefused, ProtocolViolation, StaleEpoch
from ipc.memory import atomics
from ipc.memory.device import CudaReference, DeviceMemory
from ipc.memory.shared import MemoryReference, SharedMemory
from ipc.ring.ring import MAX_EPOCH

# ---- page tables filled ahead of use
# The first touch of a mapped page is a fault, and a copy of a few MiB out of another process's memory spends half its
# time on them. A thread of low priority takes them all once, when the memory is mapped; what it has not reached yet
# still works, by faults.


_MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14; an older kernel refuses it and nothing is filled
_CHUNK_BYTES = 4 << 20  # one call; the process can map nothing else meanwhile

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefault:
    """Fills the page tables of `size` bytes from `address` on, a page's begin. `close` it before they are unmapped."""

    def __init__(self, address: int, size: int) -> None:
        self._closing = threading.Event()
        self._filled = False
        self._thread = threading.Thread(target=self._run, args=(address, size), name="prefault", daemon=True)
        self._thread.start()

    def _run(self, address: int, size: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for begin in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - begin)
            if self._closing.is_set() or _libc.madvise(address + begin, length, _MADV_POPULATE_READ) != 0:
                return
        self._filled = True

    def wait(self, timeout_s: float) -> bool:
        """Whether all of them are filled, within that time; False too if the kernel cannot."""
        self._thread.join(timeout_s)
        return self._filled

    def close(self) -> None:
        """Stop; returns within one call to the kernel. Idempotent."""
        self._closing.set()
        self._thread.join()


MAGIC = 0x3141564B49525254  # "TRRIKVA1"
VERSION = 1
HEADER_BYTES = 64
MAX_SLOTS = 1 << 20
MAX_ARENA_BYTES = 1 << 42
_PAGE = 4096


class KvArena:
    """The owner's end: a generation for each of `slots`, and the payload.

    `payload` is a writable memoryview, empty where the payload is in `device`'s memory (`device_reference` to others).
    """

    def __init__(self, memory: SharedMemory, slots: int, epoch: int, payload: memoryview) -> None:
        self.memory = memory
        self.slots = slots
        self.epoch = epoch
        self.payload = payload
        self.device: DeviceMemory | None = None
        self.device_reference: CudaReference | None = None
        self._generations = [0] * slots

    @classmethod
    def create(cls, slots: int, payload_bytes: int, epoch: int) -> "KvArena":
        """An arena of zeros. `epoch` is another one in every life of the owner. Raises `InvalidArgument`."""
        offset = _payload_offset(slots, epoch)
        if not 1 <= payload_bytes <= MAX_ARENA_BYTES - offset:
            raise InvalidArgument(f"payload must be within 1..{MAX_ARENA_BYTES - offset} bytes, got {payload_bytes}")
        memory = _format(slots, offset, payload_bytes, epoch, offset + payload_bytes)
        return cls(memory, slots, epoch, memory.view[offset:])

    @classmethod
    def create_on(cls, device: DeviceMemory, slots: int, epoch: int) -> "KvArena":
        """An arena whose payload is all of `device`, memory of a GPU, which it closes in the end.

        Raises `InvalidArgument`, and `MemoryRefused` where that memory cannot be shared (a MIG device's).
        """
        reference = device.reference
        if not isinstance(reference, CudaReference):
            raise InvalidArgument(f"the payload must be in a GPU's memory, not {reference}")
        memory = _format(slots, 0, device.size, epoch, _payload_offset(slots, epoch))
        arena = cls(memory, slots, epoch, memory.view[:0])
        arena.device, arena.device_reference = device, reference
        return arena

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
        if self.device is not None:
            self.device.close()
        self.memory.close()


def _payload_offset(slots: int, epoch: int) -> int:
    if not 1 <= slots <= MAX_SLOTS or not 0 <= epoch <= MAX_EPOCH:
        raise InvalidArgument(f"slots {slots} must be within 1..{MAX_SLOTS}, epoch {epoch} within 0..{MAX_EPOCH}")
    return -(-(HEADER_BYTES + 8 * slots) // _PAGE) * _PAGE


def _format(slots: int, offset: int, payload_bytes: int, epoch: int, size: int) -> SharedMemory:
    memory = SharedMemory.create("trinity-kv", size, peers_write=False)
    header = memory.view[:HEADER_BYTES].cast("q")
    for i, word in enumerate((MAGIC, VERSION, slots, offset, payload_bytes, epoch)):
        header[i] = word
    return memory


OpenDevice = Callable[[CudaReference], DeviceMemory]
"""Opens another process's GPU memory, to pull from it. Raises `MemoryRefused`."""


class MappedArena:
    """A source's arena as mapped by a sink: checked header, read-only `payload` or `device` memory to read from.

    What is mapped here is faulted in ahead.
    """

    def __init__(
        self,
        reference: MemoryReference,
        epoch: int,
        device: CudaReference | None = None,
        open_device: OpenDevice | None = None,
    ) -> None:
        self.device: DeviceMemory | None = None
        self._map(reference, epoch, device)
        if device is None:
            return
        try:
            if open_device is None:
                raise MemoryRefused(f"the payload is on {device.device} of process {device.pid}, and we have no GPU")
            self.device = open_device(device)
        except BaseException:
            self.close()
            raise

    def _map(self, reference: MemoryReference, epoch: int, device: CudaReference | None) -> None:
        self.memory = SharedMemory.open(reference, max_size=MAX_ARENA_BYTES)
        try:
            if self.memory.size < HEADER_BYTES:
                raise ProtocolViolation(f"an arena has at least {HEADER_BYTES} bytes, got {self.memory.size}")
            magic, version, slots, offset, length, found, *_ = self.memory.view[:HEADER_BYTES].cast("q").tolist()
            if (magic, version) != (MAGIC, VERSION):
                raise ProtocolViolation(f"not an arena of version {VERSION}: magic {magic:#x}, version {version}")
            if found != epoch:
                raise StaleEpoch(f"the offer is of epoch {epoch}, the arena of epoch {found}")
            begin = HEADER_BYTES + 8 * slots
            if not 1 <= slots <= MAX_SLOTS or length < 1 or self.memory.size < begin or (offset and offset < begin):
                raise ProtocolViolation(f"impossible arena: {slots} slots, payload of {length} bytes at {offset}")
            if offset and offset + length != self.memory.size:
                raise ProtocolViolation(f"payload of {length} bytes at {offset} in a memory of {self.memory.size}")
            announced = 0 if device is None else device.size
            if announced != (0 if offset else length):
                raise ProtocolViolation(f"payload of {length} bytes at {offset}, {announced} bytes of GPU memory")
            self.slots = slots
            self.epoch = epoch
            self.payload = self.memory.view[offset : offset + length] if offset else self.memory.view[:0]
            self.pidfd = os.pidfd_open(reference.pid)
            self.prefault = Prefault(self.memory.address, self.memory.size)
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
        self.prefault.close()
        os.close(self.pidfd)
        if self.device is not None:
            self.device.close()
        with contextlib.suppress(BufferError):
            self.payload.release()
        self.memory.close()
