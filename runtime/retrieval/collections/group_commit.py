"""Group commit: writes of several threads share a record of the log and its sync."""

import threading
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


@dataclass
class _PendingWrite:
    """A write that waits for its record."""

    prepare: Prepare
    exclusive: bool
    result: int = 0
    error: TrinityError | None = None
    done: bool = False


class GroupCommit:
    """The end of a log, and the state to which its records are applied. Thread-safe.

    lock: held while a record is written, and by whoever replaces the log's file or the segments.
    """

    def __init__(self, disk: Disk, state: State, lock_fd: int, first: int, end: int) -> None:
        """Append at `end` of the log's file that begins at record `first`. Raises `CollectionError`, `NoRoom`."""
        self.lock = threading.RLock()
        self._disk, self._state, self._lock_fd = disk, state, lock_fd
        self._pending: list[_PendingWrite] = []
        self._pending_lock = threading.Lock()
        self._failure, self._closed = "", False
        self._log = self._open(first, end)

    @property
    def path(self) -> Path:
        """The log's last file."""
        return self._log.path

    @property
    def waiting(self) -> int:
        """Number of writes that are not acknowledged yet."""
        return len(self._pending)

    def write(self, prepare: Prepare, *, exclusive: bool) -> int:
        """Write, and return the write's result once it is stored. Raises its error.

        exclusive: it depends on stored state, so no other write may precede it in its record.
        """
        pending = _PendingWrite(prepare, exclusive)
        with self._pending_lock:
            self._pending.append(pending)
        with self.lock:
            while not pending.done:
                self._commit()
        if pending.error is not None:
            raise pending.error
        return pending.result

    def check_directory(self) -> None:
        """Raise `CollectionError` if the directory was replaced by another collection or a restored copy, or moved, or
        if a sync has failed: a build may have read a record that the disk has lost."""
        if self._failure:
            raise CollectionError(self._failure)
        directory = self._state.directory
        if not (lock_is_current(self._lock_fd, directory) and self._log.is_current):
            self._failure = f"{directory} was replaced or moved while it was open for writing: reopen it"
            raise CollectionError(self._failure)

    def rotate(self) -> None:
        """Begin a new log file, so that the files before it can be removed once they are sealed."""
        sequence = self._state.sequence
        if sequence == self._log.first:
            return
        with storage_errors(f"{self._log.path} cannot be written"):
            self._log.cut()  # only the last file of a log may have a torn end
        try:
            next_log = self._open(sequence, 0)
        except CollectionError:
            self._disk.remove(log_path(self._state.directory, sequence))
            raise
        self._log.close()
        self._log = next_log

    def close(self) -> None:
        """Close the log; later writes fail."""
        self._closed = True
        self._log.close()

    def _open(self, first: int, end: int) -> LogWriter:
        path = log_path(self._state.directory, first)
        with storage_errors(f"{path} cannot be written"):
            return LogWriter(self._disk, path, self._state.description.identity, first, end=end)

    def _commit(self) -> None:
        """Write pending writes as one record."""
        group = WriteGroup(self._state.growing.next_row, self._state.schema)
        committed: list[_PendingWrite] = []
        with self._pending_lock:
            waiting = list(self._pending)
        for pending in waiting:
            if committed and (pending.exclusive or group.size > MAX_BATCH_BYTES):
                break
            committed.append(pending)
            try:
                if self._closed or self._failure:
                    raise CollectionError(self._failure or f"{self._state.directory} was closed")
                pending.result = pending.prepare(group)
            except TrinityError as error:
                pending.error = error
            except Exception as failure:  # an internal error must not leave its write in the queue either
                pending.error = InternalError(f"a write failed: {failure!r}")
            if pending.exclusive:
                break
        failed = self._append(group.operations) if group.operations else None
        for pending in committed:
            pending.error = pending.error or failed
            pending.done = True
        with self._pending_lock:
            self._pending = [pending for pending in self._pending if not pending.done]

    def _append(self, operations: list[Operation]) -> TrinityError | None:
        """Log a record, sync it, and apply it."""
        path = self._log.path
        try:
            self.check_directory()
        except CollectionError as error:
            return error
        try:
            self._log.append(self._state.sequence, encode(operations))
        except (OSError, MemoryError) as error:
            return storage_error(error, f"{path} cannot be written; nothing was stored")
        try:
            self._log.sync()
        except OSError as error:
            failed = storage_error(
                error, f"{path} cannot be synced; whether the last write is stored is unknown: reopen it"
            )
            self._failure = failed.message
            return failed
        try:
            self._state.apply(operations)
        except Exception as error:  # mostly of memory; a write after it would be numbered as it is
            self._failure = f"{self._state.directory} lacks a write that is stored ({error!r}): reopen it"
            return InternalError(self._failure)
        return None
