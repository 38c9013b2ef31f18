"""Durable writes: a write survives a power failure only once its file and, for a new name, its directory are synced."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.errors import CollectionBusy, CollectionError, NoRoom
from runtime.files import open_regular

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# SQLite reports SQLITE_FULL for a full disk only; an exceeded quota or file size limit is a failed write.
_SQLITE_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
_NUMPY_NO_ROOM = re.compile(r"\d+ requested and \d+ written")  # has no errno


class Disk:
    """File system operations. Tests substitute one that loses unsynced data."""

    def write(self, fd: int, content: bytes) -> None:
        """Append all content. Raises `OSError`, with part of it written."""
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file, which is appended to there."""
        os.ftruncate(fd, size)
        os.lseek(fd, size, os.SEEK_SET)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Sync the names in a directory."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file durably and atomically: after a crash it is the new file or the old one."""
        part = path.with_name(f".{path.name}.part")
        try:
            fd = open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                self.write(fd, content)
                self.sync(fd)
            finally:
                os.close(fd)
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self.sync_directory(path.parent)

    def sync_tree(self, directory: Path) -> None:
        """Sync all files and directories in a directory, but not its own name."""
        for path in sorted(directory.rglob("*"), reverse=True):
            if path.is_dir():
                self.sync_directory(path)
            else:
                fd = open_regular(path)
                try:
                    self.sync(fd)
                finally:
                    os.close(fd)
        self.sync_directory(directory)

    def remove(self, path: Path) -> None:
        """Remove a file or directory, if it exists, ignoring errors."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def storage_error(error: OSError | sqlite3.Error | MemoryError, message: str) -> CollectionError:
    """Convert to `NoRoom` if the disk, a quota or memory is exhausted, else `CollectionError`."""
    match error:
        case OSError():
            short = _NUMPY_NO_ROOM.fullmatch(str(error)) is not None
            full = error.errno in _NO_ROOM or short
            reason = f"{message}: {f'no room for a file: {error} bytes' if short else error.strerror or error}"
            known = error.filename is None or str(error.filename) in message
            return (NoRoom if full else CollectionError)(reason if known else f"{reason}: {error.filename}")
        case sqlite3.Error():
            full = getattr(error, "sqlite_errorcode", None) in _SQLITE_NO_ROOM
            return (NoRoom if full else CollectionError)(f"{message}: {error}")
    return NoRoom(f"{message}: not enough memory")


@contextlib.contextmanager
def storage_errors(message: str) -> Iterator[None]:
    """Raise errors of the file system, of SQLite and of memory as `storage_error`."""
    try:
        yield
    except (OSError, sqlite3.Error, MemoryError) as error:
        raise storage_error(error, message) from error


# ---- the writer's lock of a collection


LOCK = "writer.lock"
_WAIT_S = 0.5
"""A child that a killed writer had just forked holds its lock until it calls exec."""
_RETRY_S = 0.01


def acquire_lock(directory: Path, sleep: Callable[[float], None] = time.sleep) -> int:
    """Acquire the writer's lock; return its descriptor. The lock ends with this process.

    Raises `CollectionBusy` if another process holds it, after half a second.
    """
    path = directory / LOCK
    with storage_errors(f"{path} cannot be locked"):
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        tries = round(_WAIT_S / _RETRY_S)
        try:
            while not _try_lock(fd):
                tries -= 1
                if not tries:
                    owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
                    raise CollectionBusy(f"{directory} has a writer already: {owner or 'another process'}")
                sleep(_RETRY_S)
            os.ftruncate(fd, 0)
            with contextlib.suppress(OSError):
                os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
    return fd


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Hold the writer's lock. Raises `CollectionBusy`, and `CollectionError` if there is no directory."""
    if not directory.is_dir():
        raise CollectionError(f"there is no collection at {directory}")
    lock = acquire_lock(directory)
    try:
        yield
    finally:
        os.close(lock)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_is_current(fd: int, directory: Path) -> bool:
    """Return whether a lock belongs to the present `directory`, which may have been replaced or moved."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(directory / LOCK))
    except OSError:
        return False
