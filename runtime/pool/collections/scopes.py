"""What restricted queries search: a *scope* is a list of indexes and, of each, the rows that may be found.

A filter is evaluated once, in Python's turn, to a bitmap of each index's rows; what asks for it again finds its scope
by number, in compiled code. Scopes are kept within bounds: those used longest ago are forgotten, but none that a query
in the pool still uses. A live collection has a scope of its own too, of the rows that are not deleted; when it changes
its filters are evaluated anew, and queries in flight end on the parts that they began with.
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

# A scope, int64 [SCOPE_WORDS]: the address of its parts and how many they are, and when a query last came for it. A
# part, int64 [PART_WORDS]: the engine's number of the index, the address of its bitmap (0: all rows), and how many bits
# are set.
PARTS, PART_COUNT, USED_NS = range(3)
SCOPE_WORDS = 3
INDEX, ALLOWED, PASSING = range(3)
PART_WORDS = 3
LIVE = 1 << 20
"""The desk's number of a live collection is this and the number of its scope."""
MOST = 1024
MOST_BYTES = 64 << 20  # of bitmaps

InUse = Callable[[int], bool]
"""Whether queries in the pool use the parts at an address."""


class Part(NamedTuple):
    """An index by the engine's number, and which of its rows may be found: bits as `bitmap` has them, None for all;
    `passing` of them are set."""

    number: int
    bits: npt.NDArray[np.uint64] | None
    passing: int


def part_of(index: int, passing: Bits) -> Part:
    """The part of an index's rows that pass, bool [rows]."""
    count = int(np.count_nonzero(passing))
    return Part(index, None if count == len(passing) else bitmap(passing, len(passing)), count)


class Parts:
    """Parts as compiled code reads them, int64 [parts, PART_WORDS]. There is one at least."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)  # keeps the bitmaps
        self.array = np.array(
            [(part.number, 0 if part.bits is None else part.bits.ctypes.data, part.passing) for part in parts], np.int64
        )
        self.address = int(self.array.ctypes.data)
        self.nbytes = sum(part.bits.nbytes for part in parts if part.bits is not None)

    @property
    def indexes(self) -> set[int]:
        """The engine's numbers."""
        return {part.number for part in self.parts}


@dataclass(frozen=True)
class Filtered:
    """A collection that filters may be asked of. parts: what a filter lets pass of its indexes, one at least. schema:
    as it is now."""

    schema: Callable[[], Schema]
    parts: Callable[[Filter], Sequence[Part]]
    demanded: str = ""


@dataclass
class _Scope:
    collection: int
    wanted: bytes
    parts: Parts


class Scopes:
    """A pool's scopes. `table`: int64 [MOST, SCOPE_WORDS], at `address`."""

    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST) -> None:
        self._most_bytes = most_bytes
        self.table = np.zeros((most, SCOPE_WORDS), np.int64)
        self.address = int(self.table.ctypes.data)
        self._collections: dict[int, Filtered] = {}
        self._scopes: dict[int, _Scope] = {}
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._own: dict[int, Parts] = {}  # of live collections, by number
        self._retired: list[Parts] = []  # that queries in the pool may use
        self.evaluated = 0
        """Filters evaluated so far."""

    def serve(self, collection: int, filtered: Filtered) -> None:
        """Filters of the collection of this number are evaluated so from now on."""
        self._collections[collection] = filtered

    def withdraw(self, collection: int) -> list[int]:
        """The collection is served no more. The scopes that are no more with it."""
        self._collections.pop(collection, None)
        return self.changed(collection)

    def changed(self, collection: int) -> list[int]:
        """Filters of this collection stand for something else by now. The scopes that are no more."""
        gone = [number for number, scope in self._scopes.items() if scope.collection == collection]
        self._retired += [self._scopes[number].parts for number in gone]
        return self._forget(gone)

    def number_of(self, collection: int, wanted: bytes, in_use: InUse) -> tuple[int, list[int]]:
        """The scope of a filter, as a client has sent it, and the scopes that are no more because of it.

        Raises `InvalidFilter`, `InvalidRequest`, and `Overloaded` while there is no room beside those in use.
        """
        found = self._numbers.get((collection, wanted))
        if found is not None:
            return found, []
        filtered = self._collections.get(collection)
        if filtered is None:
            raise InvalidRequest("this collection takes no filters", "filter")
        asked = decode_filter(wanted)
        check_filter(asked, filtered.schema())
        if filtered.demanded and not binds(asked, filtered.demanded):
            raise InvalidRequest(f"a filter must bind {filtered.demanded!r} by eq or in", "filter")
        scope = _Scope(collection, wanted, Parts(filtered.parts(asked)))
        self.evaluated += 1
        gone = self._make_room(scope.parts.nbytes, in_use)
        number = self._free_number()
        self._scopes[number], self._numbers[collection, wanted] = scope, number
        self._set(number, scope.parts)
        return number, gone

    # ---- live collections

    def reserve(self, parts: Parts) -> int:
        """A number for a scope that is changed by `replace`. Raises `Overloaded` if there is none."""
        number = self._free_number()
        self._own[number] = parts
        self._set(number, parts)
        return number

    def replace(self, number: int, parts: Parts) -> None:
        """Queries that come from now on search these parts."""
        self._retired.append(self._own[number])
        self._own[number] = parts
        self._set(number, parts)

    def release(self, number: int) -> None:
        """Nobody asks for this scope any more."""
        self._retired.append(self._own.pop(number))
        self.table[number] = 0

    def indexes(self, in_use: InUse) -> set[int]:
        """The engine's numbers of all indexes that queries may search; forgets what none does any more."""
        self._retired = [parts for parts in self._retired if in_use(parts.address)]
        kept = [*self._own.values(), *self._retired, *(scope.parts for scope in self._scopes.values())]
        return set().union(*(parts.indexes for parts in kept))

    # ---- numbers

    def _set(self, number: int, parts: Parts) -> None:
        self.table[number, : PART_COUNT + 1] = parts.address, len(parts.array)

    def _free_number(self) -> int:
        for number in range(len(self.table)):
            if number not in self._scopes and number not in self._own:
                return number
        raise Overloaded("too many filters are in use at once")

    def _make_room(self, size: int, in_use: InUse) -> list[int]:
        """Forget scopes until another of so many bytes fits in. Which."""
        used = size + sum(scope.parts.nbytes for scope in self._scopes.values())
        most = len(self.table) - len(self._own)
        gone: list[int] = []
        for number in sorted(self._scopes, key=lambda number: int(self.table[number, USED_NS])):
            if used <= self._most_bytes and len(self._scopes) - len(gone) < most:
                break
            if not in_use(self._scopes[number].parts.address):
                gone.append(number)
                used -= self._scopes[number].parts.nbytes
        if used > self._most_bytes or len(self._scopes) - len(gone) >= most:
            raise Overloaded("too many filters are in use at once")
        return self._forget(gone)

    def _forget(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            scope = self._scopes.pop(number)
            del self._numbers[scope.collection, scope.wanted]
            self.table[number] = 0
        return numbers
