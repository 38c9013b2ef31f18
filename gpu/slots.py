"""What engines have in common on every device: limits, collections by name, and who has which slot."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from gpu.build.params import check_within
from gpu.errors import InvalidParams, InvalidSlot, NoFreeSlot, UnknownCollection
from gpu.index.data import IndexData
from gpu.index.graph_index import GraphIndex
from gpu.params import MAX_SEARCH_WIDTH, MAX_TOP_M, SearchParams

MAX_SLOTS = 4096
MAX_COLLECTIONS = 1024  # indexes; a live collection has one for each of its segments


@dataclass(frozen=True)
class Limits:
    """The most that an engine holds and that a query may ask of it. Raises InvalidParams."""

    slots: int
    max_top_m: int
    max_k: int
    max_search_width: int

    @classmethod
    def of(cls, slots: int, max_top_m: int, max_k: int | None, max_search_width: int) -> "Limits":
        """Checked limits; without `max_k`, and never beyond it, a query may ask for all of top_m."""
        check_within("slots", slots, 1, MAX_SLOTS)
        check_within("max_top_m", max_top_m, 1, MAX_TOP_M)
        check_within("max_search_width", max_search_width, 1, MAX_SEARCH_WIDTH)
        return cls(slots, max_top_m, max_top_m if max_k is None else min(max_k, max_top_m), max_search_width)

    def check(self, params: SearchParams) -> None:
        """Raise InvalidParams for what is over a limit."""
        for name, limit in (("k", self.max_k), ("top_m", self.max_top_m), ("search_width", self.max_search_width)):
            if getattr(params, name) > limit:
                raise InvalidParams(f"{name} is {getattr(params, name)}; this engine's limit is {limit}")


class Collections:
    """Indexes by name, numbered in the order given; one that is loaded later takes the lowest free number.

    `data` has them by number, None where none is loaded. Raises InvalidParams for more than MAX_COLLECTIONS.
    """

    def __init__(self, collections: Mapping[str, GraphIndex]) -> None:
        if len(collections) > MAX_COLLECTIONS:
            raise InvalidParams(f"{len(collections)} collections; an engine has at most {MAX_COLLECTIONS}")
        self.data: list[IndexData | None] = [index.data for index in collections.values()]
        self._dims = {name: index.dim for name, index in collections.items()}
        self.dims: Mapping[str, int] = MappingProxyType(self._dims)
        self._numbers = {name: number for number, name in enumerate(collections)}

    @property
    def loaded(self) -> list[IndexData]:
        return [data for data in self.data if data is not None]

    def at(self, number: int) -> IndexData:
        """The index of a number that is loaded."""
        data = self.data[number]
        assert data is not None
        return data

    def next_number(self, name: str) -> int:
        """The number that `add` would give. Raises InvalidParams for a name that is taken, or one too many."""
        if name in self._numbers:
            raise InvalidParams(f"collection {name!r} is loaded already")
        number = self.data.index(None) if None in self.data else len(self.data)
        if number >= MAX_COLLECTIONS:
            raise InvalidParams(f"{number} collections are loaded; an engine has at most {MAX_COLLECTIONS}")
        return number

    def add(self, name: str, index: GraphIndex) -> int:
        """Load an index; its number."""
        number = self.next_number(name)
        self.data[number : number + 1] = [index.data]
        self._numbers[name], self._dims[name] = number, index.dim
        return number

    def remove(self, name: str) -> None:
        """Forget a loaded index."""
        self.data[self._numbers.pop(name)] = None
        del self._dims[name]

    def number(self, name: str) -> int:
        """The number of a collection. Raises UnknownCollection."""
        number = self._numbers.get(name)
        if number is None:
            raise UnknownCollection(f"collection {name!r} is none of {', '.join(sorted(self._numbers))}")
        return number


class SlotState(IntEnum):
    FREE = 0
    ACTIVE = 1
    PAUSED = 2
    FINISHED = 3


_NAMES = ("free", "running", "paused", "finished")

ACTIVE_COUNT, FREE_COUNT, LOWEST, STATES = range(4)
"""Words of a slot table: how many slots are running and free, below which one none is free, and each one's state."""


class SlotTable:
    """The state of every slot, as compiled code changes it (`gpu.slot_changes`).

    words: int64 [STATES + slots].
    """

    def __init__(self, slots: int) -> None:
        self.words = np.zeros(STATES + slots, np.int64)
        self._words = self.words.data
        self._words[FREE_COUNT] = slots
        self._slots = slots

    @property
    def active_count(self) -> int:
        return int(self._words[ACTIVE_COUNT])

    @property
    def free_count(self) -> int:
        return int(self._words[FREE_COUNT])

    @property
    def taken(self) -> list[int]:
        """The slots that are not free."""
        return np.flatnonzero(self.words[STATES:] != SlotState.FREE).tolist()

    def expect_free(self) -> None:
        """Raise NoFreeSlot if every slot is taken."""
        if not self.free_count:
            raise NoFreeSlot(f"all {self._slots} slots are taken")

    def expect(self, slot: int, *wanted: SlotState) -> None:
        """Raise InvalidSlot for a slot that does not exist or is in another state."""
        if not 0 <= slot < self._slots:
            raise InvalidSlot(f"slot {slot} is outside 0..{self._slots - 1}")
        if self._words[STATES + slot] not in wanted:
            names = " or ".join(_NAMES[state] for state in wanted)
            raise InvalidSlot(f"slot {slot} is {_NAMES[self._words[STATES + slot]]}; it must be {names}")

    def expect_taken(self, slot: int) -> None:
        """Raise InvalidSlot for a free slot."""
        self.expect(slot, SlotState.ACTIVE, SlotState.PAUSED, SlotState.FINISHED)
