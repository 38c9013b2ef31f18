"""The writes that must survive a power cut: each is there for certain only when its file, or directory, is synced."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from runtime.errors import CollectionBusy, CollectionError, NoRoom
from runtime.retrieval.collections.directory import NO_ROOM

_OWNER = "process "
_LEFTOVER_S = 2.0
"""A child that a killed writer had just forked holds its lock until it has become another program."""
_LOOK_S = 0.01


class Disk:
    """The file system. Tests have one that forgets what was not synced."""

    def write(self, fd: int, content: bytes) -> None:
        """Append all of it. Raises `OSError` with part of it written."""
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory last."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, path: Path, content: bytes) -> None:
        """A whole new file under this name, which lasts, or the file that was there."""
        part = path.with_name(f".{path.name}.part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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
        """Make everything in a directory last, but not its own name."""
        for path in sorted(directory.rglob("*"), reverse=True):
            if path.is_dir():
                self.sync_directory(path)
            else:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self.sync(fd)
                finally:
                    os.close(fd)
        self.sync_directory(directory)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory, if it is there; what cannot be removed is left."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def storage_error(error: OSError, what: str) -> CollectionError:
    """`NoRoom` where there is too little room, else `CollectionError`."""
    kind = NoRoom if error.errno in NO_ROOM else CollectionError
    return kind(f"{what}: {error.strerror or error}")


# ---- the lock of a live collection's one writer


LOCK = "writer.lock"


def acquire_lock(directory: Path, sleep: Callable[[float], None] = time.sleep) -> int:
    """The descriptor that holds the writer's lock, which goes with this process.

    Raises `CollectionBusy` if another process has it.
    """
    path = directory / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be opened") from error
    tries = int(_LEFTOVER_S / _LOOK_S)
    try:
        while not _taken(fd):
            owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
            if tries == 0 or _runs(owner):
                raise CollectionBusy(f"{directory} is written to by {owner or 'another process'}; only one process may")
            tries -= 1
            sleep(_LOOK_S)
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):
            os.pwrite(fd, f"{_OWNER}{os.getpid()}\n".encode(), 0)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise storage_error(error, f"{path} cannot be locked") from error
        raise
    return fd


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(owner: str) -> bool:
    """Whether the process that a lock names is there, as far as can be told."""
    pid = owner.removeprefix(_OWNER)
    if pid.isdecimal():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            pass
    return True


def lock_is_current(fd: int, directory: Path) -> bool:
    """Whether a lock is still that of what is at `directory`, which may have been replaced or moved."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(directory / LOCK))
    except OSError:
        return False
