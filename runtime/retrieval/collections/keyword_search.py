"""Keyword search of a collection: BM25 ranks, with vector distances, over the segments' indexes and the growing rows'.

The growing rows are added to an index in memory, and segments of earlier versions, which have no index, are read into
temporary ones, on a background thread. A search waits briefly for it. While the newer version of a document is not in
the index, the older one is found.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from runtime.errors import Unavailable
from runtime.retrieval.attributes.evaluation import BoundedWork, check_deadline
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collections.description import DOCUMENTS, KEYWORDS
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.keyword_index import KeywordFile, Postings, Searched, search_indexes
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.state import Snapshot, State
from runtime.retrieval.neighbors import Neighbors

_WAIT_S = 0.25  # how long a search waits for rows that are being added


class KeywordSearch:
    """Keyword search over a `State` that its owner advances. Thread-safe."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the files of the segments. Raises `CollectionError`."""
        self._state, self._clock = state, clock
        self._lock = threading.Lock()
        self._files: WeakKeyDictionary[Segment, KeywordFile] = WeakKeyDictionary()
        self._grown: WeakKeyDictionary[GrowingSegment, Postings] = WeakKeyDictionary()
        self._adding: BackgroundTask[None] | None = None
        for segment in state.segments:
            self._file_of(segment)

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Return the rows that match words of a text and pass a filter, by descending BM25 score, int64 [≤ depth], and
        the distances of their vectors from the text's `vector`, float32 [≤ depth].

        Raises the errors of `search_indexes`, and `Unavailable` until segments without an index were read.
        """
        snapshot = self._state.snapshot()
        self._wait_for_rows(snapshot)
        growing, segments = snapshot.growing, snapshot.segments
        searched = self._searched(snapshot, filter, BoundedWork(partial(check_deadline, deadline_ns)))
        rows = search_indexes(searched, text, depth, deadline_ns)
        vectors = np.empty((len(rows), len(vector)), np.float32)
        for segment in segments:
            here, at = segment.locate(rows)
            vectors[here] = segment.vectors(at)
        grown = rows >= growing.first
        vectors[grown] = growing.vectors(rows[grown] - growing.first)
        return rows, distances(vectors, vector, self._state.description.metric)

    def _searched(self, snapshot: Snapshot, filter: Filter | None, work: BoundedWork) -> list[Searched]:
        growing, segments = snapshot.growing, snapshot.segments
        passing, recent = snapshot.passing(filter, work)
        postings = self._postings_of(growing)
        count = min(len(postings), len(recent))
        if count < len(recent):  # the rows whose newer versions are not in the index yet remain visible
            rows = self._state.replaced_by(growing.first + count)
            for number, segment in enumerate(segments):
                _, at = segment.locate(rows)
                passing[number] = passing[number].copy()
                passing[number][at] = True if filter is None else segment.passing(filter)[at]
            at = rows[(rows >= growing.first) & (rows < growing.first + count)] - growing.first
            recent = recent.copy()
            recent[at] = True if filter is None else growing.passing(filter)[at]
        files = [(self._file_of(one), one, bits) for one, bits in zip(segments, passing, strict=True)]
        found = [Searched(file, one.rows, bits) for file, one, bits in files if file is not None]
        return [*found, Searched(postings, np.arange(growing.first, growing.first + count), recent[:count])]

    def _file_of(self, segment: Segment) -> KeywordFile | None:
        """Return a segment's index; None for one of bare vectors, or one that was not read yet. Raises
        `CollectionError`."""
        with self._lock:
            if segment not in self._files and KEYWORDS in segment.files:
                self._files[segment] = KeywordFile.open(segment.path / KEYWORDS, segment.size)
            return self._files.get(segment)

    def _postings_of(self, growing: GrowingSegment) -> Postings:
        with self._lock:
            return self._grown.setdefault(growing, Postings())

    # ---- rows that are added in the background

    def _unread(self, snapshot: Snapshot) -> list[Segment]:
        """Return the segments whose documents are in no index."""
        return [one for one in snapshot.segments if DOCUMENTS in one.files and self._file_of(one) is None]

    def _wait_for_rows(self, snapshot: Snapshot) -> None:
        """Wait until all rows are in an index, for `_WAIT_S` at most.

        Raises `Unavailable` if those of a segment are not then, or cannot be read.
        """
        until, count = self._clock() + _WAIT_S, len(snapshot.growing_alive)
        while self._unread(snapshot) or len(self._postings_of(snapshot.growing)) < count:
            with self._lock:
                if self._adding is None or self._adding.done:
                    self._adding = BackgroundTask("keywords", lambda task: self._add(snapshot, task))
                task = self._adding
            task.join(max(until - self._clock(), 0))
            if task.done and task.error_message:
                raise Unavailable(f"the keyword index of the collection failed: {task.error_message}")
            if self._clock() >= until:
                break
        if self._unread(snapshot):
            raise Unavailable("the keyword index of the collection is being built; try again soon")

    def _add(self, snapshot: Snapshot, task: BackgroundTask[None]) -> None:
        def texts(segment: Segment) -> Iterator[tuple[str, str]]:
            for _, title, text in segment.documents.texts():
                task.check_cancelled(len(text))
                yield title, text

        growing, postings = snapshot.growing, self._postings_of(snapshot.growing)
        for document in growing.documents[len(postings) : len(snapshot.growing_alive)]:
            task.check_cancelled(len(document.text))
            postings.add(document.title, document.text)
        for segment in self._unread(snapshot):
            file = KeywordFile.temporary(texts(segment))
            with self._lock:
                self._files[segment] = file

    def close(self) -> None:
        """Cancel a running build and close the files. Idempotent."""
        if self._adding is not None:
            self._adding.cancel()
            self._adding.join()
        with self._lock:
            for file in self._files.values():
                file.close()


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)
