"""Memory of weights is moved to huge pages where the kernel can."""

import mmap
import platform
import re
import threading
from pathlib import Path

import pytest

from runtime.retrieval.embedding.huge_pages import THREAD, in_huge_pages

pytestmark = pytest.mark.unit
_SIZE = 16 << 20
_CONTENT = b"x" * _SIZE
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RELEASE = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def _huge_bytes() -> int:
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) << 10


def _wait_until_moved() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def _filled() -> mmap.mmap:
    memory = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE)
    memory.write(_CONTENT)
    return memory


@pytest.mark.skipif(not _THP.exists() or _RELEASE < (6, 1), reason="needs Linux 6.1 with transparent huge pages")
def test_memory_that_is_allocated_inside_is_moved_to_huge_pages_as_it_is_and_other_memory_is_not() -> None:
    other = _filled()
    begin = _huge_bytes()
    with in_huge_pages():
        memory = _filled()
    _wait_until_moved()
    grown = _huge_bytes() - begin
    assert _SIZE - (4 << 20) <= grown <= _SIZE + (4 << 20)
    for one in (memory, other):
        assert one.find(_CONTENT, 0) == 0


def test_a_sparse_array_that_another_thread_allocates_meanwhile_takes_no_more_memory() -> None:
    begin = _huge_bytes()
    with in_huge_pages():
        sparse = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE)
        for at in range(0, _SIZE, 1 << 20):
            sparse[at] = 1
    _wait_until_moved()
    assert _huge_bytes() - begin <= 4 << 20


def test_a_failure_inside_is_raised() -> None:
    with pytest.raises(KeyError), in_huge_pages():
        raise KeyError
