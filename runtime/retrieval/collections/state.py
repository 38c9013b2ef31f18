"""In-memory state of a collection: sealed segments, growing rows and deletions.

The writer and every reader hold a `State` each, and apply the same log records to it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import AttributeBinding, Filter, check_filter
from runtime.retrieval.attributes.schema import Schema, agrees, by_shape, extend_schema
from runtime.retrieval.collections.description import Description, Manifest, SegmentInfo, read_tombstones
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.log import Delete, Operation, Upsert
from runtime.retrieval.collections.part import OnDocument, Part, Rows, RowSet, ignore
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.passages import Attributes

Loaded = dict[SegmentInfo, Segment]
_SHAPES_AT_ONCE = 512


class State:
    """Segments, growing rows and schema. `lock` is held during changes. `sequence`: of the next record to apply.

    With a `shard`, it contains only the segments of that shard, and marks the growing rows of other shards as deleted.
    `schema`: the attributes and their types; it only grows. `dropped`: called with parts that were sealed or merged
    away.
    """

    def __init__(
        self,
        directory: Path,
        description: Description,
        shard: int | None = None,
        prepare: Callable[[Segment], object] = ignore,
    ) -> None:
        """Begin without rows. prepare: called with each segment that is opened, for what its user needs."""
        self._prepare = prepare
        self.dropped: Callable[[Part], object] = ignore
        self.directory, self.description, self.shard = directory, description, shard
        self.lock = threading.RLock()
        self.segments: tuple[Segment, ...] = ()
        self.growing = GrowingSegment(0, description.dim, description.metric)
        self.schema: Schema = dict(description.declared)
        self.sequence = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The segments, and the growing rows last."""
        return *self.segments, self.growing

    # ---- changes

    def apply(self, operations: Sequence[Operation]) -> None:
        """Apply the operations of the next record. Raises `CollectionError` if they are inconsistent."""
        with self.lock:
            for _ in self.apply_in_parts(operations):
                pass

    def apply_in_parts(self, operations: Sequence[Operation]) -> Iterator[None]:
        """As `apply`, in parts; others see each operation as a whole, and `sequence` counts the record at its end."""
        for operation in operations:
            if isinstance(operation, Delete):
                with self.lock:
                    self._delete(operation.rows)
                continue
            shapes: dict[object, Attributes] = {}
            for begin in range(0, len(operation.attributes), _SHAPES_AT_ONCE):
                shapes |= by_shape(operation.attributes[begin : begin + _SHAPES_AT_ONCE])
                yield
            with self.lock:
                for attributes in shapes.values():
                    if not agrees(self.schema, attributes):
                        self.schema = extend_schema(self.schema, attributes)
            yield from self.growing.prepare(operation, self.schema)
            with self.lock:
                self.growing.append(operation)
                self._delete([*self._rows_of_other_shards(operation), *operation.replaced])
        with self.lock:
            self.sequence += 1

    def _delete(self, rows: Sequence[int]) -> None:
        wanted = np.array(rows, np.int64)
        for part in self.parts if rows else ():
            part.delete(wanted)

    def _rows_of_other_shards(self, operation: Upsert) -> list[int]:
        if self.shard is None or self.description.shards == 1:
            return []
        rows = enumerate(operation.ids, operation.first)
        return [row for row, name in rows if self.description.shard_of(name) != self.shard]

    def missing(self, manifest: Manifest) -> list[SegmentInfo]:
        """Return the segments of a manifest that are not open."""
        known = {segment.info for segment in self.segments}
        return [info for info in manifest.segments if self.shard in (None, info.shard) and info not in known]

    def open_segments(self, infos: Sequence[SegmentInfo]) -> Loaded:
        """Open segments. Raises `CollectionError`, with none left open."""
        fresh: Loaded = {}
        try:
            for info in infos:
                fresh[info] = Segment(self.directory, info, self.description)
                self._prepare(fresh[info])
        except CollectionError:
            close(list(fresh.values()))
            raise
        return fresh

    def advance(self, manifest: Manifest, fresh: Loaded) -> None:
        """Install a newer manifest, whose `missing` segments are `fresh`; deletions are kept.

        Raises `CollectionError`, with nothing changed.
        """
        dead = read_tombstones(self.directory, manifest)
        with self.lock:
            before, segments = self.parts, self._segments_of(manifest, fresh)
            dead = np.concatenate([dead, self.dead_rows()])
            for segment in segments:
                segment.delete(dead)
            self.schema = {**self.schema, **manifest.schema}
            self.growing = self.growing.tail(manifest.next_row, self.schema)
            self.segments = tuple(segments)
            self.sequence = max(self.sequence, manifest.sequence)
            for part in before:
                if part not in self.parts:
                    self.dropped(part)

    def _segments_of(self, manifest: Manifest, fresh: Loaded) -> list[Segment]:
        opened = {segment.info: segment for segment in self.segments} | fresh
        return [opened[info] for info in manifest.segments if info in opened]

    def dead_rows_in(self, manifest: Manifest, fresh: Loaded) -> Rows:
        """Return the deleted rows of a manifest's segments; `fresh` are those that are not installed yet."""
        dead = self.dead_rows()
        for segment in fresh.values():
            segment.delete(dead)
        rows = (segment.dead_rows() for segment in self._segments_of(manifest, fresh))
        return np.concatenate([np.empty(0, np.int64), *rows])

    # ---- rows

    @property
    def count(self) -> int:
        """Number of documents that are not deleted."""
        with self.lock:
            return sum(part.count for part in self.parts)

    def file_bytes(self, name: str = "") -> int:
        """Return the bytes of files of the segments, all together: see `Segment.file_bytes`."""
        return sum(segment.file_bytes(name) for segment in self.segments)

    def alive_rows(self) -> Rows:
        """Return the rows that are not deleted, int64."""
        with self.lock:
            return np.concatenate([part.alive_rows() for part in self.parts])

    def dead_rows(self) -> Rows:
        """Return the deleted rows, int64."""
        with self.lock:
            return np.concatenate([part.dead_rows() for part in self.parts])

    def vectors(self, rows: Rows) -> NDArray[np.float32]:
        """Return the vectors of existing rows, float32 [n, d], as upserted except for rounding."""
        with self.lock:
            return vectors_of(self.parts, rows, self.description.dim)

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that exist, in order."""
        with self.lock:
            row_by_id: dict[str, int] = {}
            for part in reversed(self.parts):
                here = part.rows_of([name for name in ids if name not in row_by_id])
                alive = part.has_alive(np.array([*here.values()], np.int64))
                row_by_id |= dict(compress(here.items(), alive))
        return {name: row_by_id[name] for name in ids if name in row_by_id}

    def deleted(self, rows: Sequence[int]) -> list[bool]:
        """Return whether each row is deleted or unknown."""
        wanted = np.array(rows, np.int64)
        with self.lock:
            first, *others = self.parts
            alive = first.has_alive(wanted)
            for part in others:
                if alive.all():  # most often in the first
                    break
                alive |= part.has_alive(wanted)
        return [not one for one in alive.tolist()]

    def held_by(self, owner: AttributeBinding, rows: Rows) -> Bits:
        """Return which of some rows an owner may replace and delete: see `AttributeBinding`. Bool [rows]."""
        with self.lock:
            held = np.zeros(len(rows), bool)
            for part in self.parts:
                here, at = part.locate(rows)
                held[here] = part.columns.held_by(owner, at)
        return held

    def documents(self, rows: Sequence[int], on_read: OnDocument = ignore) -> list[Document | None]:
        """Return the documents of rows; None for a row that is not here, for example because it was merged away.

        `on_read` is called with each before the next is read, in any order.
        """
        with self.lock:
            parts = self.parts
        by_row: dict[int, Document] = {}
        for part in parts:
            by_row |= part.find([row for row in rows if row not in by_row], on_read)
        return [by_row.get(row) for row in rows]

    def snapshot(self) -> "Snapshot":
        """Return one state of all rows. Evaluate filters over it, not under the lock, which others need."""
        with self.lock:
            return Snapshot(self.segments, self.growing, [part.alive for part in self.parts])

    def rows_passing(self, filter: Filter) -> Rows:
        """Return the rows that are not deleted and pass a filter, int64. Raises `InvalidFilter`."""
        check_filter(filter, self.schema)
        snapshot = self.snapshot()
        passing = zip(snapshot.parts, snapshot.passing(filter, Work()), strict=True)
        return np.concatenate([part.rows[: len(bits)][bits] for part, bits in passing])

    def close(self) -> None:
        close(self.segments)


class Snapshot(NamedTuple):
    """One state of all rows. `alive`: which rows of each part, the growing ones last, are not deleted."""

    segments: tuple[Segment, ...]
    growing: GrowingSegment
    alive: list[RowSet]

    @property
    def parts(self) -> tuple[Part, ...]:
        return *self.segments, self.growing

    def passing(self, filter: Filter | None, work: Work) -> list[Bits]:
        """Return which rows of each part are not deleted and pass a filter.

        Raises `InvalidFilter` if that is too much work.
        """
        if filter is None:
            return [alive.mask for alive in self.alive]
        pairs = zip(self.parts, self.alive, strict=True)
        return [part.passing(filter, work, alive.size) & alive.mask for part, alive in pairs]


def vectors_of(parts: Sequence[Part], rows: Rows, dim: int) -> NDArray[np.float32]:
    """Return the vectors of rows that are in some parts, float32 [n, d]."""
    vectors = np.empty((len(rows), dim), np.float32)
    for part in parts:
        here, at = part.locate(rows)
        vectors[here] = part.vectors(at)
    return vectors


def close(segments: Sequence[Segment]) -> None:
    """Close the files of segments."""
    for segment in segments:
        segment.close()
