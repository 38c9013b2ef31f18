"""Keyword search of a collection: BM25 ranks, with vector distances, by an index of this process that follows the rows.

The index begins with those of a bulk load. Without them it is built at the first search, in a temporary file, on a
background thread if there are many documents. A row
denotes one text permanently, so neither sealing nor merging changes the index. Deleted rows are not visible to
searches, and the index is rebuilt when most of its rows are deleted, to release their space.

A search waits briefly for rows that are added in the background. While the newer version of a document is not in the
index, the older one is found.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, Unavailable
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.evaluation import BoundedWork, check_deadline
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collections.description import KEYWORDS
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.keyword_index import KeywordIndex, Rows, distances
from runtime.retrieval.collections.segment import Segment, locate_rows
from runtime.retrieval.collections.state import Snapshot, State
from runtime.retrieval.neighbors import Neighbors

_BATCH_ROWS = 256  # added while a query waits, about 20 ms; more rows are added in the background, in such batches
_BATCH_CHARACTERS = 1 << 18  # the same, of rows with long texts
_MAX_DELETED = 8192  # deleted rows that never cause a rebuild
_WAIT_S = 0.25  # how long a search waits for the rows that are added in the background
_FIRST_WAIT_S = 1.0  # the same, of the first ones: a small collection is searched at once


class _Filled(NamedTuple):
    """An index of the rows below `next_row`, without those that were deleted before they were added.

    rows: int64: the row of each of the index's documents; in the first segments of several shards they ascend within
    each, behind these they ascend. More documents may be added meanwhile.
    """

    words: KeywordIndex
    rows: Rows
    next_row: int

    def locate(self, queried: Rows) -> tuple[Bits, NDArray[np.int64]]:
        """Return which of some rows are in the index, and the numbers of their documents."""
        order = np.argsort(self.rows, kind="stable")  # in linear time if they ascend
        here, places = locate_rows(self.rows[order], queried)
        return here, order[places]


class _Places(NamedTuple):
    """Which rows of a segment are in the index, and their documents' numbers there."""

    here: Bits
    numbers: NDArray[np.int64]


class KeywordSearch:
    """Keyword search over a `State` that its owner advances. Thread-safe."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.Lock()
        self._filled = _of_bulk_load(state)
        self._filling: BackgroundTask[_Filled] | None = None  # adds rows to the index
        self._rebuilding: BackgroundTask[_Filled] | None = None  # makes another index
        self._places: dict[Segment, _Places] = {}  # of segments all of whose rows are below `next_row`

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Return the rows that match words of a text and pass a filter, by descending BM25 score, int64 [≤ depth], and
        the distances of their vectors from the text's `vector`, float32 [≤ depth].

        Raises the errors of `KeywordIndex.search`, and `Unavailable` until the index is built.
        """
        state = self._state
        work = BoundedWork(partial(check_deadline, deadline_ns))
        with self._lock:
            filled = self._updated()
            snapshot = state.snapshot()
            growing, segments = snapshot.growing, snapshot.segments
            if filter is None and filled.next_row == len(filled.rows) == state.count == growing.next_row:
                visible = np.ones(len(filled.rows), bool)  # as of a bulk load that was never written to
            else:
                visible = self._visible(filled, snapshot, filter, work)
        rows = filled.rows[filled.words.search(text, depth, visible, deadline_ns)]
        vectors = np.empty((len(rows), len(vector)), np.float32)
        for segment in segments:
            here, at = segment.locate(rows)
            vectors[here] = segment.vectors(at)
        grown = rows >= growing.first
        vectors[grown] = growing.vectors(rows[grown] - growing.first)
        return rows, distances(vectors, vector, state.description.metric)

    def _visible(self, filled: _Filled, snapshot: Snapshot, filter: Filter | None, work: BoundedWork) -> Bits:
        """Return which of the index's documents are not deleted and pass a filter."""
        passing, recent = snapshot.passing(filter, work)
        growing, segments = snapshot.growing, snapshot.segments
        visible = np.zeros(len(filled.rows), bool)
        begin, end = np.searchsorted(filled.rows, [growing.first, growing.first + len(recent)])
        visible[begin:end] = recent[filled.rows[begin:end] - growing.first]
        self._places = {one: self._places[one] for one in segments if one in self._places}
        for segment, bits in zip(segments, passing, strict=True):
            places = self._places_of(segment, filled)
            visible[places.numbers] = bits[places.here]
        if filled.next_row < growing.next_row:
            self._keep_replaced(visible, filled, growing, segments, filter)
        return visible

    def _keep_replaced(
        self,
        visible: Bits,
        filled: _Filled,
        growing: GrowingSegment,
        segments: Sequence[Segment],
        filter: Filter | None,
    ) -> None:
        """Keep the rows visible whose newer versions are not in the index yet."""
        rows = self._state.replaced_by(filled.next_row)
        here, numbers = filled.locate(rows)
        rows = rows[here]
        for segment in segments:
            inside, at = segment.locate(rows)
            visible[numbers[inside]] = True if filter is None else segment.passing(filter)[at]
        inside = rows >= growing.first
        visible[numbers[inside]] = True if filter is None else growing.passing(filter)[rows[inside] - growing.first]

    def _places_of(self, segment: Segment, filled: _Filled) -> _Places:
        places = self._places.get(segment)
        if places is None:
            places = _Places(*filled.locate(segment.rows))
            if segment.last_row < filled.next_row:
                self._places[segment] = places
        return places

    def _updated(self) -> _Filled:
        """Return the index with the rows as of now; without some of them if adding them takes longer than `_WAIT_S`.

        Raises `Unavailable`.
        """
        wanted, until = self._state.growing.next_row, self._clock() + (_WAIT_S if self._filled else _FIRST_WAIT_S)
        while True:
            if self._rebuilding is not None and self._rebuilding.done:
                done, self._rebuilding = self._rebuilding, None
                self._install(self._result(done))
            if self._filling is not None and self._filling.done:
                done, self._filling = self._filling, None
                added = self._result(done)
                if self._filled is None or added.words is self._filled.words:  # else it was rebuilt meanwhile
                    self._install(added)
            if self._filling is None:
                self._add_new_rows()
            filled, left_s = self._filled, until - self._clock()
            if filled is not None and (self._filling is None or filled.next_row >= wanted or left_s <= 0):
                return filled
            if left_s <= 0 or self._filling is None:
                raise Unavailable("the keyword index of the collection is being built; try again soon")
            self._filling.join(left_s)

    def _result(self, done: BackgroundTask[_Filled]) -> _Filled:
        if done.result is None:
            self._reset()
            raise Unavailable(f"the keyword index of the collection failed: {done.error_message}")
        return done.result

    def _add_new_rows(self) -> None:
        """Add the new rows, in the background if there are many. Rebuild the index if most of its rows are deleted."""
        with self._state.lock:
            alive, growing = self._state.count, self._state.growing
        filled = self._filled or _no_rows()
        if self._filled and self._rebuilding is None and len(filled.rows) > 2 * alive + _MAX_DELETED:
            self._rebuilding = BackgroundTask("keywords", self._rebuilt)
        if filled.next_row >= growing.first and _is_short(growing, filled.next_row):
            try:
                self._install(self._fill(filled))
            except CollectionError as error:
                self._reset()
                raise Unavailable(f"the keyword index of the collection failed: {error.message}") from error
        else:
            self._filling = BackgroundTask("keywords", lambda task: self._fill(filled, task.check_cancelled))

    def _rebuilt(self, task: BackgroundTask[_Filled]) -> _Filled:
        """Return another index, with nearly all rows: the second turn adds those written during the first."""
        return self._fill(self._fill(_no_rows(), task.check_cancelled), task.check_cancelled)

    def _install(self, filled: _Filled) -> None:
        if self._filled is None or filled.words is not self._filled.words:
            self._places = {}
        self._filled = filled

    def _fill(self, filled: _Filled, check: Callable[[int], None] = lambda rows: None) -> _Filled:
        """Add the rows from `next_row` on to the index, in order. `check` may raise."""
        with self._state.lock:
            growing, segments = self._state.growing, self._state.segments
            count, dead = growing.count, set(self._state.dead_rows().tolist())
        begin = max(filled.next_row - growing.first, 0)
        grown = ((one.row, one.title, one.text) for one in growing.documents[begin:count])
        added = [filled.rows]
        texts = chain(heapq.merge(*(one.documents.texts(filled.next_row) for one in segments)), grown)
        for batch in _batches(texts):
            check(len(batch))
            alive = [one for one in batch if one[0] not in dead]
            filled.words.add((title, text) for _, title, text in alive)
            added.append(np.array([row for row, _, _ in alive], np.int64))
        return _Filled(filled.words, np.concatenate(added), growing.first + count)

    def _reset(self) -> None:
        self._filled, self._places = None, {}

    def close(self) -> None:
        """Cancel a running build and close the index. Idempotent."""
        with self._lock:
            for task in (self._filling, self._rebuilding):
                if task is not None:
                    task.cancel()
                    task.join()
            self._filling = self._rebuilding = None
            if self._filled is not None:
                self._filled.words.close()
            self._reset()


def _no_rows() -> _Filled:
    return _Filled(KeywordIndex.temporary(), np.empty(0, np.int64), 0)


def _of_bulk_load(state: State) -> _Filled | None:
    """Return the indexes that a bulk load made of all of its rows; None without them. Raises `CollectionError`."""
    segments = [segment for segment in state.segments if KEYWORDS in segment.files]
    rows = np.concatenate([np.empty(0, np.int64), *(segment.rows for segment in segments)])
    if not segments or len(rows) != max(segment.last_row for segment in segments) + 1:
        return None
    return _Filled(KeywordIndex.open(*(segment.path / KEYWORDS for segment in segments)), rows, len(rows))


def _is_short(growing: GrowingSegment, first: int) -> bool:
    """Return whether the growing rows from `first` on are so few, and their texts so short, that a query may wait."""
    new = growing.documents[first - growing.first : growing.count]
    return len(new) <= _BATCH_ROWS and sum(len(one.title) + len(one.text) for one in new) <= _BATCH_CHARACTERS


def _batches(texts: Iterator[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    """Yield the rows in batches for which searches can wait; a row with a long text is a batch of its own."""
    batch: list[tuple[int, str, str]] = []
    characters = 0
    for row in texts:
        batch.append(row)
        characters += len(row[1]) + len(row[2])
        if len(batch) == _BATCH_ROWS or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
