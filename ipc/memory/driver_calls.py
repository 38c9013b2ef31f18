"""A copy to GPU memory and the store of a word behind it as one compiled call, which calls the driver by address.

From Python each driver call builds objects for its arguments and its result; six of them took 62 µs on an H200's host.
A client cannot write there without the driver: CUDA IPC maps the memory for GPUs, not for processors.
"""

import contextlib
from typing import Any

import numpy as np

from ipc.errors import MemoryRefused
from ipc.native.compiled import EntryPoints
from ipc.native.intrinsics import call

# Words of a table. CONTEXT, STREAM: handles. POPPED: address of a word for the context that was popped. The others:
# addresses of the driver's functions.
(CONTEXT, STREAM, POPPED, PUSH, POP, COPY, STORE) = range(7)
_FUNCTIONS = ("cuCtxPushCurrent", "cuCtxPopCurrent", "cuMemcpyDtoDAsync", "cuStreamWriteValue32")
_ABI = 12000  # the functions in their CUDA 12.0 version
_CODE_BITS = 32
entry_point = EntryPoints(globals())


class DriverCalls:
    """The calls of one stream. Not thread-safe."""

    def __init__(self, cuda: Any, context: int, stream: int) -> None:
        """Raises MemoryRefused if the driver lacks a function."""
        self._cuda, self._popped = cuda, np.zeros(1, np.int64)
        addresses = (_entry_point(cuda, name) for name in _FUNCTIONS)
        self._table = np.array([context, stream, self._popped.ctypes.data, *addresses], np.int64)

    def copy_then_store(self, target: int, source: int, nbytes: int, word: int, value: int) -> None:
        """Queue a copy between GPU memories, then a store of a uint32.

        SYNC POINT: the store is a barrier for the stream's earlier writes, system-wide. Raises MemoryRefused.
        """
        failed = _copy_then_store(self._table, target, source, nbytes, word, value)
        if failed:
            name, code = _FUNCTIONS[(failed >> _CODE_BITS) - PUSH], failed & 0xFFFFFFFF
            with contextlib.suppress(ValueError):  # a code that the bindings do not know
                code = self._cuda.CUresult(code)
            raise MemoryRefused(f"{name} failed: {code}")


@entry_point(f"int64(int64[::1], {'int64, ' * 4}int64)")
def _copy_then_store(table: Any, target: int, source: int, nbytes: int, word: int, value: int) -> int:
    """Return 0, or the word of the function that failed and its code, below."""
    code = call(table[PUSH], (table[CONTEXT],)) & 0xFFFFFFFF  # the driver returns 32 bits
    if code:
        return PUSH << _CODE_BITS | code
    called = COPY
    code = call(table[called], (target, source, nbytes, table[STREAM])) & 0xFFFFFFFF
    if code == 0:
        called = STORE
        code = call(table[STORE], (table[STREAM], word, value, 0)) & 0xFFFFFFFF  # 0: with the barrier
    call(table[POP], (table[POPPED],))  # other libraries rely on the thread's context
    return called << _CODE_BITS | code if code else 0


def _entry_point(cuda: Any, name: str) -> int:
    default = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    code, address, _ = cuda.cuGetProcAddress(name.encode(), _ABI, default)
    if code != cuda.CUresult.CUDA_SUCCESS or not address:
        raise MemoryRefused(f"the CUDA driver has no {name}: {code}")
    return int(address)


entry_point.compile()
