"""Fake of `cuda.bindings.driver` for the calls of `ipc.memory.cuda`: device memory is host memory that any process can
open by its handle, and every call is recorded. Enumerations and handles are those of the real package.

Streams complete at once or, with `lazy`, on demand: by `run`, by a synchronisation, or `copies_per_query` copies per
stream query. The image of a module is the path of a shared library, whose function `launch_<kernel>(blocks, threads,
argument)` runs a kernel.
"""

import ctypes
import struct
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ipc import MemoryReference, SharedMemory
from ipc.memory.device import CudaReference

_HANDLE = "<qqqq"  # pid, fd, size, inode
GPUS = 2
MAX_BYTES = 1 << 40


class FakeCuda:
    """The devices of one process. `calls` holds each call's name and arguments; copies and words require a context."""

    def __init__(self, *, lazy: bool = False, copies_per_query: int = 0) -> None:
        from cuda.bindings import driver

        self._real = driver
        self._memory: dict[int, SharedMemory] = {}
        self._modules: dict[int, ctypes.CDLL] = {}
        self._kernels: dict[int, Any] = {}
        self._next = 100
        self.lazy, self.copies_per_query = lazy, copies_per_query
        self._queued: defaultdict[int, deque[Callable[[], Any]]] = defaultdict(deque)
        self._entry_points: list[Any] = []  # callbacks
        self.calls: list[tuple[Any, ...]] = []
        self.contexts: list[int] = []  # contexts of the calling thread, the current one last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def queued(self) -> int:
        """Return the copies still queued in streams."""
        return sum(len(queue) for queue in self._queued.values())

    def run(self, count: int | None = None) -> None:
        """Execute the next `count` copies of every stream (None: all)."""
        for queue in self._queued.values():
            for _ in range(len(queue) if count is None else min(count, len(queue))):
                queue.popleft()()

    def _done(self, *values: Any) -> tuple[Any, ...]:
        return (self._real.CUresult.CUDA_SUCCESS, *values)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done()

    def cuDeviceGetCount(self) -> tuple[Any, ...]:  # noqa: N802
        return self._done(GPUS)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("device", ordinal))
        return self._done(self._real.CUdevice(ordinal))

    def cuDeviceGetUuid(self, device: Any) -> tuple[Any, ...]:  # noqa: N802
        uuid = self._real.CUuuid()
        ctypes.memmove(uuid.getPtr(), bytes([int(device)] * 16), 16)
        return self._done(uuid)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUcontext(1))

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:  # noqa: N802
        self.contexts.append(int(context))
        return self._done()

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUcontext(self.contexts.pop()))

    def cuGetProcAddress(self, name: bytes, version: int, flags: Any) -> tuple[Any, ...]:  # noqa: N802
        """Return a C function that calls this object's function of that name."""
        method = name.decode()
        popped = (ctypes.c_uint64,) if method == "cuCtxPopCurrent" else ()
        count = {"cuCtxPushCurrent": 1, "cuCtxPopCurrent": 0}.get(method, 4)

        def called(*arguments: int) -> int:
            return int(getattr(self, method)(*arguments[:count])[0])

        self._entry_points.append(ctypes.CFUNCTYPE(ctypes.c_int, *popped, *[ctypes.c_uint64] * count)(called))
        return self._done(ctypes.cast(self._entry_points[-1], ctypes.c_void_p).value, 0)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUstream(self._number()))

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("destroy", stream))
        return self._done()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("synchronise", stream))
        while self._queued[stream]:
            self._queued[stream].popleft()()
        return self._done()

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.contexts == [1]
        self.calls.append(("query", stream))
        busy = bool(self._queued[stream])
        self.run(self.copies_per_query)
        return (self._real.CUresult.CUDA_ERROR_NOT_READY,) if busy else self._done()

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        memory = SharedMemory.create("fake-gpu", size)
        self._memory[memory.address] = memory
        return self._done(self._real.CUdeviceptr(memory.address))

    def cuMemFree(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("free", address))
        self._memory.pop(address).close()
        return self._done()

    def cuMemsetD8(self, address: int, value: int, count: int) -> tuple[Any, ...]:  # noqa: N802
        ctypes.memset(address, value, count)
        return self._done()

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        there, handle = self._memory[address].reference, self._real.CUipcMemHandle()
        packed = struct.pack(_HANDLE, there.pid, there.fd, there.size, there.inode)
        ctypes.memmove(handle.getPtr(), packed, len(packed))
        self.calls.append(("export", address))
        return self._done(handle)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("open", flags))
        packed = ctypes.string_at(handle.getPtr(), struct.calcsize(_HANDLE))
        try:
            there = MemoryReference(*struct.unpack(_HANDLE, packed))
            memory = SharedMemory.open(there, max_size=MAX_BYTES, writable=True)
        except Exception:
            return (self._real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._memory[memory.address] = memory
        return self._done(self._real.CUdeviceptr(memory.address))

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("close", address))
        self._memory.pop(address).close()
        return self._done()

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("to device", target, source, size, stream)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("to host", target, source, size, stream)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("on device", target, source, size, stream)

    def _copy(self, kind: str, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        assert self.contexts == [1]
        self.calls.append((kind, stream, size))
        return self._queue(stream, lambda: ctypes.memmove(target, source, size))

    def _queue(self, stream: int, work: Callable[[], Any]) -> tuple[Any, ...]:
        if self.lazy:
            self._queued[stream].append(work)
        else:
            work()
        return self._done()

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert self.contexts == [1]
        self.calls.append(("load", image))
        number = self._number()
        self._modules[number] = ctypes.CDLL(image.decode())
        return self._done(number)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        number = self._number()
        self._kernels[number] = self._modules[module][f"launch_{name.decode()}"]
        return self._done(number)

    def cuFuncLoad(self, kernel: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done()

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("unload", module))
        del self._modules[module]
        return self._done()

    def cuLaunchKernel(  # noqa: N802
        self, kernel: int, x: int, y: int, z: int, threads: int, threads_y: int, threads_z: int, shared_bytes: int,
        stream: int, parameters: int, extra: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert self.contexts == [1]
        assert (y, z, threads_y, threads_z, shared_bytes, extra) == (1, 1, 1, 1, 0, 0)
        self.calls.append(("launch", stream, x, threads))
        launch = self._kernels[kernel]
        # The driver copies the argument before it returns.
        argument = ctypes.create_string_buffer(ctypes.string_at(ctypes.c_uint64.from_address(parameters).value, 4096))
        return self._queue(stream, lambda: launch(x, threads, argument))

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.contexts == [1]
        self.calls.append(("store", stream, address, value, flags))

        def store() -> None:
            ctypes.c_uint32.from_address(address).value = value

        return self._queue(stream, store)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.contexts == [1]
        self.calls.append(("register", address, size, flags))
        return self._done()

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUdeviceptr(address))

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("unregister", address))
        return self._done()


def from_elsewhere(reference: CudaReference) -> CudaReference:
    """Make a reference appear exported by another process: a real driver opens no handle of its own process."""
    return replace(reference, pid=1)
