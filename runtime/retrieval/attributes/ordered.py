"""The values of one attribute in ascending order, so that a comparison is a range of them and needs no pass over rows.

A value's *code* is its position in the order, from 1 on; 0 stands for "no value". A set of values is a bit for each
code. Sets of one attribute are combined as bits; only the result is looked up for each row, once.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.attributes.filters import Comparison
from runtime.retrieval.attributes.schema import AttributeType

Bits = NDArray[np.bool_]
Packed = NDArray[np.uint8]
"""A set of values, eight codes a byte: a filter may have a hundred sets of millions of values. The last bits mean
nothing."""
_AT_ONCE = 1 << 18  # values of lists: the interpreter's lock is held meanwhile, less than 1 ms


class OrderedValues:
    """The values of an attribute in rows 0 to `size` - 1.

    ascending: the different values. codes: int32 [n], the code of each value; rows: int64 [n], ascending, its row. A
    row has several values if it has a list.
    """

    def __init__(
        self,
        kind: AttributeType,
        ascending: Sequence[str] | NDArray[Any],
        codes: NDArray[np.int32],
        rows: NDArray[np.int64],
        size: int,
    ) -> None:
        self.size, self.universe = size, len(ascending) + 1
        self.single = kind is not AttributeType.STRINGS
        """Whether a row has at most one value, so that every combination of sets is a set."""
        self._ascending = ascending
        if self.single:
            self._codes = np.zeros(size, np.int32)
            self._codes[rows] = codes
        else:  # the rows of each code, one code after the other
            order = np.argsort(codes, kind="stable")
            self._rows = rows[order]  # int64: other indexes would be converted at each use
            self._ends = np.cumsum(np.bincount(codes, minlength=self.universe))

    @classmethod
    def absent(cls, size: int) -> "OrderedValues":
        """Return an attribute that no row has."""
        return cls(AttributeType.STRING, (), np.empty(0, np.int32), np.empty(0, np.int64), size)

    def strings(self) -> tuple[Sequence[str], NDArray[np.int32]]:
        """Return the different strings of an attribute of the type STRING, ascending, and the code of each row."""
        assert not isinstance(self._ascending, np.ndarray), "strings"
        return self._ascending, self._codes

    def satisfying(self, comparison: Comparison) -> Packed:
        """Return the set of values that satisfy a comparison."""
        found = np.zeros(self.universe, bool)
        for value in comparison.values:
            begin, end = self._range(comparison.operator, value)
            found[begin + 1 : end + 1] = True
        return np.packbits(found)

    def _unpacked(self, wanted: Packed) -> Bits:
        return np.unpackbits(wanted, count=self.universe).view(bool)

    def cost(self, wanted: Packed) -> int:
        """Return how many values `passing` reads or writes."""
        return self.size if self.single else sum(end - begin for begin, end in self._spans(wanted))

    def passing(self, wanted: Packed) -> Bits:
        """Return whether each row has a value in a set, bool [size]."""
        if self.single:
            held = self._unpacked(wanted)
            changes = np.flatnonzero(held[1:] != held[:-1]) + 1
            if held[0] or len(changes) > 2:
                return held.take(self._codes)
            begin, end = (*changes.tolist(), self.universe, self.universe)[:2]  # one range, as most: this is faster
            if end == begin + 1:
                return np.asarray(self._codes == begin)
            return (self._codes >= begin) & (self._codes < end)
        found = np.zeros(self.size, bool)
        for first, end in self._spans(wanted):
            for begin in range(first, end, _AT_ONCE):
                found[self._rows[begin : min(begin + _AT_ONCE, end)]] = True
        return found

    def _spans(self, wanted: Packed) -> list[tuple[int, int]]:
        """Return the ranges of `_rows` of a list's codes."""
        codes = np.flatnonzero(self._unpacked(wanted))
        return list(zip(self._ends[codes - 1].tolist(), self._ends[codes].tolist(), strict=True))

    def _range(self, operator: str, value: Any) -> tuple[int, int]:
        """Return the range of positions that satisfy a comparison with a value."""
        ascending, count = self._ascending, self.universe - 1
        if not isinstance(ascending, np.ndarray):
            low, high = bisect_left(ascending, value), bisect_right(ascending, value)
        else:
            bound = _exact(value, ascending.dtype)
            low, high = (int(np.searchsorted(ascending, bound, side)) for side in ("left", "right"))
            if bound < value:  # the value lies between two that can be stored
                low = high
            elif bound > value:
                high = low
        ranges = {"gt": (high, count), "gte": (low, count), "lt": (0, low), "lte": (0, high)}
        return ranges.get(operator, (low, high))


def _exact(value: Any, dtype: Any) -> Any:
    """Return the number of this type nearest to a value: it is equal, or none lies between the two."""
    if dtype.kind == "f":
        return float(value)
    whole = value if isinstance(value, int) else math.floor(value)
    return int(min(max(whole, -(1 << 63)), (1 << 63) - 1))
