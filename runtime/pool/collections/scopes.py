"""Scopes of filtered searches: a *scope* is a list of indexes and, for each, a bitmap of the rows that may be found.

A filter is evaluated once, in Python, to a bitmap for each index; later requests with the same filter find its scope by
number, in compiled code. Scopes are bounded in number and bytes: the least recently used ones are evicted, unless a
query in the pool uses them. A live collection also has a scope of its own, of its rows that are not deleted. When the
collection changes its filters are invalidated, and queries in flight finish on the parts that they started with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.index.data import bitmap
from runtime.errors import InvalidRequest, Overloaded
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.filters import Filter, binds, check_filter, decode_filter
from runtime.retrieval.attributes.schema import Schema

# A scope, int64 [SCOPE_WORDS]: address and number of its parts, and when a query last used it. A part, int64
# [PART_WORDS]: the engine's number of the index, address of its bitmap (0: all rows), and the number of set bits.
PARTS, PART_COUNT, USED_NS = range(3)
SCOPE_WORDS = 3
INDEX, ALLOWED, PASSING = range(3)
PART_WORDS = 3
LIVE = 1 << 20
"""Added to the number of a live collection's scope it is the collection's number in the client table."""
MAX_SCOPES = 1024
MAX_BITMAP_BYTES = 64 << 20

InUse = Callable[[int], bool]
"""Returns whether queries in the pool use the parts at an address."""


class Part(NamedTuple):
    """An index, by the engine's number, and its rows that may be found: `passing` bits of a `bitmap`, None for all."""

    number: int
    bits: npt.NDArray[np.uint64] | None
    passing: int


def part_of(index: int, passing: Bits) -> Part:
    """Return the part of an index's rows that pass, bool [rows]."""
    count = int(np.count_nonzero(passing))
    return Part(index, None if count == len(passing) else bitmap(passing, len(passing)), count)


class Parts:
    """The parts of a scope, at least one, in the layout for compiled code: int64 [parts, PART_WORDS]."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)  # owns the bitmaps
        self.array = np.array(
            [(part.number, 0 if part.bits is None else part.bits.ctypes.data, part.passing) for part in parts], np.int64
        )
        self.address = int(self.array.ctypes.data)
        self.nbytes = sum(part.bits.nbytes for part in parts if part.bits is not None)

    @property
    def indexes(self) -> set[int]:
        """The engine's numbers of the indexes."""
        return {part.number for part in self.parts}


@dataclass(frozen=True)
class FilterableCollection:
    """A collection that accepts filters.

    schema: returns the current schema. parts: evaluates a filter to parts, at least one. demanded: the attribute that
    every filter must bind, or "".
    """

    schema: Callable[[], Schema]
    parts: Callable[[Filter], Sequence[Part]]
    demanded: str = ""


@dataclass
class _Scope:
    collection: int
    encoded: bytes
    parts: Parts


class Scopes:
    """A pool's scopes. `table`: int64 [max_scopes, SCOPE_WORDS], at `address`."""

    def __init__(self, max_bytes: int = MAX_BITMAP_BYTES, max_scopes: int = MAX_SCOPES) -> None:
        self._max_bytes = max_bytes
        self.table = np.zeros((max_scopes, SCOPE_WORDS), np.int64)
        self.address = int(self.table.ctypes.data)
        self._collections: dict[int, FilterableCollection] = {}
        self._scopes: dict[int, _Scope] = {}
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._live: dict[int, Parts] = {}  # of live collections, by scope number
        self._retired: list[Parts] = []  # replaced, but queries in the pool may still use them
        self.evaluated = 0
        """Number of filters evaluated so far."""

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

    def resolve(self, collection: int, encoded: bytes, in_use: InUse) -> tuple[int, list[int]]:
        """Return the scope of a client's filter, evaluating it if needed, and the scopes evicted for it.

        Raises `InvalidFilter`, `InvalidRequest`, and `Overloaded` if the scopes in use leave no room.
        """
        found = self._numbers.get((collection, encoded))
        if found is not None:
            return found, []
        filterable = self._collections.get(collection)
        if filterable is None:
            raise InvalidRequest("this collection takes no filters", "filter")
        condition = decode_filter(encoded)
        check_filter(condition, filterable.schema())
        if filterable.demanded and not binds(condition, filterable.demanded):
            raise InvalidRequest(f"a filter must bind {filterable.demanded!r} by eq or in", "filter")
        scope = _Scope(collection, encoded, Parts(filterable.parts(condition)))
        self.evaluated += 1
        evicted = self._evict(scope.parts.nbytes, in_use)
        number = self._free_number()
        self._scopes[number], self._numbers[collection, encoded] = scope, number
        self._set(number, scope.parts)
        return number, evicted

    # ---- live collections

    def add_live(self, parts: Parts) -> int:
        """Add a live collection's scope and return its number. Raises `Overloaded` if none is free."""
        number = self._free_number()
        self._live[number] = parts
        self._set(number, parts)
        return number

    def replace_live(self, number: int, parts: Parts) -> None:
        """Replace a live collection's parts for new queries."""
        self._retired.append(self._live[number])
        self._live[number] = parts
        self._set(number, parts)

    def remove_live(self, number: int) -> None:
        """Remove a live collection's scope, which no session offers any more."""
        self._retired.append(self._live.pop(number))
        self.table[number] = 0

    def used_indexes(self, in_use: InUse) -> set[int]:
        """Return the engine's numbers of all indexes that queries may search. Drops retired parts that none uses."""
        self._retired = [parts for parts in self._retired if in_use(parts.address)]
        used = [*self._live.values(), *self._retired, *(scope.parts for scope in self._scopes.values())]
        return set().union(*(parts.indexes for parts in used))

    # ---- numbers

    def _set(self, number: int, parts: Parts) -> None:
        self.table[number, : PART_COUNT + 1] = parts.address, len(parts.array)

    def _free_number(self) -> int:
        for number in range(len(self.table)):
            if number not in self._scopes and number not in self._live:
                return number
        raise Overloaded("too many filters are in use at once")

    def _evict(self, size: int, in_use: InUse) -> list[int]:
        """Evict least recently used scopes until another of `size` bytes fits. Return them."""
        used = size + sum(scope.parts.nbytes for scope in self._scopes.values())
        limit = len(self.table) - len(self._live)
        evicted: list[int] = []
        for number in sorted(self._scopes, key=lambda number: int(self.table[number, USED_NS])):
            if used <= self._max_bytes and len(self._scopes) - len(evicted) < limit:
                break
            if not in_use(self._scopes[number].parts.address):
                evicted.append(number)
                used -= self._scopes[number].parts.nbytes
        if used > self._max_bytes or len(self._scopes) - len(evicted) >= limit:
            raise Overloaded("too many filters are in use at once")
        return self._drop(evicted)

    def _drop(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            scope = self._scopes.pop(number)
            del self._numbers[scope.collection, scope.encoded]
            self.table[number] = 0
        return numbers
