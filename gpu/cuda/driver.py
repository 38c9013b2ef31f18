"""`Driver`, the interface of a device driver that the CUDA engine uses.

`gpu.cuda.cuda_driver.CudaDriver` implements it with NVIDIA's driver; tests implement it with a call recorder and with
an emulation that runs the same kernels on the CPU.

Device addresses, streams, modules, kernels and graphs are opaque non-zero ints. Calls that take a stream
enqueue work and return at once. While a stream is captured, `launch`, `copy_*`, `fill` and loops are added to the graph
instead of being run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Argument = Any
"""A kernel's argument: an instance of the ctypes type that the kernel declares, for example `c_uint64(address)`,
`c_int32(n)` or a Structure. Its bytes are read when the kernel is launched or captured."""


class Dim(NamedTuple):
    """Blocks of a grid, or threads of a block."""

    x: int
    y: int = 1
    z: int = 1


class PinnedMemory(NamedTuple):
    """Page-locked host memory mapped on the device: `view`, uint8 [nbytes] on the host, `address` on the device."""

    view: Bytes
    address: int


class Loop(NamedTuple):
    """An open WHILE loop of a capture.

    Work enqueued on `stream` becomes its body. A kernel of the body ends the loop by setting the condition of `handle`
    (uint64) to 0; otherwise the body runs again.
    """

    stream: int
    handle: int


class EntryPoints(NamedTuple):
    """Addresses of C functions for compiled code, with the signatures of NVIDIA's driver API."""

    replay: int
    """cuGraphLaunch(graph, stream)"""
    launch: int
    """cuLaunchKernel(kernel, grid x, y, z, block x, y, z, bytes of shared memory, stream, addresses of arguments, 0)"""
    query: int
    """cuStreamQuery(stream): NOT_READY while work is pending"""


NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""


class Driver(Protocol):
    """One device, used by the thread that opened it.

    Every call may raise DeviceError; a kernel's fault is reported by a later call, including `idle` and `synchronise`.
    """

    @property
    def name(self) -> str:
        """The device's name."""

    @property
    def uuid(self) -> str:
        """The device's UUID as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""

    @property
    def arch(self) -> str:
        """The architecture to compile for, for example "sm_90"."""

    @property
    def multiprocessors(self) -> int: ...

    def memory(self) -> tuple[int, int]:
        """Return free and total device memory in bytes."""

    def entry_points(self) -> EntryPoints:
        """Return the entry points for compiled code, valid for the driver's lifetime."""

    def raise_for(self, call: str, code: int) -> NoReturn:
        """Raise the DeviceError for `code`, returned by the driver function named `call`."""

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Allocate uninitialised device memory, aligned to 256 bytes. Raises OutOfDeviceMemory."""

    def free(self, address: int) -> None:
        """Free memory of `allocate`. Waits for running work of the device."""

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocate zeroed, pinned, mapped host memory, aligned to 256 bytes."""

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Free pinned memory; its view becomes invalid."""

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        """Copy a C-ordered array to device memory. A pinned source must not change until the copy has completed."""

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        """Copy device memory to a C-ordered array, valid once the copy has completed."""

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        """Set `count` 32-bit words at an address, a multiple of 4, to `word`, 0..2³²-1."""

    # ---- kernels

    def load_module(self, image: bytes) -> int:
        """Load a cubin for `arch`."""

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        """Return a kernel by its unmangled name, with up to `shared_bytes` of dynamic shared memory per block."""

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Launch a kernel."""

    def resident_blocks(self, kernel: int, threads: int, shared_bytes: int) -> int:
        """Return the maximum number of blocks of a kernel resident on a multiprocessor."""

    # ---- streams

    def create_stream(self) -> int:
        """Create a non-blocking stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def idle(self, stream: int) -> bool:
        """Return whether all work of a stream is complete, without waiting. Raises DeviceError if some of it failed."""

    def synchronise(self, stream: int) -> None:
        """Wait until all work of a stream is complete."""

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """Start capturing the stream's work into a graph."""

    def end_capture(self, stream: int) -> int:
        """End a capture and return the executable graph. It does not own the memory that its kernels use."""

    def abandon_capture(self, stream: int) -> None:
        """Discard a failed capture, including its open loops."""

    def begin_while(self, stream: int) -> Loop:
        """Open a WHILE loop after the captured work; its condition is 1 at the start of each replay."""

    def end_while(self, loop: Loop) -> None:
        """Close a loop; later work of the outer stream follows it."""

    def replay(self, stream: int, graph: int) -> None:
        """Launch a captured graph."""

    def destroy_graph(self, graph: int) -> None: ...

    def close(self) -> None:
        """Release the device. Remaining memory, streams and graphs are freed at the end of the process."""
