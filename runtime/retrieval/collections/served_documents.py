"""The documents of a collection, for the processes that answer with them."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import compress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.attributes.filters import Filter, check_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.description import DESCRIPTION, DOCUMENTS
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.files import Files
from runtime.retrieval.collections.part import OnDocument, Part, ignore
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search_keywords
from runtime.retrieval.embedding.embedder import embedder_name
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import size_of

KEPT_S = 60.0
"""How long documents stay readable after they were merged away: longer than a pool may stall before it is killed."""
LIMIT_BYTES = 16 << 20
OBJECTS_BYTES = 600  # of a document besides its texts; those of bare vectors have nearly none


class Recent(msgspec.Struct, eq=False):
    """A document in memory and the bytes of its texts. `shown_at`: the collection's sequence at which it was known to
    be neither deleted nor replaced."""

    document: Document
    size: int
    shown_at: int = -1


class RecentDocuments:
    """Documents that were read lately, by row, in at most `limit_bytes`: one found again, as by probes of an answer,
    needs no file. The ones added first are forgotten first. Not thread-safe.

    A row denotes one document for ever, so none is ever outdated.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._documents: dict[int, Recent] = {}  # in the order of addition

    def find(self, rows: Sequence[int]) -> dict[int, Recent]:
        """Return those that are here."""
        known = self._documents
        return {row: known[row] for row in rows if row in known}

    def add(self, documents: Iterable[tuple[int, Document]]) -> None:
        """Add documents with their rows."""
        for row, document in documents:
            if row not in self._documents:
                size = size_of(document.id, document.title, document.text, document.attributes)
                self._documents[row] = Recent(document, size)
                self._bytes += OBJECTS_BYTES + size
        while self._bytes > self._limit_bytes:
            oldest = self._documents.pop(next(iter(self._documents)))
            self._bytes -= OBJECTS_BYTES + oldest.size


class CollectionDocuments(CollectionReader):
    """Documents by row, of the present state: a row that a pool just found may be deleted.

    A pool applies a write some milliseconds before or after this process. Of a document that was replaced a moment ago,
    it finds the old row or the new one, and either has a text here, even if the old one was merged away since.
    Thread-safe.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the collection; `clock`: of keyword searches, which wait for new documents, and of documents that are
        kept. Raises `CollectionError`."""
        self._created_at = _made_at(directory)
        super().__init__(directory, prepare=lambda segment: segment.keywords)
        self._retired: deque[tuple[float, Callable[[int], Document | None]]] = deque()
        self.state.dropped = self._retire
        self._lock, self._recent = threading.Lock(), RecentDocuments()
        self._current_ns = 0  # when the files were looked at last, and had nothing new
        self._counting, self._counted = threading.Lock(), (object(), 0)  # what was counted last, and its files
        self._clock = clock

    @property
    def was_written(self) -> bool:
        """Whether the collection was ever written to, as of now. Raises `CollectionError`."""
        with self._lock:
            self.poll()
            return super().was_written

    @property
    def summary(self) -> CollectionSummary:
        """The collection's size and properties as of now."""
        state, about = self.state, self.description
        return CollectionSummary(
            is_open=True,
            size=state.count,
            document_bytes=state.file_bytes(DOCUMENTS),
            created_at=self._created_at,
            dim=about.dim,
            metric=about.metric,
            embedder="" if about.embedder is None else embedder_name(about.embedder),
        )

    def check_filter(self, filter: Filter) -> None:
        """Check a filter against the current schema. Raises `InvalidFilter`, `CollectionError`."""
        with self._lock:
            self.poll()
            check_filter(filter, self.state.schema)

    def get(self, rows: Sequence[int], on_read: OnDocument = ignore) -> list[Document | None]:
        """Return the documents of these rows, in order; None for a deleted one, and for an older version of another.

        `on_read` is called with each that is read, before the next. Raises `CollectionError`.
        """
        with self._lock:
            self.poll()
            documents = self._read(rows, on_read)
            self._recent.add((row, one) for row, one in zip(rows, documents, strict=True) if one is not None)
            newest = self._newest(rows)
            return [one if newest[row] == row else None for row, one in zip(rows, documents, strict=True)]

    def _retire(self, part: Part) -> None:
        """Keep the documents of a part that was sealed or merged away, for a while."""
        self._retired.append((self._clock(), part.document_lookup()))
        while self._retired[0][0] < self._clock() - KEPT_S:
            self._retired.popleft()

    def _read(self, rows: Sequence[int], on_read: OnDocument = ignore) -> list[Document | None]:
        """Return the documents of rows; None for a row that was merged away long ago."""
        documents = self.state.documents(rows, on_read)
        for at in [at for at, document in enumerate(documents) if document is None]:
            found = (document for _, lookup in self._retired if (document := lookup(rows[at])) is not None)
            if (retired := next(found, None)) is not None:
                documents[at] = retired
                on_read(retired)
        return documents

    def _newest(self, rows: Sequence[int]) -> dict[int, int | None]:
        """Return for each row the newest of these rows that has a version of its document; None if the document is
        deleted, or the row unknown.

        A document that was deleted and made again is another one, while its first row is among the growing ones.
        """
        deleted = self.state.deleted(rows)
        if not any(deleted):
            return {row: row for row in rows}
        dead = list(compress(rows, deleted))
        ids = {row: one.id for row, one in zip(dead, self._read(dead), strict=True) if one is not None}
        living, versions = self.state.rows_of([*ids.values()]), dict[int, int | None]()
        growing = self.state.growing
        for row, is_dead in zip(rows, deleted, strict=True):
            version = living.get(ids.get(row, "")) if is_dead else row
            if version is not None and growing.replaced_by(version, max(row + 1, growing.first)) < 0:
                version = None
            versions[row] = version
        row_of = {version: row for row, version in sorted(versions.items())}
        return {row: None if version is None else row_of[version] for row, version in versions.items()}

    def get_known(
        self, rows: Sequence[int], since_ns: int = 1, now_ns: int = 0
    ) -> tuple[Sequence[Document], int] | None:
        """As `get`, of documents that are in memory, and the bytes of their texts; None if any has to be read or is
        deleted, a write applied, or another thread waited for.

        All writes before `since_ns` count, at `now_ns`: one look at the files serves all searches that began before it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._current_ns < since_ns:
                if not self.current:
                    return None
                self._current_ns = now_ns
            recent, sequence, size, unsure = self._recent.find(rows), self.state.sequence, 0, list[int]()
            for row, one in recent.items():
                size += one.size
                if one.shown_at != sequence:
                    unsure.append(row)
            if len(recent) < len(rows) or (unsure and any(self.state.deleted(unsure))):
                return None
            for row in unsure:
                recent[row].shown_at = sequence
            return [one.document for one in recent.values()], size
        finally:
            self._lock.release()

    def file_count(self, hidden: Collection[str] = ()) -> int:
        """Return the number of files that are not hidden, of the present state. Raises `CollectionError`."""
        unlisted = frozenset(hidden)
        with self._counting:
            with self._lock:
                self.poll()
                now = self.state.sequence, self.manifest.generation, unlisted
            if self._counted[0] != now:
                self._counted = now, len(Files(self.state, hidden))
            return self._counted[1]

    def files(self, hidden: Container[str] = (), pending: Sequence[str] = ()) -> Files:
        """Return the files of the documents, of the present state: see `Files`. Raises `CollectionError`."""
        with self._lock:
            self.poll()
        return Files(self.state, hidden, pending)  # which looks at all rows, while passages are read

    def align(self, one: Neighbors, other: Neighbors) -> tuple[Neighbors, Neighbors]:
        """Return two results of the same query, in which a document has the same row: where they found two versions of
        it, the newer one of these. Raises `CollectionError`."""
        rows = [row for row in {*one[0].tolist(), *other[0].tolist()} if row >= 0]
        with self._lock:
            self.poll()
            newest = self._newest(rows)
        first, second = (
            np.array([row if (at := newest.get(row)) is None else at for row in ids.tolist()], np.int64)
            for ids in (one[0], other[0])
        )
        return (first, one[1]), (second, other[1])

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Poll, then search: see `search.search_keywords`."""
        with self._lock:
            self.poll()
        return search_keywords(self.state, text, vector, depth, filter, deadline_ns, self._clock)


def _made_at(directory: Path) -> int:
    try:
        return int(os.stat(directory / DESCRIPTION).st_mtime)
    except OSError:
        return 0
