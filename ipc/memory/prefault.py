"""Page tables filled ahead of use.

The first touch of a mapped page is a fault, and a copy of a few MiB out of another process's memory spends half its
time on them. A thread of low priority takes them all once, when the memory is mapped; what it has not reached yet
still works, by faults.
"""

import ctypes
import os
import threading

_MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14; an older kernel refuses it and nothing is filled
_CHUNK_BYTES = 4 << 20  # one call; the process can map nothing else meanwhile

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefault:
    """Fills the page tables of `size` bytes from `address` on, a page's begin. `close` it before they are unmapped."""

    def __init__(self, address: int, size: int) -> None:
        self._closing = threading.Event()
        self._filled = False
        self._thread = threading.Thread(target=self._run, args=(address, size), name="prefault", daemon=True)
        self._thread.start()

    def _run(self, address: int, size: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for begin in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - begin)
            if self._closing.is_set() or _libc.madvise(address + begin, length, _MADV_POPULATE_READ) != 0:
                return
        self._filled = True

    def wait(self, timeout_s: float) -> bool:
        """Whether all of them are filled, within that time; False too if the kernel cannot."""
        self._thread.join(timeout_s)
        return self._filled

    def close(self) -> None:
        """Stop; returns within one call to the kernel. Idempotent."""
        self._closing.set()
        self._thread.join()
