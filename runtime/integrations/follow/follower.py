"""Brings a live collection to what its source has: again and again, and each time only what changed.

What is stored is itself the state: each point is compared with its document, so that a pass which was interrupted is
gone on with by the next, and a pass over an unchanged source writes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import EmbedderFailed, EmbedderUnreachable, InvalidDocument, NoRoom, Overloaded, Unavailable
from runtime.integrations.follow.document_mapper import DocumentMapper, FieldMapping, flattened
from runtime.integrations.follow.source import Point, Source
from runtime.retrieval.attributes.schema import extend_schema
from runtime.retrieval.collections.sources import Progress, no_progress
from runtime.retrieval.live.storage.documents import StoredDocument
from runtime.retrieval.live.validation import UpsertDocument, resolve_vectors
from runtime.retrieval.live.writer import LiveWriter

BATCH = 256
_SAME = 2.0**-9  # of a vector's largest number: twice what rounding to float16 changes
_RETRYABLE = (Unavailable, NoRoom, Overloaded, EmbedderUnreachable, EmbedderFailed)


@dataclass
class SyncResult:
    """What a pass did. first: of its follower. complete: it was not stopped; only then is deleted what the source does
    not have."""

    first: bool = False
    stored: int = 0
    unchanged: int = 0
    refused: int = 0
    deleted: int = 0
    complete: bool = False

    @property
    def changed(self) -> int:
        return self.stored + self.deleted + self.refused


class Follower:
    """version: a field that is another whenever its point is: then points are looked at by that field alone, and only
    those where it changed are read. embeds: vectors are made from the texts by the writer's embedder, not taken."""

    def __init__(
        self,
        source: Source,
        writer: LiveWriter,
        fields: FieldMapping,
        *,
        version: str = "",
        embeds: bool = False,
        batch: int = BATCH,
        report: Callable[[str], None] = lambda words: None,
        progress: Progress = no_progress,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._writer, self._version, self._vectors = source, writer, version, not embeds
        self._batch, self._report, self._progress, self._stopped = batch, report, progress, stopped
        if version and fields.attributes:
            fields = FieldMapping(fields.text, fields.title, (*fields.attributes, version))
        self._mapper, self._first = DocumentMapper(fields, report), True

    def sync(self) -> SyncResult:
        """One pass. Raises `Unavailable` where the source does not answer, with what was stored before kept, and what
        `LiveWriter.upsert` and `delete` raise."""
        result, self._first = SyncResult(self._first), False
        state = self._writer.state
        vanished = set(state.alive_rows().tolist())
        expected, looked_at = max(self._source.count(), 1), 0
        for page in self._pages():
            looked_at += len(page)
            known = state.rows_of([str(point.key) for point in page])
            vanished.difference_update(known.values())
            stored = dict(zip(known, state.documents(list(known.values())), strict=True))
            if self._version:
                changed = [point for point in page if not self._has_version(stored.get(str(point.key)), point)]
                result.unchanged += len(page) - len(changed)
                page = self._source.get([point.key for point in changed], self._vectors) if changed else []
            self._store(self._different(page, stored, known, result), result)
            self._progress("follow", min(looked_at / expected, 1.0))
            if self._stopped():
                return result
        rows = sorted(vanished)
        for begin in range(0, len(rows), self._batch):
            gone = [one.id for one in state.documents(rows[begin : begin + self._batch]) if one is not None]
            result.deleted += self._writer.delete(gone)
        result.complete = True
        self._progress("follow", 1.0)
        return result

    def follow(self, wait: Callable[[], bool], told: Callable[[SyncResult], None]) -> None:
        """Pass after pass; `wait` says when the next is due, or, with False, that there is none. A pass but the first
        may fail for what may be over at the next one."""
        told(self.sync())
        while wait():
            try:
                told(self.sync())
            except _RETRYABLE as error:
                self._report(f"{error.message}; tried again at the next pass")

    def _pages(self) -> Iterator[list[Point]]:
        if self._version:
            return self._source.pages(self._batch, [self._version], False)
        return self._source.pages(self._batch, None, self._vectors)

    def _has_version(self, stored: StoredDocument | None, point: Point) -> bool:
        version = dict(flattened(point.fields)).get(self._version)
        return stored is not None and version is not None and stored.attributes.get(self._version) == version

    def _different(
        self, page: list[Point], stored: dict[str, StoredDocument | None], rows: dict[str, int], result: SyncResult
    ) -> list[UpsertDocument]:
        """The documents of a page that are not stored as they are."""
        same: list[UpsertDocument] = []
        different: list[UpsertDocument] = []
        schema = self._writer.state.schema
        for point in page:
            try:
                document = self._mapper.to_document(point, schema)
            except InvalidDocument as error:
                self._refuse(error, result)
                continue
            schema = extend_schema(schema, document.attributes)  # also of one page no two may disagree
            before = stored.get(document.id)
            unchanged = before is not None and (before.title, before.text, before.attributes) == (
                document.title,
                document.text,
                document.attributes,
            )
            (same if unchanged else different).append(document)
        if self._vectors and same:
            kept = self._kept([one.vector for one in same], [rows[one.id] for one in same])
            different += [document for document, is_kept in zip(same, kept, strict=True) if not is_kept]
            same = [document for document, is_kept in zip(same, kept, strict=True) if is_kept]
        result.unchanged += len(same)
        return different

    def _kept(self, vectors: Sequence[object], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Whether the rows have these vectors, but for rounding."""
        state = self._writer.state
        try:
            given = resolve_vectors([UpsertDocument("", vector=vector) for vector in vectors], state.description, None)  # type: ignore[arg-type]
        except InvalidDocument:  # which one it is is told when they are stored one by one
            return np.zeros(len(rows), bool)
        stored = state.vectors(np.array(rows, np.int64))
        kept: NDArray[np.bool_] = np.abs(given - stored).max(axis=1) <= _SAME * np.abs(given).max(axis=1)
        return kept

    def _store(self, documents: list[UpsertDocument], result: SyncResult) -> None:
        """All of them; one by one where one is refused, so that the others are stored."""
        if not documents:
            return
        try:
            result.stored += self._upsert(documents)
        except InvalidDocument as error:
            if len(documents) == 1:
                self._refuse(error, result)
                return
            for document in documents:
                self._store([document], result)

    def _upsert(self, documents: list[UpsertDocument]) -> int:
        try:
            return self._writer.upsert(documents)
        except Overloaded:  # faster than segments are built beside
            self._writer.flush()
            return self._writer.upsert(documents)

    def _refuse(self, error: InvalidDocument, result: SyncResult) -> None:
        result.refused += 1
        self._report(f"not stored: {error.message}")
