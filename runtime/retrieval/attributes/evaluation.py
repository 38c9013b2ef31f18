"""Evaluation of filters: which rows pass.

The work, a pass over the rows for each comparison and each `and`, `or` and `not`, is known before it begins.
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np

from runtime.errors import DeadlineExceeded, InvalidFilter
from runtime.retrieval.attributes.filters import AllOf, Comparison, Filter, Not, Scalar
from runtime.retrieval.attributes.ordered import Bits, OrderedValues

MAX_COMPARED = 1 << 29
"""Values that one filter may compare in one collection; more are refused."""
_BITS = 8  # are combined in the time of one comparison


class Work:
    """The work of evaluating one filter, up to MAX_COMPARED. check: called before each pass over the rows; it may raise
    to end the evaluation."""

    def __init__(self, check: Callable[[], None] = lambda: None, limit: int = MAX_COMPARED) -> None:
        self.check, self._limit = check, limit
        self._reserved = 0

    def reserve(self, values: int) -> None:
        """Account for so many more values. Raises `InvalidFilter` if they are too many."""
        self._reserved += values
        if self._reserved > self._limit:
            raise InvalidFilter(
                f"the filter compares {self._reserved:,} values; the limit is {self._limit:,}: use fewer comparisons",
                "filter",
            )


def check_deadline(deadline_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """A `check` of `Work`: raise `DeadlineExceeded` once the deadline has passed."""
    if clock() >= deadline_ns:
        raise DeadlineExceeded("the filter was not evaluated before the deadline")


def evaluate(filter: Filter, column: Callable[[str], OrderedValues], size: int, work: Work) -> Bits:
    """Return whether each row passes, bool [size]. column: returns the values of an attribute.

    Raises `InvalidFilter` before the first pass over the rows if that is too much work.
    """
    filter, ordered = _merged(filter), cache(column)
    work.reserve(_cost(filter, ordered, size))
    return _passing(filter, ordered, work)


def _merged(filter: Filter) -> Filter:
    """Return an equal filter in which the values that an `or` compares an attribute with by eq and in are one `in`, and
    those that an `and` excludes by ne and nin are one `nin`: many values take the time of few."""
    if isinstance(filter, Comparison):
        return filter
    if isinstance(filter, Not):
        return Not(_merged(filter.filter))
    every = isinstance(filter, AllOf)
    values: dict[str, dict[Scalar, None]] = {}
    others: list[Filter] = []
    for part in filter.filters:
        compared = part if not every else part.filter if isinstance(part, Not) else None
        if isinstance(compared, Comparison) and compared.operator in ("eq", "in"):
            values.setdefault(compared.key, {}).update(dict.fromkeys(compared.values))
        else:
            others.append(_merged(part))
    joined: list[Filter] = [Comparison(key, "in", tuple(different)) for key, different in values.items()]
    parts = [*(map(Not, joined) if every else joined), *others]
    return parts[0] if len(parts) == 1 else type(filter)(tuple(parts))


def _cost(filter: Filter, column: Callable[[str], OrderedValues], size: int) -> int:
    if isinstance(filter, Comparison):
        return column(filter.key).cost(filter)
    parts = (filter.filter,) if isinstance(filter, Not) else filter.filters
    return sum(_cost(part, column, size) + size // _BITS for part in parts)


def _passing(filter: Filter, column: Callable[[str], OrderedValues], work: Work) -> Bits:
    if isinstance(filter, Comparison):
        work.check()
        return column(filter.key).passing(filter)
    if isinstance(filter, Not):
        passing = _passing(filter.filter, column, work)
        return np.logical_not(passing, out=passing)
    every = isinstance(filter, AllOf)
    passing = _passing(filter.filters[0], column, work)
    for part in filter.filters[1:]:
        if not passing.any() if every else passing.all():
            break  # no row can pass, or none can fail, any more
        (np.logical_and if every else np.logical_or)(passing, _passing(part, column, work), out=passing)
    return passing
