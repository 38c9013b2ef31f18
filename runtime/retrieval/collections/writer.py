"""Writer of a collection, one at a time: upserts, deletes, seals and merges."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gpu.build.params import Progress, no_progress
from runtime.errors import CollectionError, Forbidden, InvalidDocument, Overloaded
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.collections.description import MAX_ROWS, read_description
from runtime.retrieval.collections.disk import Disk, acquire_lock
from runtime.retrieval.collections.group_commit import MAX_BATCH_BYTES, GroupCommit, Prepare, WriteGroup
from runtime.retrieval.collections.log import Delete, Upsert, encode, log_bytes
from runtime.retrieval.collections.maintenance import Maintenance
from runtime.retrieval.collections.part import Rows
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.reader_barrier import ReaderBarrier
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.upgrade import upgrade
from runtime.retrieval.collections.validation import (
    UpsertDocument,
    as_owned,
    check_batch,
    resolve_vectors,
    schema_with,
    to_stored_value,
)
from runtime.retrieval.embedding.embedder import Embedder

SEAL_ROWS = 4096  # growing rows that become a segment: comparing this many takes as long as one or two graph walks
_MAX_GROWING = 16  # times the sealing threshold: beyond that, upserts are rejected until segments are sealed
_log = logging.getLogger(__name__)


class WriterState(NamedTuple):
    """Statistics of a writer.

    documents: not deleted. growing: rows in the log. tombstones: deleted rows in segments. sealed, merged: segments
    built since the writer was opened, from the log and from other segments. building: those that are being built.
    """

    documents: int
    segments: int
    growing: int
    tombstones: int
    log_bytes: int
    sealed: int
    merged: int
    building: int


class CollectionWriter:
    """Upserts and deletes, which return once they are synced to the log. Thread-safe.

    `state`: what it has stored, for `search.search`. `commits`: the end of the log. `maintenance`: of its segments.
    """

    def __init__(
        self,
        directory: Path,
        *,
        embedder: Embedder | None = None,
        seal_rows: int = SEAL_ROWS,
        threads: int = 1,
        background: bool = True,
        disk: Disk | None = None,
    ) -> None:
        """Open a collection for writing.

        embedder: for documents without a vector. seal_rows: growing rows a shard that are sealed into a segment.
        threads: cores for embedding, and for building segments. background: seal and merge in background processes;
        else only `flush` and `compact` do.

        Raises `CollectionBusy` if another process has it open for writing, `CollectionError`, `NoRoom`, and
        `Overloaded` if the system permits no more threads.
        """
        self.directory, self.repaired = directory, ""
        self._embedder, self._threads, disk = embedder, threads, disk or Disk()
        read_description(directory)  # first: creates no lock file where there is no collection
        with ExitStack() as opened:
            self.lock_fd = acquire_lock(directory)
            opened.callback(os.close, self.lock_fd)
            upgrade(disk, directory)
            reader = opened.enter_context(CollectionReader(directory, prepare=Segment.check))
            self.state, torn = reader.state, reader.log.torn_bytes
            reader.check_log()
            if reader.manifest.next_row >= MAX_ROWS:
                last = reader.manifest.next_row - 1
                raise CollectionError(f"{directory} has the id {last}: documents cannot be added behind it")
            reader.log.close()
            self.commits = GroupCommit(disk, self.state, self.lock_fd, reader.log.first, reader.log.end)
            opened.callback(self.commits.close)
            self.maintenance = Maintenance(disk, self.state, self.commits, reader.manifest, seal_rows, threads)
            opened.callback(self.maintenance.close)
            if background:
                self.maintenance.start()
            self._opened = opened.pop_all()
        if torn:
            self.repaired = f"{self.commits.path}: cut the last {torn} bytes, an incomplete record"
            _log.warning("%s", self.repaired)
        self._barrier = ReaderBarrier(directory)
        self.maintenance.wake()

    def upsert(self, documents: Sequence[UpsertDocument], owner: AttributeBinding | None = None) -> int:
        """Store documents, atomically, and replace those with the same ids. Returns how many.

        owner: a binding that the documents and those that they replace must match, else raises `Forbidden`. Raises
        `InvalidDocument`, `NoRoom`, `Overloaded` while too many rows wait to be sealed, and `CollectionError` if the
        disk failed: whether the documents are stored is then unknown.
        """
        if not documents:
            return 0
        check_batch(documents)
        vectors = resolve_vectors(documents, self.state.description, self._embedder, self._threads)
        if self.state.growing.size >= _MAX_GROWING * self.maintenance.seal_threshold:
            self.maintenance.wake()
            raise Overloaded(f"{self.state.growing.size} documents wait to be sealed; try again later")
        exclusive = owner is not None  # the owner of a replaced document is looked up in the stored state
        return self._write(lambda group: self._prepare_upsert(group, documents, vectors, owner), exclusive)

    def wait_visible(self) -> bool:
        """Wait until the searches of every process that serves the collection find all writes so far.

        Return whether they do, after `reader_barrier.VISIBLE_S` at most.
        """
        return self._barrier.wait_briefly(self.state.sequence)

    def delete(self, ids: Sequence[str], owner: AttributeBinding | None = None) -> int:
        """Delete documents by id, ignoring missing ones and those of other owners. Returns how many were deleted.

        Returns when no later search of any process finds them. Raises as `upsert`, and `Unavailable` if a process that
        serves the collection does not apply the delete in time: the documents are deleted nevertheless.
        """
        if isinstance(ids, str):
            raise InvalidDocument("ids is a string; it must be a list of strings", "ids")
        if not ids:
            return 0
        return self._write_and_wait(lambda group: self._prepare_delete(group, ids, owner), owner is not None)

    def delete_where(self, filter: Filter, owner: AttributeBinding | None = None) -> int:
        """Delete the documents that pass a filter, except those of other owners. Returns and raises as `delete`, and
        `InvalidFilter`."""
        self.state.rows_passing(filter)  # evaluates what does not change before other writes must wait

        def prepare(group: WriteGroup) -> int:
            rows = self._own(self.state.rows_passing(filter), owner)
            group.operations += [Delete(rows.tolist())] if len(rows) else []
            return len(rows)

        return self._write_and_wait(prepare, exclusive=True)

    def statistics(self) -> WriterState:
        """Return counters."""
        state = self.state
        with state.lock:
            deleted = sum(segment.size - segment.count for segment in state.segments)
            rows = state.count, len(state.segments), state.growing.size, deleted
        built = self.maintenance
        return WriterState(*rows, log_bytes(self.directory), built.sealed, built.merged, len(built.building))

    def flush(self) -> None:
        """See `Maintenance.flush`."""
        self.maintenance.flush()

    def compact(self, progress: Progress = no_progress) -> None:
        """See `Maintenance.compact`."""
        self.maintenance.compact(progress)

    def close(self) -> None:
        """Stop background builds and release the lock. Idempotent. Growing rows remain in the log."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing

    def _write(self, prepare: Prepare, exclusive: bool) -> int:
        count = self.commits.write(prepare, exclusive=exclusive)
        if self.state.growing.size >= self.maintenance.seal_threshold:
            self.maintenance.wake()
        return count

    def _write_and_wait(self, prepare: Prepare, exclusive: bool) -> int:
        """Write, and wait until every process that serves the collection has applied it."""
        count = self._write(prepare, exclusive)
        self._barrier.wait(self.state.sequence)
        return count

    def _prepare_upsert(
        self,
        group: WriteGroup,
        documents: Sequence[UpsertDocument],
        vectors: NDArray[np.float32],
        owner: AttributeBinding | None,
    ) -> int:
        if owner is not None:
            documents = as_owned(documents, owner, group.schema)
        schema = schema_with(group.schema, documents)
        ids = [document.id for document in documents]
        replaced = self._rows_of(group, ids)
        rows = np.array([*replaced.values()], np.int64)
        if len(self._own(rows, owner)) < len(rows):
            raise Forbidden("one of these ids belongs to a document of another owner; nothing was stored", "id")
        rows_by_id = {name: row for row, name in enumerate(ids, group.next_row)}
        pairs = sorted((row, rows_by_id[name]) for name, row in replaced.items())
        operation = Upsert(
            group.next_row,
            ids,
            [document.title for document in documents],
            [document.text for document in documents],
            [{name: to_stored_value(value) for name, value in document.attributes.items()} for document in documents],
            vectors.tobytes(),
            [row for row, _ in pairs],
            [successor for _, successor in pairs],
        )
        size = len(encode([operation]))
        if size > MAX_BATCH_BYTES:
            raise InvalidDocument(f"the batch has {size} bytes; the limit is {MAX_BATCH_BYTES}", "documents")
        group.operations.append(operation)
        group.size += size
        group.rows |= rows_by_id
        group.next_row, group.schema = group.next_row + len(ids), schema
        return len(ids)

    def _prepare_delete(self, group: WriteGroup, ids: Sequence[str], owner: AttributeBinding | None) -> int:
        row_by_id = self._rows_of(group, list(dict.fromkeys(ids)))
        rows = self._own(np.array(sorted(row_by_id.values()), np.int64), owner).tolist()
        group.operations += [Delete(rows)] if rows else []
        deleted = {*rows}
        group.rows |= {name: None for name, row in row_by_id.items() if row in deleted}
        return len(rows)

    def _own(self, rows: Rows, owner: AttributeBinding | None) -> Rows:
        """Return those of the rows that the owner may replace and delete; without an owner, all."""
        return rows if owner is None else rows[self.state.held_by(owner, rows)]

    def _rows_of(self, group: WriteGroup, ids: list[str]) -> dict[str, int]:
        stored = self.state.rows_of([name for name in ids if name not in group.rows])
        in_group = {name: row for name in ids if (row := group.rows.get(name)) is not None}
        return stored | in_group
