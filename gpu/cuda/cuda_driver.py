"""`Driver` implementation on NVIDIA's driver API (cuda-bindings). The import needs the package, an instance a GPU."""

import contextlib
import ctypes
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gpu.cuda.driver import Argument, Dim, EntryPoints, Loop, PinnedMemory
from gpu.errors import DeviceError, DeviceUnavailable, OutOfDeviceMemory

try:
    from cuda.bindings import driver as cuda
except ImportError as error:
    raise DeviceUnavailable(
        f"a CUDA device needs the extra [cuda], which is not installed ({error}): pip install 'trinity-runtime[cuda]'"
    ) from None

_ORDINAL = re.compile(r"cuda(?::(\d+))?\Z")
# Relaxed captures allow creating a loop body's stream while the outer stream is captured.
_CAPTURE_MODE = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory of a block without an opt-in


def device_count() -> int:
    """Return the number of CUDA devices visible to this process. Raises DeviceUnavailable without a driver."""
    _initialise()
    return int(_call(cuda.cuDeviceGetCount))


def find_device(device: str) -> int:
    """Return the ordinal of a device named "cuda", "cuda:N" or by its UUID. Raises DeviceUnavailable."""
    count = device_count()
    match = _ORDINAL.match(device)
    if match is not None:
        ordinal = int(match[1] or 0)
        if ordinal >= count:
            raise DeviceUnavailable(f"device {device!r}: this process sees {count} CUDA devices")
        return ordinal
    uuids = [_uuid(_call(cuda.cuDeviceGet, ordinal)) for ordinal in range(count)]
    if device in uuids:
        return uuids.index(device)
    raise DeviceUnavailable(
        f"device {device!r} is none of {', '.join(uuids) or 'this machine (it has no CUDA device)'}"
    )


class CudaDriver:
    """One CUDA device, in its primary context. See `Driver`."""

    def __init__(self, device: str = "cuda:0") -> None:
        self._device = _call(cuda.cuDeviceGet, find_device(device))
        self._context = _call(cuda.cuDevicePrimaryCtxRetain, self._device)
        _call(cuda.cuCtxSetCurrent, self._context)
        name: bytes = _call(cuda.cuDeviceGetName, 256, self._device)
        self.name = name.split(b"\0")[0].decode()
        self.uuid = _uuid(self._device)
        attribute = cuda.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.arch = f"sm_{major}{minor}"
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._pinned: dict[int, int] = {}  # device address → host address
        self._bodies: list[int] = []  # streams that capture the bodies of open loops
        self._open = True

    def _attribute(self, attribute: Any) -> int:
        return int(_call(cuda.cuDeviceGetAttribute, attribute, self._device))

    def memory(self) -> tuple[int, int]:
        free, total = _call(cuda.cuMemGetInfo)
        return int(free), int(total)

    def entry_points(self) -> EntryPoints:
        return EntryPoints(*map(_entry_point, ("cuGraphLaunch", "cuLaunchKernel", "cuStreamQuery")))

    def raise_for(self, call: str, code: int) -> NoReturn:
        raise DeviceError(f"{call} failed: {_name(_code(code))}")

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        result = cuda.cuMemAlloc(nbytes)
        if result[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory()
            raise OutOfDeviceMemory(f"{nbytes} bytes are needed, {free} of {total} are free on {self.name}")
        return int(_checked("cuMemAlloc", result))

    def free(self, address: int) -> None:
        _call(cuda.cuMemFree, address)

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        flags = cuda.CU_MEMHOSTALLOC_DEVICEMAP | cuda.CU_MEMHOSTALLOC_PORTABLE
        host = int(_call(cuda.cuMemHostAlloc, nbytes, flags))
        address = int(_call(cuda.cuMemHostGetDevicePointer, host, 0))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
        view[:] = 0
        self._pinned[address] = host
        return PinnedMemory(view, address)

    def free_pinned(self, memory: PinnedMemory) -> None:
        _call(cuda.cuMemFreeHost, self._pinned.pop(memory.address))

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        _call(cuda.cuMemcpyHtoDAsync, address, _host(source), source.nbytes, stream)

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        _call(cuda.cuMemcpyDtoHAsync, _host(target), address, target.nbytes, stream)

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        _call(cuda.cuMemsetD32Async, address, word, count, stream)

    # ---- kernels

    def load_module(self, image: bytes) -> int:
        return int(_call(cuda.cuModuleLoadData, image))

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        function = _call(cuda.cuModuleGetFunction, module, name.encode())
        _call(cuda.cuFuncLoad, function)  # load now: the first launch may be in a capture
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(cuda.cuFuncSetAttribute, function, limit, shared_bytes)
        return int(function)

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        pointers = (ctypes.c_void_p * max(len(arguments), 1))(*map(ctypes.addressof, arguments))
        _call(cuda.cuLaunchKernel, kernel, *grid, *block, shared_bytes, stream, ctypes.addressof(pointers), 0)

    def resident_blocks(self, kernel: int, threads: int, shared_bytes: int) -> int:
        return int(_call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor, kernel, threads, shared_bytes))

    # ---- streams

    def create_stream(self) -> int:
        flag = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(_call(cuda.cuStreamCreate, flag))

    def destroy_stream(self, stream: int) -> None:
        _call(cuda.cuStreamDestroy, stream)

    def idle(self, stream: int) -> bool:
        result = cuda.cuStreamQuery(stream)
        if result[0] == cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _checked("cuStreamQuery", result)
        return True

    def synchronise(self, stream: int) -> None:
        _call(cuda.cuStreamSynchronize, stream)

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        _call(cuda.cuStreamBeginCapture, stream, _CAPTURE_MODE)

    def end_capture(self, stream: int) -> int:
        graph = _call(cuda.cuStreamEndCapture, stream)
        try:
            executable = _call(cuda.cuGraphInstantiate, graph, 0)
        finally:
            _call(cuda.cuGraphDestroy, graph)
        _call(cuda.cuGraphUpload, executable, stream)
        return int(executable)

    def abandon_capture(self, stream: int) -> None:
        for body in (*reversed(self._bodies), stream):
            ended = cuda.cuStreamEndCapture(body)
            if body == stream and ended[0] == cuda.CUresult.CUDA_SUCCESS:
                cuda.cuGraphDestroy(ended[1])
        while self._bodies:
            self.destroy_stream(self._bodies.pop())

    def begin_while(self, stream: int) -> Loop:
        _, _, graph, dependencies, edges, count = _call(cuda.cuStreamGetCaptureInfo, stream)
        default_flag = cuda.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = _call(cuda.cuGraphConditionalHandleCreate, graph, self._context, 1, default_flag)
        parameters = cuda.CUgraphNodeParams()
        parameters.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        parameters.conditional.handle = handle
        parameters.conditional.type = cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        parameters.conditional.size = 1
        parameters.conditional.ctx = self._context
        node = _call(cuda.cuGraphAddNode, graph, dependencies, edges or None, count, parameters)
        replace = cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES.value
        _call(cuda.cuStreamUpdateCaptureDependencies, stream, [node], None, 1, replace)
        body = self.create_stream()
        graph = parameters.conditional.phGraph_out[0]
        _call(cuda.cuStreamBeginCaptureToGraph, body, graph, None, None, 0, _CAPTURE_MODE)
        self._bodies.append(body)
        return Loop(body, int(handle))

    def end_while(self, loop: Loop) -> None:
        _call(cuda.cuStreamEndCapture, loop.stream)  # the loop's node owns the body's graph
        self._bodies.remove(loop.stream)
        self.destroy_stream(loop.stream)

    def replay(self, stream: int, graph: int) -> None:
        _call(cuda.cuGraphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        _call(cuda.cuGraphExecDestroy, graph)

    def close(self) -> None:
        if self._open:
            self._open = False
            _call(cuda.cuDevicePrimaryCtxRelease, self._device)


def _initialise() -> None:
    try:
        result = cuda.cuInit(0)
    except RuntimeError as error:  # the driver library is missing
        raise DeviceUnavailable(f"no CUDA driver on this machine: {error}") from None
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise DeviceUnavailable(f"the CUDA driver does not start: {_name(result[0])}")


def _entry_point(name: str) -> int:
    """Return the address of a driver function in its CUDA 12.0 version."""
    default = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _ = _call(cuda.cuGetProcAddress, name.encode(), 12000, default)
    if not address:
        raise DeviceError(f"the CUDA driver has no {name}")
    return int(address)


def _code(code: int) -> Any:
    """Convert a result code to the bindings' enum, or return the number if it is unknown."""
    try:
        return cuda.CUresult(code)
    except ValueError:
        return code


def _uuid(device: Any) -> str:
    raw = bytes(_call(cuda.cuDeviceGetUuid, device).bytes)
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _host(array: npt.NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise DeviceError(f"an array of shape {array.shape} and strides {array.strides} is not in C order")
    return array.ctypes.data


def _name(code: Any) -> str:
    with contextlib.suppress(Exception):
        return str(cuda.cuGetErrorName(code)[1].decode())
    return str(code)


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver and return its results without the code: None, one value or a tuple. Raises DeviceError."""
    return _checked(function.__name__, function(*arguments))


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """Check the result of a driver call; see `_call`."""
    code, *values = result
    if code != cuda.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{call} failed: {_name(code)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
