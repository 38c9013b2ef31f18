"""Huge pages for weights, which every forward pass reads: in pages of 4 KiB they need more translations of addresses
than a processor keeps, so that a pass waits for them, and so does what the core computes next."""

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1


THREAD = "huge_pages"
"""Name of the thread that moves memory, which takes half a second of a core for 120 MiB: no start waits for it."""


@contextlib.contextmanager
def in_huge_pages() -> Iterator[None]:
    """Move memory that this process allocates meanwhile, and still has at the end, to pages of 2 MiB, on a thread that
    starts then. What fills less than half of one stays where it is, and all of it if the kernel cannot."""
    before = _pages()
    yield
    with contextlib.suppress(RuntimeError):  # the system permits no more threads
        threading.Thread(target=_move, args=(_pages() - before,), name=THREAD, daemon=True).start()


def _move(pages: set[int]) -> None:
    libc, resident = ctypes.CDLL(None), (ctypes.c_ubyte * (_PAGE // mmap.PAGESIZE))()
    for page in pages:
        span = ctypes.c_void_p(page * _PAGE), ctypes.c_size_t(_PAGE)
        # Of a sparse array, which another thread may have allocated, each page written would take 2 MiB.
        if libc.mincore(*span, resident) == 0 and sum(one & 1 for one in resident) >= len(resident) // 2:
            libc.madvise(*span, _COLLAPSE)


def _pages() -> set[int]:
    """Return the numbers of the whole pages of 2 MiB in the writable memory that is of no file."""
    pages: set[int] = set()
    with contextlib.suppress(OSError):  # not Linux
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        for addresses, access, _, _, inode, *_ in map(str.split, maps.splitlines()):
            if access == "rw-p" and inode == "0":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                pages.update(range(-(-begin // _PAGE), end // _PAGE))
    return pages
