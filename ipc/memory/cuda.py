"""`DeviceMemory` in a GPU's memory, shared through CUDA IPC. Requires the extra [cuda].

One process allocates and exports, others open. CUDA's rules: the exporting process cannot open its own handle; freeing
before the last importer has closed is undefined; a handle is invalid after its exporter has ended (detected by the
arena's epoch); memory of a stream-ordered or virtual allocator cannot be exported this way, so this uses cuMemAlloc. It
is allocated in whole pages of the device, because a handle exposes all pages that the memory shares, with all other
allocations in them. A handle may belong to a GPU that CUDA_VISIBLE_DEVICES hides from the importer, which reaches it as
a peer of its own GPU (documented for cudaIpcOpenMemHandle, and used by UCX). Both processes must be in one PID
namespace, and MIG devices have no CUDA IPC.
"""

import contextlib
import ctypes
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from ipc.errors import InvalidArgument, MemoryRefused
from ipc.memory.device import HANDLE_BYTES, MAX_BYTES, CudaReference, DeviceSpan
from ipc.memory.driver_calls import DriverCalls

try:
    from cuda.bindings import driver as _cuda
except ImportError as error:
    raise MemoryRefused(f"GPU memory needs the extra [cuda], which is not installed: {error}") from None

_PAGE = 2 << 20  # bytes: the unit in which a device's memory is mapped, and so shared


class CudaMemory:
    """`DeviceMemory` of a GPU, with operations queued on its own `stream` in the device's primary context.

    Every call restores the calling thread's current context, on which other libraries rely.
    """

    def __init__(self, cuda: Any, device: int, context: Any, address: int, size: int, *, exported: bool) -> None:
        """Use `create` or `open`, which call this in the device's context."""
        self._cuda, self._device, self._context = cuda, device, context
        self._address, self.size, self._exported = address, size, exported
        self._open = True
        self._registered: list[int] = []  # addresses of host memory
        self._modules: list[Any] = []
        self._kernels: dict[str, Any] = {}
        flag = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self.stream = int(_call(cuda, "cuStreamCreate", flag))
        self._calls = DriverCalls(cuda, int(context), self.stream)

    @classmethod
    def create(cls, size: int, device: str, cuda: Any = _cuda) -> "CudaMemory":
        """Create `size` bytes of zeros on "cuda", "cuda:N" or a GPU's UUID. Raises MemoryRefused, InvalidArgument."""
        if not 1 <= size <= MAX_BYTES:
            raise InvalidArgument(f"size must be within 1..{MAX_BYTES} bytes, got {size}")
        ordinal, context = _primary(cuda, device)
        with _current(cuda, context):
            address = int(_call(cuda, "cuMemAlloc", -(-size // _PAGE) * _PAGE))
            _call(cuda, "cuMemsetD8", address, 0, size)
            # The memset is on the legacy stream, with which non-blocking streams do not synchronize.
            _call(cuda, "cuStreamSynchronize", 0)
            return cls(cuda, ordinal, context, address, size, exported=True)

    @classmethod
    def open(cls, reference: CudaReference, device: str, cuda: Any = _cuda) -> "CudaMemory":
        """Open another process's memory, on any GPU, from `device` ("cuda", "cuda:N", a UUID). Raises MemoryRefused."""
        if reference.pid == os.getpid():
            raise MemoryRefused("a process cannot open the GPU memory that it exported itself")
        ordinal, context = _primary(cuda, device)
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), reference.handle, HANDLE_BYTES)
        lazily = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        with _current(cuda, context):
            address = int(_call(cuda, "cuIpcOpenMemHandle", handle, lazily))
            return cls(cuda, ordinal, context, address, reference.size, exported=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as an array of bytes (CUDA Array Interface, version 3). It must not be used after `close`."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address, False), "strides": None, "version": 3}

    @property
    def address(self) -> int:
        """Device address of the memory's first byte in this process."""
        return self._address

    @property
    def reference(self) -> CudaReference:
        if not self._exported or not self._open:
            raise MemoryRefused("only the creator of a memory has a reference to it, until it closes it")
        with self._here():
            handle = _call(self._cuda, "cuIpcGetMemHandle", self._address)
        raw = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return CudaReference(os.getpid(), f"cuda:{self._device}", raw, self.size)

    def _here(self) -> contextlib.AbstractContextManager[None]:
        return _current(self._cuda, self._context)

    def write(self, offset: int, source: npt.NDArray[Any]) -> None:
        target = self._address + offset
        with self._here():
            _call(self._cuda, "cuMemcpyHtoDAsync", target, source.ctypes.data, source.nbytes, self.stream)

    def send(self, offset: int, source: DeviceSpan, word: int, value: int) -> None:
        self._calls.copy_then_store(self._address + offset, source.address, source.nbytes, word, value)

    def read(self, offset: int, target: npt.NDArray[Any]) -> None:
        source = self._address + offset
        with self._here():
            _call(self._cuda, "cuMemcpyDtoHAsync", target.ctypes.data, source, target.nbytes, self.stream)

    def load(self, image: bytes, name: str) -> None:
        """Load the kernel `name` of a cubin for `launch`. Raises MemoryRefused."""
        with self._here():
            module = _call(self._cuda, "cuModuleLoadData", image)
            self._modules.append(module)
            kernel = self._kernels[name] = _call(self._cuda, "cuModuleGetFunction", module, name.encode())
            _call(self._cuda, "cuFuncLoad", kernel)  # not at the first launch, which would wait for it

    def launch(self, name: str, blocks: int, threads: int, argument: ctypes.Structure) -> None:
        """Queue a loaded kernel, with one argument that is passed by value."""
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(argument))  # ends with a null pointer
        shape = (blocks, 1, 1, threads, 1, 1, 0)
        with self._here():
            address = ctypes.addressof(pointers)
            _call(self._cuda, "cuLaunchKernel", self._kernels[name], *shape, self.stream, address, 0)

    def reach(self, address: int, nbytes: int) -> int:
        cuda = self._cuda
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._here():
            _call(cuda, "cuMemHostRegister", address, nbytes, flags)
            self._registered.append(address)
            return int(_call(cuda, "cuMemHostGetDevicePointer", address, 0))

    def flush(self) -> None:
        with self._here():
            _call(self._cuda, "cuStreamSynchronize", self.stream)

    def idle(self) -> bool:
        if not self._open:
            return True  # `close` has waited
        with self._here():
            (code,) = self._cuda.cuStreamQuery(self.stream)
        if code not in (self._cuda.CUresult.CUDA_SUCCESS, self._cuda.CUresult.CUDA_ERROR_NOT_READY):
            raise MemoryRefused(f"cuStreamQuery failed: {code}")
        return bool(code == self._cuda.CUresult.CUDA_SUCCESS)

    def close(self) -> None:
        """Waits for the queue, then frees the memory."""
        if not self._open:
            return
        self._open = False
        with self._here():
            with contextlib.suppress(MemoryRefused):  # a device fault must not keep the memory
                _call(self._cuda, "cuStreamSynchronize", self.stream)
            _call(self._cuda, "cuStreamDestroy", self.stream)
            for module in self._modules:
                _call(self._cuda, "cuModuleUnload", module)
            for address in self._registered:
                _call(self._cuda, "cuMemHostUnregister", address)
            if self._exported:
                _call(self._cuda, "cuMemFree", self._address)
            else:
                _call(self._cuda, "cuIpcCloseMemHandle", self._address)


def architecture(device: str) -> str:
    """Return what to compile kernels for on a device, such as "sm_90". Raises MemoryRefused."""
    handle = _call(_cuda, "cuDeviceGet", _primary(_cuda, device)[0])
    attribute = _cuda.CUdevice_attribute
    numbers = (
        int(_call(_cuda, "cuDeviceGetAttribute", which, handle))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return "sm_{}{}".format(*numbers)


@contextlib.contextmanager
def _current(cuda: Any, context: Any) -> Iterator[None]:
    _call(cuda, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        cuda.cuCtxPopCurrent()


def _primary(cuda: Any, device: str) -> tuple[int, Any]:
    """Return a device's ordinal and its primary context, which the CUDA runtime and libraries based on it use too."""
    try:
        _call(cuda, "cuInit", 0)
    except RuntimeError as error:  # libcuda is missing
        raise MemoryRefused(f"this machine has no CUDA driver: {error}") from None
    ordinal = _ordinal(cuda, device)
    handle = _call(cuda, "cuDeviceGet", ordinal)
    context = _call(cuda, "cuDevicePrimaryCtxRetain", handle)
    return ordinal, context


def _ordinal(cuda: Any, device: str) -> int:
    count = int(_call(cuda, "cuDeviceGetCount"))
    for ordinal in range(count):
        if device == f"cuda:{ordinal}" or (device == "cuda" and ordinal == 0):
            return ordinal
        handle = _call(cuda, "cuDeviceGet", ordinal)
        raw = bytes(_call(cuda, "cuDeviceGetUuid", handle).bytes)
        if device == f"GPU-{uuid.UUID(bytes=raw)}":
            return ordinal
    raise MemoryRefused(f"{device!r} is not among the {count} GPUs visible to this process")


def _call(cuda: Any, name: str, *arguments: Any) -> Any:
    """Call a driver function and return its result. Raises MemoryRefused for an error code."""
    code, *values = getattr(cuda, name)(*arguments)
    if code != cuda.CUresult.CUDA_SUCCESS:
        raise MemoryRefused(f"{name} failed: {code}")
    return values[0] if values else None
