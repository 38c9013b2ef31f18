"""The lock of a live collection's one writer."""

import contextlib
import fcntl
import os
from pathlib import Path

from runtime.errors import CollectionBusy
from runtime.retrieval.live.disk import storage_error

LOCK = "writer.lock"


def locked(directory: Path) -> int:
    """The descriptor that holds the writer's lock, which goes with this process.

    Raises `CollectionBusy` if another process has it.
    """
    path = directory / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be opened") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):
            os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(fd, 64, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise CollectionBusy(f"{directory} is written to by {owner}; only one process may") from error
    except OSError as error:
        os.close(fd)
        raise storage_error(error, f"{path} cannot be locked") from error
    return fd


def holds(fd: int, directory: Path) -> bool:
    """Whether a lock is still that of what is at `directory`, which may have been replaced or moved."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(directory / LOCK))
    except OSError:
        return False
