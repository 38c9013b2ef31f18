"""Device-independent parts of engines: limits, collections by name, slot states."""

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
from ipc.native.records import Array, Record, new_array, numpy_view, record, record_at

MAX_SLOTS = 4096
MAX_COLLECTIONS = 1024  # indexes; a collection has one for each of its segments


@dataclass(frozen=True)
class Limits:
    """Upper limits of an engine's slots and of a query's parameters."""

    slots: int
    max_top_m: int
    max_k: int
    max_search_width: int

    @classmethod
    def of(cls, slots: int, max_top_m: int, max_k: int | None, max_search_width: int) -> "Limits":
        """Validate limits. max_k defaults to max_top_m and is capped by it. Raises InvalidParams."""
        check_within("slots", slots, 1, MAX_SLOTS)
        check_within("max_top_m", max_top_m, 1, MAX_TOP_M)
        check_within("max_search_width", max_search_width, 1, MAX_SEARCH_WIDTH)
        return cls(slots, max_top_m, max_top_m if max_k is None else min(max_k, max_top_m), max_search_width)

    def check(self, params: SearchParams) -> None:
        """Raise InvalidParams for a parameter over its limit."""
        for name, limit in (("k", self.max_k), ("top_m", self.max_top_m), ("search_width", self.max_search_width)):
            if getattr(params, name) > limit:
                raise InvalidParams(f"{name} is {getattr(params, name)}; this engine's limit is {limit}")


class Collections:
    """Loaded indexes by name and number. Numbers follow the order given; later indexes get the lowest free number.

    `data`: indexes by number, None for a free number. Raises InvalidParams for more than MAX_COLLECTIONS.
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
        """Return the index of a loaded collection's number."""
        data = self.data[number]
        assert data is not None
        return data

    def next_number(self, name: str) -> int:
        """Return the number that `add` will assign. Raises InvalidParams for a name in use or too many collections."""
        if name in self._numbers:
            raise InvalidParams(f"collection {name!r} is loaded already")
        number = self.data.index(None) if None in self.data else len(self.data)
        if number >= MAX_COLLECTIONS:
            raise InvalidParams(f"{number} collections are loaded; an engine has at most {MAX_COLLECTIONS}")
        return number

    def add(self, name: str, index: GraphIndex) -> int:
        """Add an index and return its number."""
        number = self.next_number(name)
        self.data[number : number + 1] = [index.data]
        self._numbers[name], self._dims[name] = number, index.dim
        return number

    def remove(self, name: str) -> None:
        self.data[self._numbers.pop(name)] = None
        del self._dims[name]

    def number(self, name: str) -> int:
        """Return a collection's number. Raises UnknownCollection."""
        number = self._numbers.get(name)
        if number is None:
            raise UnknownCollection(
                f"collection {name!r} is not loaded; loaded: {', '.join(sorted(self._numbers)) or 'none'}"
            )
        return number


class SlotState(IntEnum):
    FREE = 0
    ACTIVE = 1
    PAUSED = 2
    FINISHED = 3


_NAMES = ("free", "running", "paused", "finished")


@record
class SlotStates(Record):
    """The states of an engine's slots."""

    active_count: int
    free_count: int
    lowest: int  # lower bound of the free slots' numbers
    states: Array[int]  # by slot: a `SlotState`


slot_states_at = record_at(SlotStates)


class SlotTable:
    """The state of every slot, updated by compiled code (`gpu.slot_changes`)."""

    def __init__(self, slots: int) -> None:
        states = new_array(int, slots)
        self.record = SlotStates(free_count=slots, states=states)
        self._states = numpy_view(states, slots)
        self._slots = slots

    @property
    def active_count(self) -> int:
        return self.record.active_count

    @property
    def free_count(self) -> int:
        return self.record.free_count

    @property
    def taken(self) -> list[int]:
        """Slots that are not free."""
        return np.flatnonzero(self._states != SlotState.FREE).tolist()

    def expect_free(self) -> None:
        """Raise NoFreeSlot if no slot is free."""
        if not self.free_count:
            raise NoFreeSlot(f"all {self._slots} slots are in use")

    def expect(self, slot: int, *states: SlotState) -> None:
        """Raise InvalidSlot for a slot out of range or in another state."""
        if not 0 <= slot < self._slots:
            raise InvalidSlot(f"slot {slot} is outside 0..{self._slots - 1}")
        if (state := self.record.states[slot]) not in states:
            names = " or ".join(_NAMES[state] for state in states)
            raise InvalidSlot(f"slot {slot} is {_NAMES[state]}; it must be {names}")

    def expect_taken(self, slot: int) -> None:
        """Raise InvalidSlot for a free slot."""
        self.expect(slot, SlotState.ACTIVE, SlotState.PAUSED, SlotState.FINISHED)
