"""The values of one attribute in ascending order, so that a comparison is a range of them and needs no pass over rows.

A value's *code* is its position in the order, from 1 on; 0 stands for "no value".
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
_FEW = 8  # values: more are looked up in a table, which takes about the time of so many comparisons
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
        self.size, self._count = size, len(ascending)
        self.single = kind is not AttributeType.STRINGS
        """Whether a row has at most one value."""
        self._ascending = ascending
        if self.single:
            self._codes = np.zeros(size, np.int32)
            self._codes[rows] = codes
        else:  # the rows of each code, one code after the other
            order = np.argsort(codes, kind="stable")
            self._rows = rows[order]  # int64: other indexes would be converted at each use
            self._ends = np.cumsum(np.bincount(codes, minlength=self._count + 1))

    @classmethod
    def absent(cls, size: int) -> "OrderedValues":
        """Return an attribute that no row has."""
        return cls(AttributeType.STRING, (), np.empty(0, np.int32), np.empty(0, np.int64), size)

    def strings(self) -> tuple[Sequence[str], NDArray[np.int32]]:
        """Return the different strings of an attribute of the type STRING, ascending, and the code of each row."""
        assert not isinstance(self._ascending, np.ndarray), "strings"
        return self._ascending, self._codes

    def cost(self, comparison: Comparison) -> int:
        """Return how many values `passing` reads or writes."""
        if self.single:
            return self.size * min(len(comparison.values), _FEW)
        return sum(int(self._ends[end] - self._ends[begin]) for begin, end in self._ranges(comparison))

    def passing(self, comparison: Comparison) -> Bits:
        """Return whether each row has a value that satisfies a comparison, bool [size]."""
        ranges = self._ranges(comparison)
        if not self.single:
            bits = np.zeros(self.size, bool)
            for first, last in ranges:
                end = int(self._ends[last])
                for begin in range(int(self._ends[first]), end, _AT_ONCE):
                    bits[self._rows[begin : min(begin + _AT_ONCE, end)]] = True
            return bits
        if len(ranges) > _FEW:
            satisfying = np.zeros(self._count + 1, bool)
            for begin, end in ranges:
                satisfying[begin + 1 : end + 1] = True
            return satisfying.take(self._codes)
        bits = self._within(*ranges[0]) if ranges else np.zeros(self.size, bool)
        for begin, end in ranges[1:]:
            np.logical_or(bits, self._within(begin, end), out=bits)
        return bits

    def _within(self, begin: int, end: int) -> Bits:
        """Return whether each row's value is at one of the positions `begin` to `end` - 1 of the order."""
        if end == begin + 1:
            return np.asarray(self._codes == end)
        above = np.asarray(self._codes > begin)
        return above if end == self._count else np.logical_and(above, self._codes <= end, out=above)

    def _ranges(self, comparison: Comparison) -> list[tuple[int, int]]:
        ranges = [self._range(comparison.operator, value) for value in comparison.values]
        return [(begin, end) for begin, end in ranges if begin < end]

    def _range(self, operator: str, value: Any) -> tuple[int, int]:
        """Return the range of positions that satisfy a comparison with a value."""
        ascending, count = self._ascending, self._count
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
