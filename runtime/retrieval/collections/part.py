"""A part of a collection's rows: a sealed segment, or the growing rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.attributes.columns import Bits, Columns
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.documents import Document

Rows = NDArray[np.int64]
OnDocument = Callable[[Document], None]


def ignore(one: object) -> None:
    """An `OnDocument`, for example, that does nothing."""


class Part(ABC):
    """Rows at positions from 0 on, with their vectors, documents and attributes. Rows are deleted, never removed.

    size, count: number of rows, and of those that are not deleted. deletions: how often rows were deleted, so that data
    derived from `alive` can be invalidated.
    """

    def __init__(self, size: int, room: int) -> None:
        self.size = self.count = size
        self.deletions = 0
        self._alive: Bits = np.ones(room, bool)
        self._alive_is_shared = False

    @property
    def alive(self) -> Bits:
        """Whether each row is not deleted, bool [size]. A view."""
        return self._alive[: self.size]

    def snapshot_alive(self) -> Bits:
        """Return `alive` as of now; later deletions do not change it. Do not write into it."""
        self._alive_is_shared = True  # copied by the next deletion
        return self.alive

    def delete(self, rows: Rows) -> Rows:
        """Mark those of the rows that are in this part as deleted; return the positions of those that were not."""
        positions = np.unique(self.positions(rows)) if len(rows) else rows
        positions = positions[self._alive[positions]]
        if len(positions):
            if self._alive_is_shared:
                self._alive, self._alive_is_shared = self._alive.copy(), False
            self._alive[positions] = False
            self.count -= len(positions)
            self.deletions += 1
        return positions

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """The row at each position, int64 [size]."""

    @abstractmethod
    def locate(self, rows: Rows) -> tuple[Bits, Rows]:
        """Return which of some rows are in this part, and the positions of those."""

    @abstractmethod
    def vectors(self, positions: Rows) -> NDArray[np.float32]:
        """Return the vectors at some positions, float32 [n, d], as upserted except for rounding under float16."""

    @abstractmethod
    def find(self, rows: Sequence[int], on_read: OnDocument = ignore) -> dict[int, Document]:
        """Return the documents of those rows that are here, deleted or not; `on_read` is called with each before the
        next is read, in any order. Raises `CollectionError`."""

    @abstractmethod
    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that exist here; some may be deleted. Raises `CollectionError`."""

    # ---- attributes

    @property
    @abstractmethod
    def columns(self) -> Columns:
        """The attributes."""

    def passing(self, filter: Filter, work: Work | None = None, count: int | None = None) -> Bits:
        """Return whether each of the first `count` rows (default: all) passes a filter, bool [count]. On any thread."""
        return self.columns.matching(filter, work, self.size if count is None else count)

    # ---- rows

    def positions(self, rows: Rows) -> Rows:
        """Return the positions of those rows that are in this part."""
        return self.locate(rows)[1]

    def has_alive(self, rows: Rows) -> Bits:
        """Return which of some rows are in this part and not deleted."""
        here, at = self.locate(rows)
        here[here] = self.alive[at]
        return here

    def alive_rows(self) -> Rows:
        """Return the rows that are not deleted."""
        return self.rows[self.alive]

    def dead_rows(self) -> Rows:
        """Return the deleted rows."""
        return self.rows[~self.alive] if self.count < self.size else np.empty(0, np.int64)
