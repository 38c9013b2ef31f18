"""Interface of a GPU's memory that processes share, which `ipc.memory.cuda` implements.

Operations are queued and executed in order, on a stream of the GPU. That order is the only guarantee, and a sufficient
one: a word that is stored after a write becomes visible after it.
"""

from typing import Any, NamedTuple, Protocol

import msgspec
import numpy.typing as npt

from ipc.errors import InvalidArgument
from ipc.memory.shared import Pid

MAX_BYTES = 1 << 40
MAX_WORD = (1 << 32) - 1
HANDLE_BYTES = 64  # of a CUDA IPC handle


class CudaReference(msgspec.Struct, frozen=True, tag=True):
    """Reference to GPU memory for another process of this host, valid while its exporter holds the memory."""

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


class DeviceSpan(NamedTuple):
    """Bytes in a GPU's memory; `device` is its ordinal in this process."""

    address: int
    nbytes: int
    device: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as a vector of float32."""
        return (self.nbytes // 4,)


class CudaArray(Protocol):
    """GPU memory with the CUDA Array Interface, version 3."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceMemory(Protocol):
    """`size` bytes that two processes share. Words are 0..2³²-1, at multiples of 8 bytes."""

    size: int

    @property
    def address(self) -> int:
        """Address of the first byte in this process, for its device."""

    @property
    def reference(self) -> CudaReference:
        """Reference for a process that is to open this. Raises MemoryRefused unless created here and not closed."""

    def write(self, offset: int, source: npt.NDArray[Any]) -> None:
        """Queue a copy of host memory into the memory."""

    def send(self, offset: int, source: DeviceSpan, word: int, value: int) -> None:
        """Queue a copy into the memory and, behind it, a store of the word at an address that its device reaches."""

    def read(self, offset: int, target: npt.NDArray[Any]) -> None:
        """Queue a copy out of the memory to host memory."""

    def reach(self, address: int, nbytes: int) -> int:
        """Let the memory's device store into host memory of this process, whole pages that stay mapped until `close`.

        Return the address for `send`. Raises MemoryRefused.
        """

    def flush(self) -> None:
        """Wait until the queue is empty."""

    def idle(self) -> bool:
        """Return whether the queue is empty. Never blocks; raises MemoryRefused if an operation has failed."""

    def close(self) -> None:
        """Idempotent."""
