"""Tests of shared memory: sealed, passed by (pid, fd), validated before it is mapped."""

import os
import tempfile

import pytest
from msgspec.structs import replace

from ipc import MemoryReference, MemoryRefused, SharedMemory
from tests.ipc.processes import as_root, become_another_user, child, succeeded


def _write_a_greeting(reference: MemoryReference) -> None:
    with SharedMemory.open(reference, max_size=1 << 20, writable=True) as memory:
        memory.view[:5] = b"hello"


def test_another_process_writes_into_the_same_memory() -> None:
    with SharedMemory.create("test", 4096) as memory:
        with child(_write_a_greeting, memory.reference) as process:
            assert succeeded(process)
        assert bytes(memory.view[:6]) == b"hello\0"


def test_memory_that_peers_may_not_write_cannot_be_opened_writable() -> None:
    with SharedMemory.create("test", 4096, peers_write=False) as memory:
        memory.view[0] = 7
        with SharedMemory.open(memory.reference, max_size=4096) as opened:
            assert opened.view[0] == 7
            assert opened.view.readonly
        with pytest.raises(MemoryRefused, match="cannot map"):
            SharedMemory.open(memory.reference, max_size=4096, writable=True)


def test_sealed_memory_cannot_be_shrunk() -> None:
    with SharedMemory.create("test", 4096) as memory:
        fd = os.open(f"/proc/self/fd/{memory.reference.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


MISSING = (("pid", 0), ("pid", -1), ("pid", 1 << 22), ("fd", -1), ("fd", 1 << 30))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({"size": size}, rf"{size} is not within 1\.\.8192") for size in (0, -1, 8193, 1 << 62)),
        ({"size": 8192}, "announced size 8192 bytes, found 4096"),
        ({"inode": 1}, "is not the announced memory"),  # the descriptor has been reused
        *(({key: number}, "cannot open") for key, number in MISSING),
    ],
    ids=str,
)
def test_a_reference_that_is_not_the_memorys_is_rejected(changed: dict[str, int], words: str) -> None:
    with SharedMemory.create("test", 4096) as memory, pytest.raises(MemoryRefused, match=words):
        SharedMemory.open(replace(memory.reference, **changed), max_size=8192)


def test_unsealed_memory_is_rejected() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(MemoryRefused, match="lacks seals"):
            SharedMemory.open(MemoryReference(os.getpid(), fd, 4096, os.fstat(fd).st_ino), max_size=4096)
    finally:
        os.close(fd)


def test_a_plain_file_or_a_pipe_is_rejected() -> None:
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryFile() as file:
            for fd in (file.fileno(), reader, writer):
                with pytest.raises(MemoryRefused):
                    SharedMemory.open(MemoryReference(os.getpid(), fd, 4096, 1), max_size=4096)
    finally:
        os.close(reader)
        os.close(writer)


def _open_as_another_user(reference: MemoryReference) -> None:
    become_another_user()
    with pytest.raises(MemoryRefused):
        SharedMemory.open(reference, max_size=4096)


@as_root
def test_another_user_cannot_open_the_memory() -> None:
    with SharedMemory.create("test", 4096) as memory, child(_open_as_another_user, memory.reference) as process:
        assert succeeded(process)
