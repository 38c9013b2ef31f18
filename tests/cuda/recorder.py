"""A `Driver` that records calls and computes nothing; device memory is host memory of the test process.

A test defines the effect of launches: `on_launch` is called for every kernel that runs, launched or replayed.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gpu.cuda.driver import Argument, Dim, EntryPoints, Loop, PinnedMemory
from gpu.errors import DeviceError, OutOfDeviceMemory
from tests.cuda.entry_points import DriverCallbacks

_MOST_ROUNDS = 10_000


@dataclass
class Launch:
    """A launched or captured kernel with its arguments."""

    kernel: str
    grid: Dim
    block: Dim
    arguments: tuple[Argument, ...]
    shared_bytes: int
    handle: int = 0  # of the enclosing loop


@dataclass
class RecordingDriver:
    """`calls` holds (name, arguments …) of every call that concerns the device, in order."""

    total: int = 1 << 40
    can_loop: bool = True
    max_shared_bytes: int = 227 * 1024
    name: str = "recorder"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    arch: str = "sm_90"
    multiprocessors: int = 132
    on_launch: Callable[[Launch], None] = lambda launch: None
    fault: str = ""
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory_of: dict[int, npt.NDArray[np.uint8]] = {}
        self.graphs: dict[int, list[Launch]] = {}
        self.kernels: dict[int, str] = {}
        self.streams: set[int] = set()
        self._capturing: dict[int, list[Launch]] = {}
        self._loops: dict[int, int] = {}  # body stream → outer stream
        self.conditions: dict[int, int] = {}  # of loops, by handle: 0 ends the loop
        self._next = 1
        self._called_back = DriverCallbacks(self)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _number(self) -> int:
        self._next += 1
        return self._next

    def memory(self) -> tuple[int, int]:
        return self.total - sum(memory.nbytes for memory in self.memory_of.values()), self.total

    def entry_points(self) -> EntryPoints:
        return self._called_back.points

    def raise_for(self, call: str, code: int) -> NoReturn:
        self._called_back.raise_for()

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.memory()[0]:
            raise OutOfDeviceMemory(f"{nbytes} bytes are needed, {self.memory()[0]} are free")
        memory = _aligned(nbytes)
        memory[:] = 0xA5  # not cleared
        self.memory_of[memory.ctypes.data] = memory
        self.calls.append(("allocate", nbytes))
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        del self.memory_of[address]
        self.calls.append(("free", address))

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        memory = _aligned(nbytes)
        memory[:] = 0
        self.calls.append(("allocate_pinned", nbytes))
        return PinnedMemory(memory, int(memory.ctypes.data))

    def free_pinned(self, memory: PinnedMemory) -> None:
        self.calls.append(("free_pinned", memory.address))

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        self.calls.append(("copy_to_device", stream, address, source.nbytes))
        ctypes.memmove(self._checked(address, source.nbytes), source.ctypes.data, source.nbytes)

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        self.calls.append(("copy_to_host", stream, address, target.nbytes))
        ctypes.memmove(target.ctypes.data, self._checked(address, target.nbytes), target.nbytes)

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        self.calls.append(("fill", stream, address, word, count))
        self.device(address, np.uint32, count)[:] = word

    def device(self, address: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        """Return a view of device memory."""
        nbytes = count * np.dtype(dtype).itemsize
        self._checked(address, nbytes)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(dtype)

    def _checked(self, address: int, nbytes: int) -> int:
        """Return the address, if `nbytes` from it on are within one allocation."""
        for base, memory in self.memory_of.items():
            if base <= address and address + nbytes <= base + memory.nbytes:
                return address
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not device memory")

    # ---- kernels

    def load_module(self, image: bytes) -> int:
        self.calls.append(("load_module", image))
        return self._number()

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        if shared_bytes > self.max_shared_bytes:
            raise DeviceError(f"{name} wants {shared_bytes} bytes of shared memory")
        number = self._number()
        self.kernels[number] = name
        self.calls.append(("kernel", name, shared_bytes))
        return number

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        launch = Launch(self.kernels[kernel], grid, block, tuple(arguments), shared_bytes)
        if stream in self._capturing:
            self._capturing[stream].append(launch)
            return
        self.calls.append(("launch", launch.kernel, grid.x))
        self.on_launch(launch)

    # ---- streams, events

    def resident_blocks(self, kernel: int, threads: int, shared_bytes: int) -> int:
        return 2048 // threads

    def create_stream(self) -> int:
        stream = self._number()
        self.streams.add(stream)
        return stream

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    def idle(self, stream: int) -> bool:
        self.calls.append(("idle", stream))
        if self.fault:
            raise DeviceError(self.fault)
        return True

    def synchronise(self, stream: int) -> None:
        self.calls.append(("synchronise", stream))

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        self.calls.append(("begin_capture", stream))
        self._capturing[stream] = []

    def end_capture(self, stream: int) -> int:
        assert stream not in self._loops.values(), "a loop is still open"
        graph = self._number()
        self.graphs[graph] = self._capturing.pop(stream)
        self.calls.append(("end_capture", stream))
        return graph

    def abandon_capture(self, stream: int) -> None:
        self.calls.append(("abandon_capture", stream))
        self._capturing.pop(stream)

    def begin_while(self, stream: int) -> Loop:
        if not self.can_loop:
            raise DeviceError("conditional nodes are not supported")
        body = self.create_stream()
        self._capturing[body] = []
        self._loops[body] = stream
        return Loop(body, self._number())

    def end_while(self, loop: Loop) -> None:
        body = self._capturing.pop(loop.stream)
        for launch in body:
            launch.handle = loop.handle
        self._capturing[self._loops.pop(loop.stream)] += body
        self.destroy_stream(loop.stream)

    def replay(self, stream: int, graph: int) -> None:
        self.calls.append(("replay", graph))
        for handle, launches in groupby(self.graphs[graph], lambda launch: launch.handle):
            body = list(launches)
            self.conditions[handle] = 1
            for _ in range(_MOST_ROUNDS if handle else 1):
                for launch in body:
                    self.on_launch(launch)
                if not self.conditions[handle]:
                    break

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def close(self) -> None:
        self.calls.append(("close",))


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]
