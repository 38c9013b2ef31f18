"""Synchronises a collection with a source, in repeated passes that write only changes.

No state is kept beside the documents: each pass compares the points with the stored documents. So the next pass
continues after an interruption, and a pass over an unchanged source writes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu.build.params import Progress, no_progress
from runtime.errors import EmbedderFailed, EmbedderUnreachable, InvalidDocument, NoRoom, Overloaded, Unavailable
from runtime.integrations.follow.document_mapper import DocumentMapper, FieldMapping, flattened
from runtime.integrations.follow.source import Point, Source
from runtime.retrieval.attributes.schema import extend_schema
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.validation import UpsertDocument, resolve_vectors
from runtime.retrieval.collections.writer import CollectionWriter

BATCH = 256
_TOLERANCE = 2.0**-9  # relative to a vector's largest number: twice the rounding error of float16
_RETRYABLE = (Unavailable, NoRoom, Overloaded, EmbedderUnreachable, EmbedderFailed)


@dataclass
class SyncResult:
    """Counts of a pass. first: it was the follower's first. complete: it was not stopped; only then documents that the
    source does not have are deleted."""

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
    """Synchronises a collection, through its writer, with a source.

    version: a field that changes whenever its point does: a pass reads only this field of all points, and then the
    points where it changed. embeds: the writer's embedder computes the vectors from the texts, instead of copying them.
    report: called with messages for the user. stopped: polled between pages.
    """

    def __init__(
        self,
        source: Source,
        writer: CollectionWriter,
        fields: FieldMapping,
        *,
        version: str = "",
        embeds: bool = False,
        batch: int = BATCH,
        report: Callable[[str], None] = lambda message: None,
        progress: Progress = no_progress,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._writer, self._version, self._vectors = source, writer, version, not embeds
        self._batch, self._report, self._progress, self._stopped = batch, report, progress, stopped
        if version and fields.attributes:
            fields = FieldMapping(fields.text, fields.title, (*fields.attributes, version))
        self._mapper, self._first = DocumentMapper(fields, report), True

    def sync(self) -> SyncResult:
        """Run one pass. Raises `Unavailable` if the source does not respond, and the errors of the writer's `upsert`
        and `delete`; documents that the pass already stored stay stored."""
        result, self._first = SyncResult(self._first), False
        state = self._writer.state
        unseen = set(state.alive_rows().tolist())
        expected, seen = max(self._source.count(), 1), 0
        for page in self._pages():
            seen += len(page)
            known = state.rows_of([str(point.key) for point in page])
            unseen.difference_update(known.values())
            stored = dict(zip(known, state.documents(list(known.values())), strict=True))
            if self._version:
                changed = [point for point in page if not self._has_version(stored.get(str(point.key)), point)]
                result.unchanged += len(page) - len(changed)
                page = self._source.get([point.key for point in changed], self._vectors) if changed else []
            self._store(self._changed_documents(page, stored, known, result), result)
            self._progress("follow", min(seen / expected, 1.0))
            if self._stopped():
                return result
        rows = sorted(unseen)
        for begin in range(0, len(rows), self._batch):
            documents = state.documents(rows[begin : begin + self._batch])
            result.deleted += self._writer.delete([document.id for document in documents if document is not None])
        result.complete = True
        self._progress("follow", 1.0)
        return result

    def follow(self, wait: Callable[[], bool], on_result: Callable[[SyncResult], None]) -> None:
        """Run passes until `wait`, which blocks until the next pass is due, returns False.

        Retryable errors of the first pass are raised; those of later passes are reported, and the next pass retries.
        """
        on_result(self.sync())
        while wait():
            try:
                on_result(self.sync())
            except _RETRYABLE as error:
                self._report(f"{error.message}; retrying in the next pass")

    def _pages(self) -> Iterator[list[Point]]:
        if self._version:
            return self._source.pages(self._batch, [self._version], False)
        return self._source.pages(self._batch, None, self._vectors)

    def _has_version(self, stored: Document | None, point: Point) -> bool:
        version = dict(flattened(point.fields)).get(self._version)
        return stored is not None and version is not None and stored.attributes.get(self._version) == version

    def _changed_documents(
        self, page: list[Point], stored: dict[str, Document | None], rows: dict[str, int], result: SyncResult
    ) -> list[UpsertDocument]:
        """Return the documents of a page that differ from the stored ones."""
        same: list[UpsertDocument] = []
        changed: list[UpsertDocument] = []
        schema = self._writer.state.schema
        for point in page:
            try:
                document = self._mapper.to_document(point, schema)
            except InvalidDocument as error:
                self._refuse(error, result)
                continue
            schema = extend_schema(schema, document.attributes)  # types must also agree within a page
            before = stored.get(document.id)
            unchanged = before is not None and (before.title, before.text, before.attributes) == (
                document.title,
                document.text,
                document.attributes,
            )
            (same if unchanged else changed).append(document)
        if self._vectors and same:
            equal = self._equal_vectors([one.vector for one in same], [rows[one.id] for one in same])
            changed += [document for document, is_equal in zip(same, equal, strict=True) if not is_equal]
            result.unchanged += int(np.count_nonzero(equal))
        else:
            result.unchanged += len(same)
        return changed

    def _equal_vectors(self, vectors: Sequence[object], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Return whether each row has this vector, except for rounding."""
        state = self._writer.state
        try:
            given = resolve_vectors([UpsertDocument("", vector=vector) for vector in vectors], state.description, None)  # type: ignore[arg-type]
        except InvalidDocument:  # `_store` reports which one is invalid
            return np.zeros(len(rows), bool)
        stored = state.vectors(np.array(rows, np.int64))
        equal: NDArray[np.bool_] = np.abs(given - stored).max(axis=1) <= _TOLERANCE * np.abs(given).max(axis=1)
        return equal

    def _store(self, documents: list[UpsertDocument], result: SyncResult) -> None:
        """Store documents; one by one if one of the batch is refused, so that the others are stored."""
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
        except Overloaded:  # faster than background builds seal segments
            self._writer.flush()
            return self._writer.upsert(documents)

    def _refuse(self, error: InvalidDocument, result: SyncResult) -> None:
        result.refused += 1
        self._report(f"not stored: {error.message}")
