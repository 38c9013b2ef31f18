"""What a text's words find in a live collection: an index of this process's own, which follows the rows.

It is made when it is first asked for, beside everything else where there are many documents, in a temporary file. A row
stands for one text for ever, so that neither sealing nor merging changes anything; rows that are deleted are left out
of what is found, and the index is begun anew when most of it is deleted.
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

_AT_ONCE = 256  # rows that are taken in while a query waits, some 20 ms; of more at a time between two queries
_SPARE = 8192  # deleted rows that are always borne with


class _Part(NamedTuple):
    """A segment, or the growing rows: its rows, ascending, which of them may be found, and the vectors at positions."""

    rows: Rows
    allowed: Bits
    vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]]


class LiveKeywordSearch:
    """Of a state that somebody else brings forward. Any number of threads may ask."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._index: KeywordIndex | None = None
        self._next_row = self._taken = 0
        self._filling: BackgroundTask[tuple[KeywordIndex, int, int]] | None = None

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """As `KeywordSearch.search_keywords`. Raises `Unavailable` until the index is made."""
        index = self._followed()
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

    def _followed(self) -> KeywordIndex:
        """The index, with the rows that are there now; of many new ones, soon. Raises `Unavailable`."""
        with self._lock:
            if self._filling is not None and self._filling.done:
                done, self._filling = self._filling, None
                if done.result is None:
                    self._forget()
                    raise Unavailable(f"the words of a live collection cannot be searched: {done.error_message}")
                self._take(*done.result)
            if self._filling is None:
                self._take_in()
            if self._index is None:
                raise Unavailable("the words of a live collection are being read, for the first time: ask again soon")
            return self._index

    def _take_in(self) -> None:
        """What is new: at once where that is little."""
        with self._state.lock:
            alive, next_row = self._state.count, self._state.growing.next_row
        anew = self._index is None or self._taken > 2 * alive + _SPARE
        index, first = (KeywordIndex.temporary(), 0) if self._index is None or anew else (self._index, self._next_row)
        size = alive if anew else next_row - first
        if size <= _AT_ONCE:
            try:
                self._take(*self._filled(index, first))
            except CollectionError as error:
                self._forget()
                raise Unavailable(f"the words of a live collection cannot be searched: {error.message}") from error
        else:
            self._filling = BackgroundTask("words", lambda work: self._filled(index, first, work.check_cancelled))

    def _take(self, index: KeywordIndex, next_row: int, taken: int) -> None:
        before = self._taken if index is self._index else 0
        self._index, self._next_row, self._taken = index, next_row, before + taken

    def _filled(
        self, index: KeywordIndex, first: int, pace: Callable[[int], None] = lambda rows: None
    ) -> tuple[KeywordIndex, int, int]:
        """An index with the rows from `first` on; the row that comes next, and how many were taken in."""
        with self._state.lock:
            growing, segments = self._state.growing, self._state.segments
            count, dead = growing.count, set(self._state.dead_rows().tolist())
        taken = 0

        def add(texts: list[tuple[int, str, str]]) -> None:
            nonlocal taken
            pace(len(texts))
            alive = [one for one in texts if one[0] not in dead]
            index.add(alive)
            taken += len(alive)

        for segment in segments:
            begin = first
            while texts := segment.documents.texts(begin, _AT_ONCE):
                add(texts)
                begin = texts[-1][0] + 1
        for at in range(max(first - growing.first, 0), count, _AT_ONCE):
            add([(one.row, one.title, one.text) for one in growing.documents[at : min(at + _AT_ONCE, count)]])
        return index, growing.first + count, taken

    def _forget(self) -> None:
        self._index, self._next_row, self._taken = None, 0, 0

    def close(self) -> None:
        """End what is being read. Idempotent."""
        with self._lock:
            if self._filling is not None:
                self._filling.cancel()
                self._filling.join()
                self._filling = None
            if self._index is not None:
                self._index.close()
            self._forget()
