"""A part of a collection's rows: a sealed segment, or the growing rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gpu.index.data import bitmap
from runtime.retrieval.attributes.columns import Bits, Columns
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.keywords.index import Searched

Rows = NDArray[np.int64]
OnDocument = Callable[[Document], None]
_WORD = 64  # bits
_BYTES = np.uint8(1) << np.arange(8, dtype=np.uint8)  # each bit of a byte of a bitmap


def ignore(one: object) -> None:
    """An `OnDocument`, for example, that does nothing."""


class RowSet:
    """A set of the rows of a part, for example of those that are not deleted. Immutable once somebody else has it.

    bits: a bitmap (`gpu.index.data.bitmap`). size, count: number of rows of the part, and of those in the set.
    """

    def __init__(self, bits: NDArray[np.uint64], size: int, count: int) -> None:
        self.bits, self.size, self.count = bits, size, count

    @classmethod
    def of(cls, mask: Bits) -> "RowSet":
        """Return a set from bool [size]."""
        return cls(bitmap(mask, len(mask)), len(mask), int(np.count_nonzero(mask)))

    @cached_property
    def mask(self) -> Bits:
        """Whether each row is in the set, bool [size]. Do not write into it."""
        bits: Bits = np.unpackbits(self.bits.view(np.uint8), count=self.size, bitorder="little").view(bool)
        return bits

    def at(self, positions: Rows) -> Bits:
        """Return whether the rows at some positions are in the set."""
        there: Bits = self.bits.view(np.uint8)[positions >> 3] & _BYTES[positions & 7] != 0
        return there

    def without(self, positions: Rows, *, reuse: bool = False) -> "RowSet":
        """Return it without the rows at some positions; itself if none of them is in it.

        reuse: nobody else has it, so that its bitmap may become the result's.
        """
        if not len(positions):
            return self
        if len(positions) > 1:
            positions = np.unique(positions)  # each counts once
        places, masks = positions >> 3, _BYTES[positions & 7]
        gone = np.count_nonzero(self.bits.view(np.uint8)[places] & masks)
        if not gone:
            return self
        bits = self.bits if reuse else self.bits.copy()
        np.bitwise_and.at(bits.view(np.uint8), places, ~masks)
        return RowSet(bits, self.size, self.count - int(gone))

    def extended(self, more: int) -> "RowSet":
        """Return the set of a part that has more rows behind, with these."""
        full, taken = divmod(self.size, _WORD)
        last = ((1 << more) - 1) << taken | (int(self.bits[full]) if taken else 0)
        words = np.frombuffer(last.to_bytes(-(-(taken + more) // _WORD) * _WORD // 8, "little"), np.uint64)
        return RowSet(np.concatenate([self.bits[:full], words]), self.size + more, self.count + more)


class Part(ABC):
    """Rows at positions from 0 on, with their vectors, documents and attributes. Rows are deleted, never removed."""

    def __init__(self, size: int) -> None:
        self._alive, self._given = RowSet.of(np.ones(size, bool)), False  # whether others may have it

    @property
    def alive(self) -> RowSet:
        """The rows that are not deleted, as of now. The next deletion copies them: of many rows, that takes long."""
        self._given = True
        return self._alive

    @property
    def size(self) -> int:
        """Number of rows."""
        return self._alive.size

    @property
    def count(self) -> int:
        """Number of rows that are not deleted."""
        return self._alive.count

    def delete(self, rows: Rows) -> None:
        """Mark those of the rows that are in this part as deleted."""
        alive = self._alive.without(self.positions(rows), reuse=not self._given)
        if alive is not self._alive:
            self._alive, self._given = alive, False

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
    def document_lookup(self) -> Callable[[int], Document | None]:
        """Return a lookup of the documents by row that keeps neither the index nor the vectors in memory, if it can."""

    @abstractmethod
    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that exist here; some may be deleted. Raises `CollectionError`."""

    @abstractmethod
    def searched(self, visible: Bits) -> Searched | None:
        """Return the keyword index for a search of the rows that are visible; None for bare vectors. Growing rows that
        are not in it yet are left out.

        Raises `Unavailable` if it has none, and `CollectionError`.
        """

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
        here[here] = self._alive.at(at)
        return here

    def alive_rows(self) -> Rows:
        """Return the rows that are not deleted."""
        return self.rows[self._alive.mask]

    def dead_rows(self) -> Rows:
        """Return the deleted rows."""
        return self.rows[~self._alive.mask] if self.count < self.size else np.empty(0, np.int64)
