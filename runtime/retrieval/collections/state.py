"""In-memory state of a collection: sealed segments, growing rows and deletions.

The writer and every reader hold a `State` each, and apply the same log records to it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from runtime.retrieval.collections.part import Part, Rows, ignore
from runtime.retrieval.collections.retired_documents import RetiredDocuments
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.passages import Attributes

Loaded = dict[SegmentInfo, Segment]
_SHAPES_AT_ONCE = 512


class State:
    """Segments, growing rows and schema. `lock` is held during changes. `sequence`: of the next record to apply.

    With a `shard`, it contains only the segments of that shard, and marks the growing rows of other shards as deleted.
    `schema`: the attributes and their types; it only grows. `retired`: if set, the documents of rows that are merged
    away stay readable for a while.
    """

    def __init__(
        self,
        directory: Path,
        description: Description,
        manifest: Manifest,
        shard: int | None = None,
        prepare: Callable[[Segment], object] = ignore,
    ) -> None:
        """Open the segments of a manifest. prepare: called with each segment that is opened, for what its user needs.

        Raises `CollectionError`.
        """
        self.retired: RetiredDocuments | None = None
        self._prepare = prepare
        self.directory, self.description, self.shard = directory, description, shard
        self.lock = threading.RLock()
        self.segments: tuple[Segment, ...] = ()
        self.growing = GrowingSegment(manifest.next_row, description.dim, description.metric)
        self.schema: Schema = dict(description.declared)
        self.sequence = 0
        self.advance(manifest, self.open_segments(self.missing(manifest)))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The segments, and the growing rows last."""
        return *self.segments, self.growing

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
                    self.delete(np.array(operation.rows, np.int64))
                continue
            shapes: dict[object, Attributes] = {}
            for begin in range(0, len(operation.attributes), _SHAPES_AT_ONCE):
                shapes |= by_shape(operation.attributes[begin : begin + _SHAPES_AT_ONCE])
                yield
            with self.lock:
                if not agrees(self.schema, shapes.values()):
                    self.schema = extended_schema(self.schema, shapes.values())
            yield from self.growing.prepare(operation, self.schema)
            with self.lock:
                self.growing.append(operation)
                self._hide_others(operation)
                self.delete(np.array(operation.replaced, np.int64))
        with self.lock:
            self.sequence += 1

    def delete(self, rows: Rows) -> None:
        """Mark rows as deleted."""
        for part in self.parts if len(rows) else ():
            part.delete(rows)

    def _hide_others(self, operation: Upsert) -> None:
        """Mark the new rows of other shards as deleted."""
        if self.shard is not None and self.description.shards > 1:
            shards = np.array([self.description.shard_of(name) for name in operation.ids])
            self.growing.delete(operation.first + np.flatnonzero(shards != self.shard))

    def missing(self, manifest: Manifest) -> list[SegmentInfo]:
        """Return the segments of a manifest that are not open."""
        known = {segment.info for segment in self.segments}
        return [info for info in manifest.segments if self.shard in (None, info.shard) and info not in known]

    def open_segments(self, infos: Sequence[SegmentInfo]) -> Loaded:
        """Open segments. Raises `CollectionError`, with none left open."""
        fresh: Loaded = {}
        try:
            for info in infos:
                fresh[info] = Segment.load(self.directory, info, self.description)
                self._prepare(fresh[info])
        except CollectionError:
            close(list(fresh.values()))
            raise
        return fresh

    def advance(self, manifest: Manifest, fresh: Loaded) -> None:
        """Install a newer manifest, whose `missing` segments are `fresh`; deletions are kept.

        Raises `CollectionError`, with nothing changed.
        """
        opened = {segment.info: segment for segment in self.segments} | fresh
        segments = [opened.pop(info) for info in manifest.segments if info in opened]
        dead = read_tombstones(self.directory, manifest)
        with self.lock:
            dead = np.concatenate([dead, self.dead_rows()])
            for segment in segments:
                segment.delete(dead)
            before = self.growing
            self.schema = {**self.schema, **manifest.schema}
            self.growing = before.tail(manifest.next_row, self.schema)
            if self.retired is not None:
                for segment in opened.values():
                    self.retired.add(segment.document_lookup())
                if before is not self.growing:
                    self.retired.add(before.document_lookup())
            self.segments = tuple(segments)
            self.sequence = max(self.sequence, manifest.sequence)

    def dead_rows(self) -> Rows:
        """Return the deleted rows, int64."""
        with self.lock:
            return np.concatenate([part.dead_rows() for part in self.parts])

    def dead_rows_in(self, manifest: Manifest, fresh: Loaded) -> Rows:
        """Return the deleted rows of a manifest's segments; `fresh` are those that are not installed yet."""
        known, dead = {segment.info: segment for segment in self.segments}, self.dead_rows()
        installed = [known[info].dead_rows() for info in manifest.segments if info in known]
        fresh_dead = (np.intersect1d(segment.rows, dead) for segment in fresh.values())
        return np.concatenate([np.empty(0, np.int64), *installed, *fresh_dead])

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

    def snapshot(self) -> "Snapshot":
        """Return one state of all rows. Evaluate filters over it, not under the lock, which others need."""
        with self.lock:
            parts = self.parts
            alive = [part.snapshot_alive() for part in parts]
            return Snapshot(self.segments, self.growing, alive, [part.count == part.size for part in parts])

    def rows_passing(self, filter: Filter, work: Work | None = None) -> Rows:
        """Return the rows that are not deleted and pass a filter, int64. Raises `InvalidFilter`."""
        check_filter(filter, self.schema)
        snapshot = self.snapshot()
        passing = zip(snapshot.parts, snapshot.passing(filter, work or Work()), strict=True)
        return np.concatenate([part.rows[: len(bits)][bits] for part, bits in passing])

    def held_by(self, owner: AttributeBinding, rows: Rows) -> Bits:
        """Return which of some rows an owner may replace and delete: see `AttributeBinding`. Bool [rows]."""
        with self.lock:
            held = np.zeros(len(rows), bool)
            for part in self.parts:
                here, at = part.locate(rows)
                held[here] = part.columns.held_by(owner, at)
        return held

    def documents(
        self, rows: Sequence[int], on_read: Callable[[Document], None] = lambda document: None
    ) -> list[Document | None]:
        """Return the documents of rows; None for a row that is not here, for example because it was merged away.

        `on_read` is called with each before the next is read, in any order.
        """
        with self.lock:
            parts = self.parts
        by_row: dict[int, Document] = {}
        for part in parts:
            by_row |= part.find([row for row in rows if row not in by_row], on_read)
        for row in rows:
            if row not in by_row and (document_then := self._retired_document(row)) is not None:
                by_row[row] = document_then
                on_read(document_then)
        return [by_row.get(row) for row in rows]

    def _retired_document(self, row: int) -> Document | None:
        if self.retired is None:
            return None
        with self.lock:
            return self.retired.find(row)

    def newest(self, rows: Sequence[int]) -> dict[int, int | None]:
        """Return for each row the newest of these rows that has a version of its document; None if the document is
        deleted, or the row unknown.

        A document that was deleted and made again is another one, while its first row is among the growing ones.
        """
        deleted = self.deleted(rows)
        if not any(deleted):
            return {row: row for row in rows}
        dead = list(compress(rows, deleted))
        ids = {row: one.id for row, one in zip(dead, self.documents(dead), strict=True) if one is not None}
        living = self.rows_of([*ids.values()])
        with self.lock:
            replaced_by = {
                row: living[name]
                for row, name in ids.items()
                if name in living and self.growing.may_replace(living[name], row)
            }
        versions = {row: replaced_by.get(row) if is_dead else row for row, is_dead in zip(rows, deleted, strict=True)}
        row_of = {version: row for row, version in sorted(versions.items())}
        return {row: None if version is None else row_of[version] for row, version in versions.items()}

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

    def close(self) -> None:
        close(self.segments)


class Snapshot(NamedTuple):
    """One state of all rows: which rows of each part, the growing ones last, are not deleted.

    whole: whether a part has no deleted rows.
    """

    segments: tuple[Segment, ...]
    growing: GrowingSegment
    alive: list[Bits]
    whole: list[bool]

    @property
    def parts(self) -> tuple[Part, ...]:
        return *self.segments, self.growing

    def passing(self, filter: Filter | None, work: Work) -> list[Bits]:
        """Return which rows of each part are not deleted and pass a filter.

        Raises `InvalidFilter` if that is too much work.
        """
        if filter is None:
            return list(self.alive)
        pairs = zip(self.parts, self.alive, strict=True)
        return [part.passing(filter, work, len(alive)) & alive for part, alive in pairs]


def vectors_of(parts: Sequence[Part], rows: Rows, dim: int) -> NDArray[np.float32]:
    """Return the vectors of rows that are in some parts, float32 [n, d]."""
    vectors = np.empty((len(rows), dim), np.float32)
    for part in parts:
        here, at = part.locate(rows)
        vectors[here] = part.vectors(at)
    return vectors


def extended_schema(schema: Schema, documents: Iterable[Attributes]) -> Schema:
    """Return the schema with the attributes of documents. Raises `InvalidDocument`."""
    for attributes in documents:
        schema = extend_schema(schema, attributes)
    return schema


def close(segments: Sequence[Segment]) -> None:
    """Close the files of segments."""
    for segment in segments:
        segment.close()
