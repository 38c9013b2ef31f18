"""Keyword search of a live collection, by an index of this process that follows the rows.

The index is built at the first search, in a temporary file, on a background thread if there are many documents. A row
denotes one text permanently, so neither sealing nor merging changes the index. Deleted rows are excluded from results,
and the index is rebuilt when most of its rows are deleted.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, Unavailable
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.background_task import BackgroundTask
from runtime.retrieval.collections.keyword_index import KeywordIndex, Rows, distances
from runtime.retrieval.live.state import State
from runtime.retrieval.live.storage.segment import locate_rows
from runtime.retrieval.neighbors import Neighbors

_BATCH_ROWS = 256  # added while a query waits, about 20 ms; more rows are added in the background, in such batches
_MAX_DELETED = 8192  # deleted rows that never cause a rebuild


class _Part(NamedTuple):
    """A segment or the growing rows: ascending rows, which of them may be results, and their vectors by position."""

    rows: Rows
    allowed: Bits
    vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]]


class LiveKeywordSearch:
    """Keyword search over a `State` that its owner advances. Thread-safe."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._index: KeywordIndex | None = None
        self._next_row = self._added = 0
        self._filling: BackgroundTask[tuple[KeywordIndex, int, int]] | None = None

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Search as `KeywordSearch.search_keywords`. Raises `Unavailable` until the index is built."""
        index = self._updated_index()
        state = self._state
        with state.lock:
            growing = state.growing
            bits = growing.alive if filter is None else growing.alive & growing.passing(filter)
            parts = [_Part(np.arange(growing.first, growing.next_row), bits.copy(), growing.vectors)]
            for segment in state.segments:
                bits = segment.alive if filter is None else segment.alive & segment.passing(filter)
                parts.append(_Part(segment.rows, bits, segment.vectors))

        def allowed(rows: Rows) -> Bits:
            found = np.zeros(len(rows), bool)
            for part in parts:
                here, at = locate_rows(part.rows, rows)
                found[here] = part.allowed[at]
            return found

        rows = index.search(text, depth, allowed, deadline_ns)
        vectors = np.empty((len(rows), len(vector)), np.float32)
        for part in parts:
            here, at = locate_rows(part.rows, rows)
            vectors[here] = part.vectors(at)
        return rows, distances(vectors, vector, state.description.metric)

    def _updated_index(self) -> KeywordIndex:
        """Return the index with the current rows; many new rows are added in the background. Raises `Unavailable`."""
        with self._lock:
            if self._filling is not None and self._filling.done:
                done, self._filling = self._filling, None
                if done.result is None:
                    self._reset()
                    raise Unavailable(f"the keyword index of the live collection failed: {done.error_message}")
                self._install(*done.result)
            if self._filling is None:
                self._add_new_rows()
            if self._index is None:
                raise Unavailable("the keyword index of the live collection is being built; try again soon")
            return self._index

    def _add_new_rows(self) -> None:
        """Add the new rows, in the background if there are many."""
        with self._state.lock:
            alive, next_row = self._state.count, self._state.growing.next_row
        index, first = self._index, self._next_row
        size = next_row - first
        if index is None or self._added > 2 * alive + _MAX_DELETED:
            index, first, size = KeywordIndex.temporary(), 0, alive
        if size <= _BATCH_ROWS:
            try:
                self._install(*self._filled(index, first))
            except CollectionError as error:
                self._reset()
                raise Unavailable(f"the keyword index of the live collection failed: {error.message}") from error
        else:
            self._filling = BackgroundTask("keywords", lambda task: self._filled(index, first, task.check_cancelled))

    def _install(self, index: KeywordIndex, next_row: int, added: int) -> None:
        before = self._added if index is self._index else 0
        self._index, self._next_row, self._added = index, next_row, before + added

    def _filled(
        self, index: KeywordIndex, first: int, check: Callable[[int], None] = lambda rows: None
    ) -> tuple[KeywordIndex, int, int]:
        """Add the rows from `first` on; return the index, the next row and the rows added. `check` may raise."""
        with self._state.lock:
            growing, segments = self._state.growing, self._state.segments
            count, dead = growing.count, set(self._state.dead_rows().tolist())
        added = 0

        def add(texts: list[tuple[int, str, str]]) -> None:
            nonlocal added
            check(len(texts))
            alive = [one for one in texts if one[0] not in dead]
            index.add(alive)
            added += len(alive)

        for segment in segments:
            begin = first
            while texts := segment.documents.texts(begin, _BATCH_ROWS):
                add(texts)
                begin = texts[-1][0] + 1
        for at in range(max(first - growing.first, 0), count, _BATCH_ROWS):
            add([(one.row, one.title, one.text) for one in growing.documents[at : min(at + _BATCH_ROWS, count)]])
        return index, growing.first + count, added

    def _reset(self) -> None:
        self._index, self._next_row, self._added = None, 0, 0

    def close(self) -> None:
        """Cancel a running build and close the index. Idempotent."""
        with self._lock:
            if self._filling is not None:
                self._filling.cancel()
                self._filling.join()
                self._filling = None
            if self._index is not None:
                self._index.close()
            self._reset()
