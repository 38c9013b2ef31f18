"""Keyword search of a collection: BM25 ranks, with vector distances, over the segments' indexes and the growing rows'.

Searches add the growing rows to an index in memory, each for a short while. While the newer version of a document is
not in the index, the older one is found.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.errors import Unavailable
from runtime.retrieval.attributes.evaluation import Work, check_deadline
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.state import Snapshot, State, vectors_of
from runtime.retrieval.keywords.index import Searched, search_indexes
from runtime.retrieval.neighbors import Neighbors

_ADD_S = 0.25  # how long a search adds rows, or waits for another one that does


class KeywordSearch:
    """Keyword search over a `State` that its owner advances. Thread-safe."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock, self._adding = state, clock, threading.Lock()

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Return the rows that match words of a text and pass a filter, by descending BM25 score, int64 [≤ depth], and
        the distances of their vectors from the text's `vector`, float32 [≤ depth].

        Raises the errors of `search_indexes`, and `Unavailable` if a segment has no index.
        """
        snapshot = self._state.snapshot()
        self._add_rows(snapshot)
        searched = self._searched(snapshot, filter, Work(partial(check_deadline, deadline_ns)))
        rows = search_indexes(searched, text, depth, deadline_ns)
        return rows, distances(vectors_of(snapshot.parts, rows, len(vector)), vector, self._state.description.metric)

    def _searched(self, snapshot: Snapshot, filter: Filter | None, work: Work) -> list[Searched]:
        passing, growing = snapshot.passing(filter, work), snapshot.growing
        count = len(growing.postings)
        if count < len(passing[-1]):  # the rows whose newer versions are not in the index yet remain visible
            until = growing.first + count
            rows = growing.replaced_by(until + np.flatnonzero(snapshot.alive[-1][count:]), until)
            for number, part in enumerate(snapshot.parts):
                at = part.positions(rows)
                at, passing[number] = at[at < len(passing[number])], passing[number].copy()
                passing[number][at] = True if filter is None else part.passing(filter)[at]
            passing[-1] = passing[-1][:count]
        searched = []
        for part, bits in zip(snapshot.parts, passing, strict=True):
            if isinstance(part, Segment) and part.lacks_keywords:
                where = self._state.directory
                raise Unavailable(f"{where} has a segment without a keyword index: `trinity index compact` makes one")
            words = part.keywords if isinstance(part, Segment) else growing.postings
            if words is not None:
                searched.append(Searched(words, part.rows, bits))
        return searched

    def _add_rows(self, snapshot: Snapshot) -> None:
        """Add the growing rows to the index: all that can be in `_ADD_S`, or one more."""
        until, postings, count = self._clock() + _ADD_S, snapshot.growing.postings, len(snapshot.alive[-1])
        while len(postings) < count:
            with self._adding:
                if len(postings) < count:
                    document = snapshot.growing.documents[len(postings)]
                    postings.add(document.title, document.text)
            if self._clock() >= until:
                break


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)
