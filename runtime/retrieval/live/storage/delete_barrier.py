"""Barrier of deletes: the writer acknowledges a delete once every process that serves the collection has applied it.

Each serving process has a file in `served/`, which it locks while it serves, with the sequence number of the first
record that it has not applied: eight bytes, mapped by both sides. An unlocked file belongs to a killed
process.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from runtime.errors import Unavailable
from runtime.retrieval.live.storage.disk import storage_error

WAIT_S = 10.0
"""Timeout of a delete. The supervisor kills a pool that stalls for this long."""
_POLL_S = 0.0005
_BYTES = 8
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class ReaderPosition:
    """Published log position of this process, which serves the collection in a directory.

    If the directory is read-only for this process, nothing is published, and writers do not wait for it.
    """

    def __init__(self, directory: Path) -> None:
        """Register with no records applied: read the log afterwards, then `publish`. Raises `CollectionError`."""
        self._map: mmap.mmap | None = None
        folder, name = directory / "served", f"{os.getpid()}-{secrets.token_hex(8)}"
        temporary = folder / f".{name}"
        self._path = folder / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in _READ_ONLY:
                return
            raise storage_error(error, f"{temporary} cannot be written") from error
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # locked before the rename: a writer never sees it unlocked
            os.ftruncate(fd, _BYTES)
            self._map = mmap.mmap(fd, _BYTES)
            os.rename(temporary, self._path)
        except OSError as error:
            os.close(fd)
            self._map = None
            raise storage_error(error, f"{temporary} cannot be written") from error

    def publish(self, sequence: int) -> None:
        """Report that every search from now on reflects the records before this one."""
        if self._map is not None:
            with memoryview(self._map).cast("q") as words:
                words[0] = sequence

    def close(self) -> None:
        """Unregister this process. Idempotent."""
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._map.close()
            self._map = None
            os.close(self._fd)


class DeleteBarrier:
    """The writer's view of the processes that serve its collection. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._clock, self._sleep = directory / "served", clock, sleep

    def wait(self, sequence: int) -> None:
        """Wait until all of them have applied the records before this one. Raises `Unavailable` after `WAIT_S`."""
        until = self._clock() + WAIT_S
        while behind := self._behind(sequence):
            if self._clock() >= until:
                raise Unavailable(
                    f"the delete is stored, but process {behind.partition('-')[0]} that serves {self._folder.parent} "
                    f"has not applied it within {WAIT_S:g} s: until it does, its searches may find deleted documents"
                )
            self._sleep(_POLL_S)

    def _behind(self, sequence: int) -> str:
        """Return the file name of a process that has not applied the records before this one; "" if all have."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return ""
        return next((name for name in names if name[0] != "." and self._is_behind(self._folder / name, sequence)), "")

    @staticmethod
    def _is_behind(path: Path, sequence: int) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            position = os.pread(fd, _BYTES, 0)
            if len(position) == _BYTES and int.from_bytes(position, "little", signed=True) >= sequence:
                return False
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # unlocked: its process was killed
            path.unlink()
        return False
