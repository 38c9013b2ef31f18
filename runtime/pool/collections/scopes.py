"""Scopes of filtered searches: a *scope* is a list of indexes and, for each, a bitmap of the rows that may be found.

A filter is evaluated once, on a thread of its own (`resolver.py`), to a bitmap for each index; later requests with the
same filter find its scope by number, in compiled code. Scopes are bounded in number and bytes: the least recently used
ones are evicted, unless a query in the pool uses them. A collection also has a scope of its own, of its rows that
are not deleted. When the collection changes its filters are invalidated, and queries in flight finish on the parts that
they started with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ipc.native.records import Array, Record, address_of, new_array, numpy_view, record
from runtime.errors import InvalidRequest, Overloaded
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter, binds, check_filter, decode_filter
from runtime.retrieval.attributes.schema import Schema

MAX_SCOPES = 1024
MAX_BITMAP_BYTES = 64 << 20
_MOST_RETIRED = 64  # lists of parts, before those that no query uses are dropped

InUse = Callable[[int], bool]
"""Returns whether queries in the pool use the parts at an address."""


@record
class ScopePart(Record):
    """A part of a scope, for compiled code."""

    index: int  # the engine's number
    allowed: int  # address of its bitmap, 0: all rows
    passing: int  # the bits that are set


@record
class Scope(Record):
    """A scope, for compiled code."""

    parts: Array[ScopePart]
    part_count: int
    used_ns: int  # when a query last used it


class Part(NamedTuple):
    """An index, by the engine's number, and its rows that may be found: `passing` bits of a `bitmap`, None for all."""

    number: int
    bits: npt.NDArray[np.uint64] | None
    passing: int


class Parts:
    """The parts of a scope, at least one, with their records for compiled code."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)  # owns the bitmaps
        self.records = new_array(ScopePart, len(self.parts))
        for number, part in enumerate(self.parts):
            allowed = 0 if part.bits is None else int(part.bits.ctypes.data)
            self.records[number] = ScopePart(index=part.number, allowed=allowed, passing=part.passing)
        self.address = address_of(self.records)
        self.nbytes = sum(part.bits.nbytes for part in parts if part.bits is not None)

    @property
    def indexes(self) -> set[int]:
        """The engine's numbers of the indexes."""
        return {part.number for part in self.parts}


Finish = Callable[[], Sequence[Part] | None]
"""Returns the parts of an evaluated filter as of now, at least one; None if the filter must be evaluated again."""


@dataclass(frozen=True)
class FilterableCollection:
    """A collection that accepts filters.

    schema: returns the current schema. passing: evaluates a filter, on any thread. demanded: the attribute that every
    filter must bind, or "".
    """

    schema: Callable[[], Schema]
    passing: Callable[[Filter, Work], Finish]
    demanded: str = ""

    def evaluate(self, encoded: bytes, work: Work) -> Finish:
        """Evaluate a client's filter. Raises `InvalidFilter`, `InvalidRequest`, and what `work` raises."""
        condition = decode_filter(encoded)
        check_filter(condition, self.schema())
        if self.demanded and not binds(condition, self.demanded):
            raise InvalidRequest(f"a filter must bind {self.demanded!r} by eq or in", "filter")
        return self.passing(condition, work)


@dataclass
class _Scope:
    collection: int
    encoded: bytes
    parts: Parts


class Scopes:
    """A pool's scopes. `table`: their records, by number."""

    def __init__(self, max_bytes: int = MAX_BITMAP_BYTES, max_scopes: int = MAX_SCOPES) -> None:
        self._max_bytes, self._max_scopes = max_bytes, max_scopes
        self.table = new_array(Scope, max_scopes)
        self._collections: dict[int, FilterableCollection] = {}
        self._scopes: dict[int, _Scope] = {}
        self._bytes = 0  # of the scopes' bitmaps
        self._free = list(range(max_scopes))  # numbers, a heap
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._own: dict[int, Parts] = {}  # of collections, by scope number
        self._retired: list[Parts] = []  # replaced, but queries in the pool may still use them

    def register(self, collection: int, filterable: FilterableCollection) -> None:
        """Accept filters for a collection, given by its number in the client table."""
        self._collections[collection] = filterable

    def unregister(self, collection: int) -> list[int]:
        """Drop a collection. Return its filters' scopes, which have been dropped with it."""
        self._collections.pop(collection, None)
        return self.invalidate(collection)

    def invalidate(self, collection: int) -> list[int]:
        """Drop the scopes of a collection's filters after it has changed. Return them."""
        dropped = [number for number, scope in self._scopes.items() if scope.collection == collection]
        self._retired += [self._scopes[number].parts for number in dropped]
        return self._drop(dropped)

    def collection(self, number: int) -> FilterableCollection | None:
        """Return the collection of this number; None if it takes no filters."""
        return self._collections.get(number)

    def number_of(self, collection: int, encoded: bytes) -> int | None:
        """Return the scope of a filter that has been evaluated."""
        return self._numbers.get((collection, encoded))

    def parts_of(self, number: int) -> Parts:
        """Return the parts of a filter's scope."""
        return self._scopes[number].parts

    def add(
        self, collection: int, encoded: bytes, of_collection: Sequence[Part], in_use: InUse
    ) -> tuple[int, list[int]]:
        """Return the scope of an evaluated filter, and the scopes evicted for it.

        Raises `Overloaded` if the scopes in use leave no room.
        """
        scope = _Scope(collection, encoded, Parts(of_collection))
        if len(self._retired) > _MOST_RETIRED:
            self._retired = [parts for parts in self._retired if in_use(parts.address)]
        evicted = self._evict(scope.parts.nbytes, in_use)
        number = self._free_number()
        self._scopes[number], self._numbers[collection, encoded] = scope, number
        self._bytes += scope.parts.nbytes
        self._set(number, scope.parts)
        return number, evicted

    def retire(self, number: int) -> None:
        """Drop a scope that only queries in the pool may still use."""
        self._retired.append(self._scopes[number].parts)
        self._drop([number])

    # ---- collections

    def add_collection(self, parts: Parts) -> int:
        """Add a collection's scope and return its number, which is the collection's too.

        Raises `Overloaded` if none is free.
        """
        number = self._free_number()
        self._own[number] = parts
        self._set(number, parts)
        return number

    def replace_collection(self, number: int, parts: Parts) -> None:
        """Replace a collection's parts for new queries."""
        self._retired.append(self._own[number])
        self._own[number] = parts
        self._set(number, parts)

    def remove_collection(self, number: int) -> None:
        """Remove a collection's scope, which no session offers any more."""
        self._retired.append(self._own.pop(number))
        self.table[number] = Scope()
        heappush(self._free, number)

    def drop_unused(self, in_use: Callable[[], InUse]) -> None:
        """Drop retired parts that no query uses."""
        if self._retired:
            uses = in_use()
            self._retired = [parts for parts in self._retired if uses(parts.address)]

    def used_indexes(self, in_use: InUse) -> set[int]:
        """Return the engine's numbers of all indexes that queries may search. Drops retired parts that none uses."""
        self._retired = [parts for parts in self._retired if in_use(parts.address)]
        used = [*self._own.values(), *self._retired, *(scope.parts for scope in self._scopes.values())]
        return set().union(*(parts.indexes for parts in used))

    # ---- numbers

    def _set(self, number: int, parts: Parts) -> None:
        self.table[number].parts, self.table[number].part_count = parts.records, len(parts.parts)

    def _free_number(self) -> int:
        if not self._free:
            raise Overloaded("too many filters are in use at once")
        return heappop(self._free)

    def _evict(self, size: int, in_use: InUse) -> list[int]:
        """Evict least recently used scopes until another of `size` bytes fits. Return them."""
        used, places = self._bytes + size, len(self._free)
        evicted: list[int] = []
        numbers = np.fromiter(self._scopes, np.int64) if used > self._max_bytes or not places else np.empty(0, np.int64)
        used_ns = numpy_view(self.table, self._max_scopes)["used_ns"][numbers]
        for number in numbers[np.argsort(used_ns, kind="stable")].tolist():
            if used <= self._max_bytes and places + len(evicted):
                break
            if not in_use(self._scopes[number].parts.address):
                evicted.append(number)
                used -= self._scopes[number].parts.nbytes
        if used > self._max_bytes or not places + len(evicted):
            raise Overloaded("too many filters are in use at once")
        return self._drop(evicted)

    def _drop(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            scope = self._scopes.pop(number)
            if self._numbers.get((scope.collection, scope.encoded)) == number:
                del self._numbers[scope.collection, scope.encoded]
            self._bytes -= scope.parts.nbytes
            self.table[number] = Scope()
            heappush(self._free, number)
        return numbers
