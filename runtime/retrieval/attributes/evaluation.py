"""Evaluation of filters: which rows pass.

A filter is first reduced: negations move to the comparisons, and comparisons of one attribute are combined to one set
of its values. So the work, which is known before it begins, is a pass over the rows for each attribute of each `and`
and `or`, not for each comparison.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from runtime.errors import DeadlineExceeded, InvalidFilter
from runtime.retrieval.attributes.filters import AllOf, Comparison, Filter, Not
from runtime.retrieval.attributes.ordered import Bits, OrderedValues, Packed

MAX_COMPARED = 1 << 29
"""Values that one filter may compare in one collection; more are refused."""
_BITS = 8  # are combined in the time of one comparison, and take one byte


class Work(Protocol):
    """The work of evaluating one filter."""

    def reserve(self, values: int) -> None:
        """Account for so many more values. Raises `InvalidFilter` if they are too many."""

    def check(self) -> None:
        """Called before each pass over the rows. May raise to end the evaluation."""


class BoundedWork:
    """Work up to MAX_COMPARED. check: called before each pass over the rows."""

    def __init__(self, check: Callable[[], None] = lambda: None, limit: int = MAX_COMPARED) -> None:
        self.check, self._limit = check, limit
        self._reserved = 0

    def reserve(self, values: int) -> None:
        self._reserved += values
        if self._reserved > self._limit:
            raise InvalidFilter(
                f"the filter compares {self._reserved:,} values; the limit is {self._limit:,}: use fewer comparisons",
                "filter",
            )


def check_deadline(deadline_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """A `check` of BoundedWork: raise `DeadlineExceeded` once the deadline has passed."""
    if clock() >= deadline_ns:
        raise DeadlineExceeded("the filter was not evaluated before the deadline")


class _Values(NamedTuple):
    """The rows with a value in a set; `negated` (of lists only): the other rows."""

    column: OrderedValues
    wanted: Packed
    negated: bool = False


class _Joint(NamedTuple):
    """The rows that pass every part, or any of them."""

    every: bool
    parts: "list[_Values | _Joint]"


def evaluate(filter: Filter, column: Callable[[str], OrderedValues], size: int, work: Work) -> Bits:
    """Return whether each row passes, bool [size]. column: returns the values of an attribute.

    Raises `InvalidFilter` before the first pass over the rows if that is too much work.
    """
    reduced = _reduced(filter, column, False, work)
    work.reserve(_cost(reduced, size))
    return _passing(reduced, work)


def _reduced(filter: Filter, column: Callable[[str], OrderedValues], negated: bool, work: Work) -> _Values | _Joint:
    if isinstance(filter, Comparison):
        values = column(filter.key)
        work.reserve(values.universe // _BITS)
        wanted = values.satisfying(filter)
        return _Values(values, ~wanted) if negated and values.single else _Values(values, wanted, negated)
    if isinstance(filter, Not):
        return _reduced(filter.filter, column, not negated, work)
    every = isinstance(filter, AllOf) != negated
    return _joined(every, (_reduced(part, column, negated, work) for part in filter.filters))


def _joined(every: bool, parts: "Iterable[_Values | _Joint]") -> _Values | _Joint:
    """Join parts; combine the sets of each attribute where the result is a set again."""
    joined: list[_Values | _Joint] = []
    sets: dict[int, Packed] = {}  # by the column's id
    for part in parts:
        for one in part.parts if isinstance(part, _Joint) and part.every == every else [part]:
            if isinstance(one, _Values) and (one.column.single or one.negated == every):
                both = one.column.single and every  # not a and not b: not (a or b)
                known = sets.get(id(one.column))
                if known is not None:
                    (np.bitwise_and if both else np.bitwise_or)(known, one.wanted, out=known)
                    continue
                sets[id(one.column)] = one.wanted
            joined.append(one)
    return joined[0] if len(joined) == 1 else _Joint(every, joined)


def _cost(node: _Values | _Joint, size: int) -> int:
    if isinstance(node, _Values):
        return node.column.cost(node.wanted)
    return sum(_cost(part, size) + size // _BITS for part in node.parts)


def _passing(node: _Values | _Joint, work: Work) -> Bits:
    if isinstance(node, _Values):
        work.check()
        found = node.column.passing(node.wanted)
        return np.logical_not(found, out=found) if node.negated else found
    join = np.logical_and if node.every else np.logical_or
    found = _passing(node.parts[0], work)
    for part in node.parts[1:]:
        if not found.any() if node.every else found.all():
            break  # no row can pass, or none can fail, any more
        join(found, _passing(part, work), out=found)
    return found
