"""What engines have in common on every device: limits, collections by name, and who has which slot."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidParams, InvalidSlot, NoFreeSlot, UnknownCollection
from gpu.index import GraphIndex
from gpu.index_data import IndexData
from gpu.params import MAX_SEARCH_WIDTH, MAX_TOP_M, SearchParams

MAX_SLOTS = 4096
MAX_COLLECTIONS = 64


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
        limits = (("slots", slots, MAX_SLOTS), ("max_top_m", max_top_m, MAX_TOP_M))
        for name, value, limit in (*limits, ("max_search_width", max_search_width, MAX_SEARCH_WIDTH)):
            if not 1 <= value <= limit:
                raise InvalidParams(f"{name} is {value}, outside 1..{limit}")
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


class SlotState(Enum):
    FREE = "free"
    ACTIVE = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class SlotTable:
    """The state of every slot. `active` int32 [slots] begins with the `active_count` running ones, oldest first."""

    def __init__(self, slots: int, active: npt.NDArray[np.int32]) -> None:
        self._state = [SlotState.FREE] * slots
        self._free = list(range(slots))  # a heap: the lowest is taken first, so that few slots lie close together
        self.active = active
        self.active_count = 0

    def __len__(self) -> int:
        return len(self._state)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> list[int]:
        """The slots that are not free."""
        return [slot for slot, state in enumerate(self._state) if state is not SlotState.FREE]

    def next_free(self) -> int:
        """The slot that `take` would take. Raises NoFreeSlot."""
        if not self._free:
            raise NoFreeSlot(f"all {len(self._state)} slots are taken")
        return self._free[0]

    def take(self) -> int:
        """Make `next_free` a running slot."""
        slot = heappop(self._free)
        self._activate(slot)
        return slot

    def pause(self, slot: int) -> None:
        """Raises InvalidSlot unless the slot is running."""
        self.expect(slot, SlotState.ACTIVE)
        self._deactivate(slot)
        self._state[slot] = SlotState.PAUSED

    def resume(self, slot: int) -> None:
        """Raises InvalidSlot unless the slot is paused."""
        self.expect(slot, SlotState.PAUSED)
        self._activate(slot)

    def finish(self, slots: list[int]) -> None:
        """These running slots are done; whoever calls this has taken them out of `active`."""
        for slot in slots:
            self._state[slot] = SlotState.FINISHED

    def finish_where(self, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """The running slots for which `done` [active_count] says so are done; returns them, oldest first."""
        running = self.active[: self.active_count]
        finished, going_on = running[done], running[~done]
        self.active[: len(going_on)] = going_on
        self.active_count = len(going_on)
        self.finish(finished.tolist())
        return finished

    def release(self, slot: int) -> None:
        """Raises InvalidSlot for a free slot."""
        self.expect(slot, SlotState.ACTIVE, SlotState.PAUSED, SlotState.FINISHED)
        if self._state[slot] is SlotState.ACTIVE:
            self._deactivate(slot)
        self._state[slot] = SlotState.FREE
        heappush(self._free, slot)

    def expect(self, slot: int, *wanted: SlotState) -> None:
        """Raise InvalidSlot for a slot that does not exist or is in another state."""
        if not 0 <= slot < len(self._state):
            raise InvalidSlot(f"slot {slot} is outside 0..{len(self._state) - 1}")
        if self._state[slot] not in wanted:
            names = " or ".join(state.value for state in wanted)
            raise InvalidSlot(f"slot {slot} is {self._state[slot].value}; it must be {names}")

    def expect_taken(self, slot: int) -> None:
        """Raise InvalidSlot for a free slot."""
        self.expect(slot, SlotState.ACTIVE, SlotState.PAUSED, SlotState.FINISHED)

    def _activate(self, slot: int) -> None:
        self.active[self.active_count] = slot
        self.active_count += 1
        self._state[slot] = SlotState.ACTIVE

    def _deactivate(self, slot: int) -> None:
        position = self.active[: self.active_count].tolist().index(slot)  # so few are found faster in a list
        self.active_count -= 1
        if position < self.active_count:
            self.active[position : self.active_count] = self.active[position + 1 : self.active_count + 1]
