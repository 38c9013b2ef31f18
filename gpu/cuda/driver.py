"""What the CUDA engine asks of a driver: these calls, and no others.

`gpu.cuda.cuda_driver.CudaDriver` answers them with NVIDIA's driver; tests answer them with a recorder that only writes
down what was called, and with an emulation that runs the same kernels on the CPU.

Device addresses, streams, modules, kernels, events and graphs are ints that mean something to their driver alone; 0 is
none of them. Calls that take a stream put work on it and return at once. While a stream is captured, `launch`,
`copy_*`, `fill` and loops go into the graph instead and nothing runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Argument = Any
"""A kernel's argument: an instance of a ctypes type, `c_uint64(address)`, `c_int32(n)` or a Structure, as the kernel
declares it. Its bytes are read when the kernel is launched or captured."""


class Dim(NamedTuple):
    """Blocks of a grid, or threads of a block."""

    x: int
    y: int = 1
    z: int = 1


class PinnedMemory(NamedTuple):
    """Page-locked host memory that the device sees as well: `view` uint8 [nbytes] here, `address` there."""

    view: Bytes
    address: int


class Loop(NamedTuple):
    """An open WHILE loop of a capture.

    What belongs into its body is put on `stream`. A kernel of the body ends the loop by setting the condition that
    `handle` (uint64) names to 0; without that it runs again.
    """

    stream: int
    handle: int


class EntryPoints(NamedTuple):
    """C functions by address, for compiled code: they take and return what those of NVIDIA's driver API do."""

    replay: int
    """cuGraphLaunch(graph, stream)"""
    launch: int
    """cuLaunchKernel(kernel, grid x, y, z, block x, y, z, bytes of shared memory, stream, addresses of arguments, 0)"""
    query: int
    """cuStreamQuery(stream): NOT_READY while some of its work is not done"""


NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""


class Driver(Protocol):
    """One device. Belongs to the thread that made it.

    Every call may raise DeviceError; a fault of a kernel appears in a later call, `idle` and `synchronise` among them.
    """

    @property
    def name(self) -> str:
        """What the device calls itself."""

    @property
    def uuid(self) -> str:
        """The device's UUID as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""

    @property
    def arch(self) -> str:
        """What to compile for: "sm_90"."""

    @property
    def multiprocessors(self) -> int: ...

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and in all."""

    def entry_points(self) -> EntryPoints:
        """What compiled code calls; the functions live as long as the driver."""

    def raise_for(self, call: str, code: int) -> NoReturn:
        """Raise the DeviceError of an entry point, by its name in the driver API, that returned `code`."""

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Device memory, not cleared, aligned to 256 bytes. Raises OutOfDeviceMemory."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave. Waits for work that is under way on the device."""

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Pinned, mapped host memory of zeros, aligned to 256 bytes."""

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Give it back; nothing may use its view any more."""

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        """Copy a C-ordered array to device memory. A pinned source must stay as it is until the stream has come by."""

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        """Copy device memory to a C-ordered array; it is there once the stream has come by."""

    def copy_on_device(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy device memory to device memory."""

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        """Set `count` 32-bit words, from an address that is a multiple of 4 on, to `word`, 0..2³²-1."""

    # ---- kernels

    def load_module(self, image: bytes) -> int:
        """Load compiled code (a cubin for `arch`)."""

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        """A kernel by its unmangled name, allowed `shared_bytes` of dynamic shared memory a block."""

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Run a kernel."""

    def resident_blocks(self, kernel: int, threads: int, shared_bytes: int) -> int:
        """Blocks of a kernel that a multiprocessor runs at a time."""

    # ---- streams, events

    def create_stream(self) -> int:
        """A stream that orders itself with no other."""

    def destroy_stream(self, stream: int) -> None: ...

    def idle(self, stream: int) -> bool:
        """Whether all work of a stream is done. Never waits; raises DeviceError if some of it failed."""

    def synchronise(self, stream: int) -> None:
        """Wait until all work of a stream is done."""

    def create_event(self) -> int:
        """An event with a time."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, stream: int, event: int) -> None:
        """Let the event happen when the stream comes by."""

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Milliseconds between two events that have happened, to about 0.5 µs."""

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """From here on work of the stream goes into a graph, until `end_capture`."""

    def end_capture(self, stream: int) -> int:
        """The captured graph, ready to be replayed. It owns none of the memory that its kernels use."""

    def abandon_capture(self, stream: int) -> None:
        """End a capture that something went wrong in, loops that are open included, and forget it."""

    def begin_while(self, stream: int) -> Loop:
        """Add a loop after what the stream has captured so far; its condition is 1 at the start of each replay."""

    def end_while(self, loop: Loop) -> None:
        """Close a loop; what its outer stream captures next comes after it."""

    def replay(self, stream: int, graph: int) -> None:
        """Run a captured graph."""

    def destroy_graph(self, graph: int) -> None: ...

    def close(self) -> None:
        """Let go of the device. Memory, streams and graphs that were not given back go with the process."""


# ---- what a device's memory can do: a plain copy, timed by events


_COPY_BYTES = 1 << 30
_REPEAT = 5
_MICROSECOND = 1e-3


def device_copy_bytes_s(driver: Driver) -> float:
    """Bytes read a second while some are copied on the device (as many are written): the fastest of some copies."""
    nbytes = min(_COPY_BYTES, driver.memory()[0] // 4) // 256 * 256
    stream, begin, end = driver.create_stream(), driver.create_event(), driver.create_event()
    source, target = driver.allocate(nbytes), driver.allocate(nbytes)
    try:
        driver.fill(stream, source, 1, nbytes // 4)
        best = float("inf")
        for _ in range(_REPEAT):
            driver.record(stream, begin)
            driver.copy_on_device(stream, target, source, nbytes)
            driver.record(stream, end)
            driver.synchronise(stream)
            best = min(best, driver.elapsed_ms(begin, end))
        return nbytes / max(best, _MICROSECOND) * 1e3
    finally:
        driver.free(source)
        driver.free(target)
        driver.destroy_event(begin)
        driver.destroy_event(end)
        driver.destroy_stream(stream)
