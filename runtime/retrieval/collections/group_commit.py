"""Group commit: writes of several threads share a record of the log and its sync."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import CollectionError, InternalError, TrinityError
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.disk import Disk, lock_is_current, storage_error, storage_errors
from runtime.retrieval.collections.log import LogWriter, Operation, encode, log_path
from runtime.retrieval.collections.state import State

MAX_BATCH_BYTES = 64 << 20  # of an encoded batch; a log record holds up to two, within `log.MAX_PAYLOAD`


@dataclass
class WriteGroup:
    """Operations that become one record, and the state that they lead to so far."""

    next_row: int
    schema: Schema
    operations: list[Operation] = field(default_factory=list)
    rows: dict[str, int | None] = field(default_factory=dict)  # by id; None: the group deletes it
    size: int = 0


Prepare = Callable[[WriteGroup], int]
"""Adds a write's operations to a group, once nothing can fail any more, and returns the write's result."""


@dataclass(slots=True, eq=False)
class _Write:
    """A write that waits for its record. result: its result or error, once it is stored or not."""

    prepare: Prepare
    exclusive: bool
    result: int | TrinityError | None = None


class GroupCommit:
    """The end of a log, and the state to which its records are applied. Thread-safe.

    lock: held while a record is written, and by whoever replaces the log's file or the segments. pending: the writes
    that are not acknowledged yet.
    """

    def __init__(self, disk: Disk, state: State, lock_fd: int, first: int, end: int) -> None:
        """Append at `end` of the log's file that begins at record `first`. Raises `CollectionError`, `NoRoom`."""
        self.lock = threading.RLock()
        self.pending: deque[_Write] = deque()
        self._disk, self._state, self._lock_fd, self._failure = disk, state, lock_fd, ""
        self._log = self._open(first, end)

    @property
    def path(self) -> Path:
        """The log's last file."""
        return self._log.path

    def write(self, prepare: Prepare, *, exclusive: bool) -> int:
        """Write, and return the write's result once it is stored. Raises its error.

        exclusive: it depends on stored state, so no other write may precede it in its record.
        """
        write = _Write(prepare, exclusive)
        self.pending.append(write)
        with self.lock:
            while write.result is None:
                self._commit()
        if isinstance(write.result, TrinityError):
            raise write.result
        return write.result

    def check_directory(self) -> None:
        """Raise `CollectionError` if the directory was replaced by another collection or a restored copy, or moved, or
        if a sync has failed: a build may have read a record that the disk has lost."""
        directory = self._state.directory
        if not self._failure and not (lock_is_current(self._lock_fd, directory) and self._log.is_current):
            self._failure = f"{directory} was replaced or moved while it was open for writing: reopen it"
        if self._failure:
            raise CollectionError(self._failure)

    def rotate(self) -> None:
        """Begin a new log file, so that the files before it can be removed once they are sealed."""
        directory, sequence = self._state.directory, self._state.sequence
        if sequence == self._log.first:
            return
        with storage_errors(f"{self._log.path} cannot be written"):
            self._log.cut()  # only the last file of a log may have a torn end
        try:
            following = self._open(sequence, 0)
        except CollectionError:
            self._disk.remove(log_path(directory, sequence))
            raise
        self._log.close()
        self._log = following

    def close(self) -> None:
        """Close the log; later writes fail."""
        with self.lock:
            self._failure = self._failure or f"{self._state.directory} was closed"
            self._log.close()

    def _open(self, first: int, end: int) -> LogWriter:
        directory = self._state.directory
        with storage_errors(f"{log_path(directory, first)} cannot be written"):
            return LogWriter(self._disk, directory, self._state.description.identity, first, end)

    def _commit(self) -> None:
        """Write the pending writes as one record, up to one that may not be in it."""
        group = WriteGroup(self._state.growing.next_row, self._state.schema)
        prepared: list[tuple[_Write, int | TrinityError]] = []
        for write in list(self.pending):
            if prepared and (write.exclusive or prepared[-1][0].exclusive or group.size > MAX_BATCH_BYTES):
                break
            prepared.append((write, self._prepared(write, group)))
        failed = self._store(group.operations) if group.operations else None
        for write, result in prepared:
            self.pending.popleft()
            write.result = result if failed is None or isinstance(result, TrinityError) else failed

    def _prepared(self, write: _Write, group: WriteGroup) -> int | TrinityError:
        try:
            if self._failure:
                raise CollectionError(self._failure)
            return write.prepare(group)
        except TrinityError as error:
            return error
        except Exception as error:  # an internal error must not leave its write in the queue either
            return InternalError(f"a write failed: {error!r}")

    def _store(self, operations: list[Operation]) -> TrinityError | None:
        """Log a record, sync it, and apply it; return the error."""
        path = self._log.path
        try:
            self.check_directory()
            self._log.append(self._state.sequence, encode(operations))
        except CollectionError as error:
            return error
        except (OSError, MemoryError) as error:
            return storage_error(error, f"{path} cannot be written; nothing was stored")
        try:
            self._log.sync()
        except OSError as error:
            unknown = "whether the last write is stored is unknown: reopen it"
            failed = storage_error(error, f"{path} cannot be synced; {unknown}")
            self._failure = failed.message
            return failed
        try:
            self._state.apply(operations)
        except Exception as error:  # mostly of memory; a write after it would be numbered as it is
            self._failure = f"{self._state.directory} lacks a write that is stored ({error!r}): reopen it"
            return InternalError(self._failure)
        return None
