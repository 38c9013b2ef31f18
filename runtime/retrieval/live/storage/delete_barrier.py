"""How far the processes that serve a live collection have come: a delete is acknowledged when none finds it any more.

Each has a file in `served/`, locked for as long as it serves, with the number of the first record that it has not
applied: eight bytes, mapped by both sides. A file that nobody has locked is of a process that was killed.
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
"""So long a delete waits; a pool that does nothing for as long is killed by its supervisor."""
_LOOK_S = 0.0005
_BYTES = 8
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class ReaderPosition:
    """This process serves the collection in a directory. Where it may not write, writers do not wait for it."""

    def __init__(self, directory: Path) -> None:
        """Raises `CollectionError`. It has applied nothing: read the log then, and `publish`."""
        self._map: mmap.mmap | None = None
        folder, name = directory / "served", f"{os.getpid()}-{secrets.token_hex(8)}"
        made = folder / f".{name}"
        self._path = folder / name
        try:
            folder.mkdir(exist_ok=True)
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in _READ_ONLY:
                return
            raise storage_error(error, f"{made} cannot be written") from error
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # before it has its name: whoever sees it sees it locked
            os.ftruncate(fd, _BYTES)
            self._map = mmap.mmap(fd, _BYTES)
            os.rename(made, self._path)
        except OSError as error:
            os.close(fd)
            self._map = None
            raise storage_error(error, f"{made} cannot be written") from error

    def publish(self, sequence: int) -> None:
        """The records before this one show in every search that begins from now on."""
        if self._map is not None:
            with memoryview(self._map).cast("q") as words:
                words[0] = sequence

    def close(self) -> None:
        """It serves the collection no more. Idempotent."""
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._map.close()
            self._map = None
            os.close(self._fd)


class DeleteBarrier:
    """The processes that serve a collection, for its writer. Any number of threads may wait."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._clock, self._sleep = directory / "served", clock, sleep

    def wait(self, sequence: int) -> None:
        """Until all of them have applied the records before this one. Raises `Unavailable` after `WAIT_S`."""
        until = self._clock() + WAIT_S
        while behind := self._behind(sequence):
            if self._clock() >= until:
                raise Unavailable(
                    f"it is stored, but process {behind.partition('-')[0]} serves {self._folder.parent} and has not "
                    f"taken it in for {WAIT_S:g} s: until then its searches may find what was deleted"
                )
            self._sleep(_LOOK_S)

    def _behind(self, sequence: int) -> str:
        """One that has not applied the records before this one; "" if there is none."""
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
            told = os.pread(fd, _BYTES, 0)
            if len(told) == _BYTES and int.from_bytes(told, "little", signed=True) >= sequence:
                return False
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # its process is gone
            path.unlink()
        return False
