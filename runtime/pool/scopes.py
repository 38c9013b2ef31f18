"""What restricted queries search: a *scope* is a list of indexes and, of each, the rows that may be found.

A filter is evaluated once, in Python's turn, to a bitmap of each index's rows; what asks for it again finds its scope
by number, in compiled code. Scopes are kept within bounds: those used longest ago are forgotten, but none that a query
in the pool still uses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.bitmap import bitmap
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


@dataclass(frozen=True)
class Filtered:
    """A collection that filters may be asked of. passing: which rows of the index of this number pass a filter."""

    index: int
    schema: Schema
    passing: Callable[[Filter], Bits]
    demanded: str = ""


@dataclass
class _Scope:
    collection: int
    wanted: bytes
    bits: npt.NDArray[np.uint64] | None
    parts: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return 0 if self.bits is None else self.bits.nbytes


class Scopes:
    """A pool's scopes. `table`: int64 [MOST, SCOPE_WORDS], at `address`."""

    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST) -> None:
        self._most_bytes = most_bytes
        self.table = np.zeros((most, SCOPE_WORDS), np.int64)
        self.address = int(self.table.ctypes.data)
        self._collections: dict[int, Filtered] = {}
        self._scopes: dict[int, _Scope] = {}
        self._numbers: dict[tuple[int, bytes], int] = {}
        self.evaluated = 0
        """Filters evaluated so far."""

    def serve(self, collection: int, filtered: Filtered) -> None:
        """Filters of the collection of this number are evaluated so from now on."""
        self._collections[collection] = filtered

    def withdraw(self, collection: int) -> list[int]:
        """The collection is served no more, and no query asks it. The scopes that are no more with it."""
        self._collections.pop(collection, None)
        return self._forget([number for number, scope in self._scopes.items() if scope.collection == collection])

    def number_of(self, collection: int, wanted: bytes, in_use: InUse) -> tuple[int, list[int]]:
        """The scope of a filter, as a client has sent it, and the scopes that are no more because of it.

        in_use: whether queries in the pool use the parts at an address. Raises `InvalidFilter`, `InvalidRequest`, and
        `Overloaded` while there is no room beside those in use.
        """
        found = self._numbers.get((collection, wanted))
        if found is not None:
            return found, []
        filtered = self._collections.get(collection)
        if filtered is None:
            raise InvalidRequest("this collection takes no filters", "filter")
        asked = decode_filter(wanted)
        check_filter(asked, filtered.schema)
        if filtered.demanded and not binds(asked, filtered.demanded):
            raise InvalidRequest(f"a filter must bind {filtered.demanded!r} by eq or in", "filter")
        passing = filtered.passing(asked)
        self.evaluated += 1
        bits = None if passing.all() else bitmap(passing, len(passing))
        address = 0 if bits is None else int(bits.ctypes.data)
        parts = np.array([[filtered.index, address, np.count_nonzero(passing)]], np.int64)
        scope = _Scope(collection, wanted, bits, parts)
        gone = self._make_room(scope.nbytes, in_use)
        number = next(number for number in range(len(self.table)) if number not in self._scopes)
        self._scopes[number], self._numbers[collection, wanted] = scope, number
        self.table[number] = parts.ctypes.data, len(parts), 0
        return number, gone

    def _make_room(self, size: int, in_use: InUse) -> list[int]:
        """Forget scopes until another of so many bytes fits in. Which."""
        used = size + sum(scope.nbytes for scope in self._scopes.values())
        gone: list[int] = []
        for number in sorted(self._scopes, key=lambda number: int(self.table[number, USED_NS])):
            if used <= self._most_bytes and len(self._scopes) - len(gone) < len(self.table):
                break
            if not in_use(int(self.table[number, PARTS])):
                gone.append(number)
                used -= self._scopes[number].nbytes
        if used > self._most_bytes or len(self._scopes) - len(gone) >= len(self.table):
            raise Overloaded("too many filters are in use at once")
        return self._forget(gone)

    def _forget(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            scope = self._scopes.pop(number)
            del self._numbers[scope.collection, scope.wanted]
            self.table[number] = 0
        return numbers
