"""Shared memory of one user's processes on one host: sealed memfds, which have no names and leave no files.

A process shares its memory by sending (pid, fd); the other opens `/proc/PID/fd/FD`, which the kernel allows for the
same user only. The seals forbid to shrink, grow or unseal it, so a peer cannot cause a SIGBUS here, and the inode
confirms that the descriptor still refers to the announced memory. Both processes must see the same `/proc` (one PID
namespace).
"""

import contextlib
import fcntl
import mmap
import os
from typing import Annotated

import msgspec
import numpy as np

from ipc.errors import InvalidArgument, MemoryRefused

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; the fcntl module does not have it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


Pid = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
"""A process id received from a peer."""


class MemoryReference(msgspec.Struct, frozen=True):
    """Reference to shared memory for another process, valid while its creator holds the memory."""

    pid: Pid
    fd: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    size: int
    inode: int


class SharedMemory:
    """A mapping of a sealed memfd. `view` is its memoryview, `address` where it is mapped.

    Use `create` or `open`; `close` releases descriptor and mapping (memoryviews and arrays of it keep the mapping until
    they are freed).
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self._fd = -1  # the creator's descriptor, which others open; the mmap object has its own
        self._open = True
        self._inode = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self.size = size
        self.view = memoryview(self._map)
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    @classmethod
    def create(cls, name: str, size: int, *, peers_write: bool = True) -> "SharedMemory":
        """Create `size` bytes of zeros. With `peers_write=False` no other process can map it writable.

        `name` only appears in /proc/PID/maps. Raises `InvalidArgument` for a size below 1.
        """
        if size < 1:
            raise InvalidArgument(f"size must be at least 1 byte, got {size}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            memory = cls(fd, size, writable=True)
            # This writable mapping already exists; FUTURE_WRITE forbids all later ones.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (0 if peers_write else _F_SEAL_FUTURE_WRITE))
            memory._fd = fd
        except BaseException:
            os.close(fd)
            raise
        return memory

    @classmethod
    def open(cls, reference: MemoryReference, *, max_size: int, writable: bool = False) -> "SharedMemory":
        """Map memory of another process, or of this one, after checking seals, size and identity.

        Raises `MemoryRefused` if the creator is gone or another user's, or the memory is not sealed, not of the
        announced size, over `max_size` bytes, or not the announced one.
        """
        if not 1 <= reference.size <= max_size:
            raise MemoryRefused(f"announced size {reference.size} is not within 1..{max_size} bytes")
        mode = os.O_RDWR if writable else os.O_RDONLY
        where = f"fd {reference.fd} of process {reference.pid}"
        try:
            # O_NONBLOCK: opening a descriptor that is not a memfd, such as a pipe, must not block.
            fd = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise MemoryRefused(f"cannot open {where}: {error.strerror}") from error
        try:
            cls._check(fd, reference, where)
            return cls(fd, reference.size, writable=writable)
        except OSError as error:
            raise MemoryRefused(f"cannot map {where}: {error}") from error
        finally:
            os.close(fd)

    @staticmethod
    def _check(fd: int, reference: MemoryReference, where: str) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:  # not a memfd at all
            raise MemoryRefused(f"{where} is no memfd") from error
        if seals & _SEALS != _SEALS:
            raise MemoryRefused(f"{where} lacks seals: has {seals:#x}, needs {_SEALS:#x}")
        status = os.fstat(fd)
        if status.st_size != reference.size:
            raise MemoryRefused(f"announced size {reference.size} bytes, found {status.st_size}")
        if status.st_ino != reference.inode:
            raise MemoryRefused(f"{where} is not the announced memory")

    @property
    def reference(self) -> MemoryReference:
        """Reference for a process that is to `open` this. Raises `MemoryRefused` unless created here and not closed."""
        if self._fd < 0:
            raise MemoryRefused("only the creator of a memory has a reference to it, until it closes it")
        return MemoryReference(os.getpid(), self._fd, self.size, self._inode)

    @property
    def closed(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        # Exported arrays keep the mapping until the last of them is freed.
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def __enter__(self) -> "SharedMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
