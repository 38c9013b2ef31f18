"""What a device arena asks of its memory, and the host's answer; a GPU's is in `ipc.memory.cuda`.

Work on the memory is queued and done in order: on the host at once, on a GPU when its stream comes by. That order is
all that is promised, and all that is needed: a word that is stored after a write is seen after it.
"""

from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.errors import InvalidArgument, MemoryRefused
from ipc.memory import atomics
from ipc.memory.shared import MemoryReference, Pid, SharedMemory

MAX_BYTES = 1 << 40
MAX_WORD = (1 << 32) - 1
HANDLE_BYTES = 64  # of a CUDA IPC handle


class CudaReference(msgspec.Struct, frozen=True, tag=True):
    """Names a piece of GPU memory to another process of this host, valid while its exporter lives and holds it."""

    pid: Pid
    device: str
    handle: bytes
    size: int

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES or not 1 <= self.size <= MAX_BYTES or len(self.device) > 64:
            raise InvalidArgument(
                f"a handle has {HANDLE_BYTES} bytes, got {len(self.handle)}; "
                f"size {self.size} must be within 1..{MAX_BYTES}"
            )


Reference = MemoryReference | CudaReference


class DeviceSpan(NamedTuple):
    """Bytes in a GPU's memory; `device` is its ordinal in this process."""

    address: int
    nbytes: int
    device: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a vector of float32."""
        return (self.nbytes // 4,)


Source = npt.NDArray[Any] | DeviceSpan


class CudaArray(Protocol):
    """A GPU's memory that describes itself as CUDA's Python libraries do (version 3 of the interface)."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceMemory(Protocol):
    """`size` bytes that two processes share. Offsets of words are multiples of 64; words are 0..2³²-1."""

    size: int

    @property
    def reference(self) -> Reference:
        """What to send to a process that shall open this. Raises MemoryRefused unless we made it and hold it."""

    def write(self, offset: int, source: Source) -> None:
        """Queue a copy into the memory."""

    def read(self, offset: int, target: Source) -> None:
        """Queue a copy out of the memory."""

    def store_word(self, offset: int, value: int) -> None:
        """Queue a store that is seen after everything queued before."""

    def word(self, offset: int) -> int:
        """The word as it is now, whatever is queued."""

    def words(self, offset: int, count: int, stride: int) -> list[int]:
        """`word` for `count` of them, `stride` bytes apart, at the price of one."""

    def flush(self) -> None:
        """Wait until everything queued is done."""

    def idle(self) -> bool:
        """Whether everything queued is done. Never waits; raises MemoryRefused if some of it failed."""

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory to `read` into while nobody waits; it goes with this one."""

    def close(self) -> None:
        """Idempotent."""


class HostMemory:
    """`DeviceMemory` in a sealed memfd: what machines without a GPU, and tests, use."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._bytes = np.frombuffer(memory.view, np.uint8)
        self.size = memory.size

    @classmethod
    def create(cls, size: int) -> "HostMemory":
        """`size` bytes of zeros. Raises InvalidArgument."""
        return cls(SharedMemory.create("trinity-arena", size))

    @classmethod
    def open(cls, reference: MemoryReference) -> "HostMemory":
        """Another process's memory. Raises MemoryRefused."""
        return cls(SharedMemory.open(reference, max_size=MAX_BYTES, writable=True))

    @property
    def reference(self) -> Reference:
        return self._memory.reference

    def write(self, offset: int, source: Source) -> None:
        raw = _host(source)
        self._bytes[offset : offset + raw.nbytes] = raw

    def read(self, offset: int, target: Source) -> None:
        raw = _host(target)
        raw[:] = self._bytes[offset : offset + raw.nbytes]

    def store_word(self, offset: int, value: int) -> None:
        # SYNC POINT: arena word. The release keeps the copy before it; `word` acquires.
        atomics.store_release(self._memory.address + offset, value)

    def word(self, offset: int) -> int:
        # SYNC POINT: arena word, see `store_word`.
        return atomics.load_acquire(self._memory.address + offset)

    def words(self, offset: int, count: int, stride: int) -> list[int]:
        return [self.word(offset + stride * number) for number in range(count)]

    def flush(self) -> None:
        """Nothing is ever queued here."""

    def idle(self) -> bool:
        """Always."""
        return True

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def close(self) -> None:
        del self._bytes
        self._bytes = np.empty(0, np.uint8)
        self._memory.close()


def reached(word: int, value: int) -> bool:
    """Whether a word has come to a value, counted around 2³² (as the GPU's own comparison does)."""
    return (word - value) & MAX_WORD < 1 << 31


def _host(array: Source) -> npt.NDArray[np.uint8]:
    if isinstance(array, DeviceSpan):
        raise MemoryRefused(f"{array.nbytes} bytes of GPU memory cannot be copied to or from an arena in host memory")
    return array.reshape(-1).view(np.uint8)
