"""Rows of documents that newer versions replaced a short while ago.

A pool applies a replacement some milliseconds before or after the process that looks up the documents of its results.
So that every search finds the old version or the new one, never none, a replaced row stays readable there for a while,
even if it has been merged away. It is no longer readable once its document is deleted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from runtime.retrieval.collections.documents import Document

KEPT_S = 60.0
"""How long replaced rows stay readable: longer than a pool may stall before it is killed."""
Lookup = Callable[[int], Document | None]


class ReplacedRows:
    """The rows replaced in the last `KEPT_S` seconds, by which rows, and the documents that were merged away since.

    Not thread-safe: `State.lock` protects it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._successors: dict[int, int] = {}
        self._replaced: deque[tuple[float, Sequence[int]]] = deque()
        self._retired: deque[tuple[float, Lookup]] = deque()

    def add(self, rows: Sequence[int], successors: Sequence[int]) -> None:
        """Record that these rows were replaced by others."""
        self._forget()
        if rows and successors:
            self._successors.update(zip(rows, successors, strict=True))
            self._replaced.append((self._clock(), rows))

    def retire(self, lookup: Lookup) -> None:
        """Keep a lookup of documents that are no longer part of the state."""
        self._forget()
        self._retired.append((self._clock(), lookup))

    @property
    def rows(self) -> list[int]:
        """The rows that were replaced."""
        return list(self._successors)

    def newest(self, row: int) -> int:
        """Return the row of the newest version of a row's document; the row itself if it was not replaced."""
        found = row
        while (successor := self._successors.get(found)) is not None:
            found = successor
        if found != row:
            self._successors[row] = found  # a shorter way next time
        return found

    def document(self, row: int) -> Document | None:
        """Return the document of a replaced row that is no longer part of the state."""
        if row not in self._successors:
            return None
        return next((found for _, lookup in self._retired if (found := lookup(row)) is not None), None)

    def _forget(self) -> None:
        since = self._clock() - KEPT_S
        while self._replaced and self._replaced[0][0] < since:
            for row in self._replaced.popleft()[1]:
                self._successors.pop(row, None)
        while self._retired and self._retired[0][0] < since:
            self._retired.popleft()
