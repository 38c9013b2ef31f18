"""Documents of rows that were merged away a short while ago.

A pool applies a write some milliseconds before or after the process that looks up the documents of its results. So that
every search finds the old version of a document or the new one, never none, a row stays readable there for a while.
"""

import time
from collections import deque
from collections.abc import Callable

from runtime.retrieval.collections.documents import Document

KEPT_S = 60.0
"""How long rows stay readable: longer than a pool may stall before it is killed."""
Lookup = Callable[[int], Document | None]


class RetiredDocuments:
    """The documents that were merged away in the last `KEPT_S` seconds. Not thread-safe: `State.lock` protects it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._retired: deque[tuple[float, Lookup]] = deque()

    def add(self, lookup: Lookup) -> None:
        """Keep a lookup of documents that are no longer part of the state."""
        self._retired.append((self._clock(), lookup))
        while self._retired[0][0] < self._clock() - KEPT_S:
            self._retired.popleft()

    def find(self, row: int) -> Document | None:
        """Return the document of a row."""
        return next((document for _, lookup in self._retired if (document := lookup(row)) is not None), None)
