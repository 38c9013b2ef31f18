"""The values of one attribute in ascending order, so that a comparison is a range of them and needs no pass over rows.

A value's *code* is its position in the order, from 1 on; 0 stands for "no value". A set of codes is given by its
*edges*, the ascending codes at which membership changes: (2, 5, 7, 8) is {2, 3, 4, 7}. Sets of one attribute are
combined by their edges alone; only the result is compared with rows, once.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.attributes.filters import Comparison
from runtime.retrieval.attributes.schema import AttributeType

Bits = NDArray[np.bool_]
Edges = tuple[int, ...]
_AT_ONCE = 1 << 18  # values of lists: the interpreter's lock is held meanwhile, less than 1 ms
_FEW_SPANS = 4  # are compared with the codes one by one; more by a table of all codes


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

    # ---- sets of codes

    def edges(self, comparison: Comparison) -> Edges:
        """Return the codes that satisfy a comparison."""
        if comparison.operator in ("eq", "in"):
            return _of_codes(self._code(value) for value in comparison.values)
        begin, end = self._range(comparison.operator, comparison.values[0])
        return (begin + 1, end + 1) if begin < end else ()

    def complement(self, edges: Edges) -> Edges:
        """Return the other codes, with "no value"."""
        found = (0, *edges, self.universe)
        found = found[2:] if found[0] == found[1] else found
        return found[:-2] if found and found[-1] == found[-2] else found

    def _code(self, value: Any) -> int:
        """Return the code of a value, 0 if it does not occur."""
        begin, end = self._range("eq", value)
        return begin + 1 if begin < end else 0

    def _range(self, operator: str, value: Any) -> tuple[int, int]:
        """Return the range of positions that satisfy a comparison."""
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
        return {"eq": (low, high), "gt": (high, count), "gte": (low, count), "lt": (0, low), "lte": (0, high)}[operator]

    # ---- rows

    def cost(self, edges: Edges) -> int:
        """Return how many values `passing` reads or writes."""
        if self._is_constant(edges):
            return 0
        if not self.single:
            return sum(end - begin for begin, end in self._spans(edges))
        return self.size + (self.universe if len(edges) > 2 * _FEW_SPANS else 0)

    def passing(self, edges: Edges) -> Bits:
        """Return whether each row has a value in a set, bool [size]."""
        if self._is_constant(edges):
            return np.full(self.size, bool(edges))
        found: Bits
        if not self.single:
            found = np.zeros(self.size, bool)
            for first, end in self._spans(edges):
                for begin in range(first, end, _AT_ONCE):
                    found[self._rows[begin : min(begin + _AT_ONCE, end)]] = True
        elif len(edges) > 2 * _FEW_SPANS:
            toggles = np.zeros(self.universe + 1, np.int8)
            toggles[list(edges)] = 1
            found = np.bitwise_xor.accumulate(toggles).view(bool).take(self._codes)
        else:
            found = _within(self._codes, *edges[:2])
            for at in range(2, len(edges), 2):
                found |= _within(self._codes, *edges[at : at + 2])
        return found

    def _is_constant(self, edges: Edges) -> bool:
        """Whether no row passes, or every row."""
        return not edges or (self.single and edges == (0, self.universe))

    def _spans(self, edges: Edges) -> list[tuple[int, int]]:
        """Return the ranges of `_rows` of a list's codes."""
        ends = self._ends[np.array(edges, np.int64) - 1].tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))


def combine(sets: Sequence[Edges], needed: int) -> Edges:
    """Return the codes that are in at least `needed` sets."""
    if len(sets) == 1:
        return sets[0]
    at = np.array([edge for edges in sets for edge in edges], np.int64)
    order = np.argsort(at, kind="stable")
    depth = np.cumsum(np.where(order % 2 == 0, 1, -1))  # each set has an even number of edges
    at, inside = at[order], depth >= needed
    last = np.append(at[1:] != at[:-1], True)[: len(at)]  # of several edges at one code
    at, inside = at[last], inside[last]
    changed = inside != np.append(False, inside[:-1])[: len(at)]
    return tuple(at[changed].tolist())


def _of_codes(codes: Iterable[int]) -> Edges:
    edges: list[int] = []
    for code in sorted({code for code in codes if code}):
        if edges and edges[-1] == code:
            edges[-1] = code + 1
        else:
            edges += (code, code + 1)
    return tuple(edges)


def _within(codes: NDArray[np.int32], begin: int, end: int) -> Bits:
    if end == begin + 1:
        return np.asarray(codes == begin)
    found = codes >= begin
    found &= codes < end
    return np.asarray(found)


def _exact(value: Any, dtype: Any) -> Any:
    """Return the number of this type nearest to a value: it is equal, or none lies between the two."""
    if dtype.kind == "f":
        return float(value)
    whole = value if isinstance(value, int) else math.floor(value)
    return int(min(max(whole, -(1 << 63)), (1 << 63) - 1))
