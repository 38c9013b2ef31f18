"""Barrier of writes: the writer acknowledges a write when every process that serves the collection has applied it.

A delete waits for all of them; an upsert, which is stored in any case, only briefly. Each serving process has a file in
`served/`, which it locks while it serves, with the sequence number of the first record that it has not applied: eight
bytes, or none for 0. An unlocked file belongs to a killed process.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from runtime.errors import CollectionError, Unavailable
from runtime.retrieval.collections.disk import storage_errors

WAIT_S = 10.0
"""Timeout of a delete. The supervisor kills a pool that stalls for this long."""
VISIBLE_S = 0.25
"""How long an upsert waits for a process that serves the collection; a running one takes a few milliseconds."""
_POLL_S = 0.0003
_BYTES = 8
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class ReaderPosition:
    """Published log position of this process, which serves the collection in a directory.

    If the directory is read-only for this process, nothing is published, and writers do not wait for it.
    """

    def __init__(self, directory: Path) -> None:
        """Register with no records applied: read the log afterwards, then `publish`. Raises `CollectionError`."""
        self._fd, self._published = -1, 0
        folder, name = directory / "served", f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path, temporary = folder / name, folder / f".{name}"
        try:
            with storage_errors(f"{temporary} cannot be written"):
                folder.mkdir(mode=0o700, exist_ok=True)
                self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # locked before the rename: a writer never sees it unlocked
                os.rename(temporary, self._path)
        except CollectionError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.close()
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _READ_ONLY:
                raise

    def publish(self, sequence: int) -> None:
        """Report that every search from now on reflects the records before this one. Raises `CollectionError`."""
        if self._fd >= 0 and sequence != self._published:
            with storage_errors(f"{self._path} cannot be written"):
                os.pwrite(self._fd, sequence.to_bytes(_BYTES, "little"), 0)
            self._published = sequence

    def close(self) -> None:
        """Unregister this process. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class ReaderBarrier:
    """The writer's view of the processes that serve its collection. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._clock, self._sleep = directory / "served", clock, sleep
        self._stalled: dict[str, int] = {}  # positions of the processes that an upsert has waited for in vain

    def wait_briefly(self, sequence: int) -> bool:
        """Wait until all of them have applied the records before this one. Return whether they have, within
        `VISIBLE_S`; a process that has not made progress since it exceeded this is not waited for again."""
        if behind := self._wait(sequence, VISIBLE_S, self._stalled):
            self._stalled = behind
        return not behind

    def wait(self, sequence: int) -> None:
        """Wait until all of them have applied the records before this one. Raises `Unavailable` after `WAIT_S`."""
        if behind := self._wait(sequence, WAIT_S, {}):
            process = next(iter(behind)).partition("-")[0]
            raise Unavailable(
                f"the delete is stored, but process {process} that serves {self._folder.parent} has not applied "
                f"it within {WAIT_S:g} s: until it does, its searches may find deleted documents"
            )

    def _wait(self, sequence: int, at_most_s: float, stalled: Mapping[str, int]) -> dict[str, int]:
        """Return the processes that are behind after this time, or that are all where they stalled."""
        until = self._clock() + at_most_s
        while behind := self._behind(sequence):
            if self._clock() >= until or behind.items() <= stalled.items():
                break
            self._sleep(_POLL_S)
        return behind

    def _behind(self, sequence: int) -> dict[str, int]:
        """Return the processes that have not applied the records before this one: their files' names and positions."""
        try:
            names = [name for name in os.listdir(self._folder) if name[0] != "."]
        except OSError:
            return {}
        positions = ((name, self._position_before(self._folder / name, sequence)) for name in names)
        return {name: position for name, position in positions if position is not None}

    @staticmethod
    def _position_before(path: Path, sequence: int) -> int | None:
        """Return the position of a running process if it is before `sequence`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            position = int.from_bytes(os.pread(fd, _BYTES, 0), "little")
            if position >= sequence:
                return None
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return position
        except OSError:
            return None
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # unlocked: its process was killed
            path.unlink()
        return None
