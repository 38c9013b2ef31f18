"""A stand-in for `cuda.bindings.driver` as far as `ipc.cuda_memory` uses it: device memory is host memory, streams are
done at once, and every call is written down. Enumerations and handles are the real package's.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt


class FakeCuda:
    """One device. `calls` has each call's name and arguments."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._real = driver
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._next = 100
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _done(self, *values: Any) -> tuple[Any, ...]:
        return (self._real.CUresult.CUDA_SUCCESS, *values)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done()

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUdevice(ordinal))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUcontext(1))

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._done()

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._real.CUstream(self._number()))

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("destroy", stream))
        return self._done()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("synchronise", stream))
        return self._done()

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        memory = np.empty(size, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return self._done(self._real.CUdeviceptr(memory.ctypes.data))

    def cuMemFree(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("free", address))
        return self._done()

    def cuMemsetD8(self, address: int, value: int, count: int) -> tuple[Any, ...]:  # noqa: N802
        ctypes.memset(address, value, count)
        return self._done()

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        handle = self._real.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), address.to_bytes(8, "little"), 8)
        self.calls.append(("export", address))
        return self._done(handle)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("open", flags))
        return self._done(self._real.CUdeviceptr(int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little")))

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("close", address))
        return self._done()

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("to device", target, source, size, stream)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("to host", target, source, size, stream)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return self._copy("on device", target, source, size, stream)

    def _copy(self, kind: str, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        self.calls.append((kind, stream, size))
        ctypes.memmove(target, source, size)
        return self._done()

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("store", stream, address, value, flags))
        ctypes.c_uint32.from_address(address).value = value
        return self._done()

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(("wait", stream, address, value, flags))
        assert (ctypes.c_uint32.from_address(address).value - value) % 2**32 < 2**31, "this would wait for ever here"
        return self._done()
