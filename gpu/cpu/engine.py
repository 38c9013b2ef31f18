"""The engine on a CPU: a running batch advanced by one extend at a time."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gpu.cpu import running
from gpu.cpu.queries import checked, refusal
from gpu.cpu.state import BatchState
from gpu.cpu.tables import EXTENDS
from gpu.errors import InvalidParams, InvalidSlot, NoFreeSlot, UnknownCollection
from gpu.index import GraphIndex
from gpu.params import MAX_SEARCH_WIDTH, MAX_TOP_M, SearchParams

MAX_SLOTS = 4096
_NONE = np.zeros(0, np.int32)
_REMEMBERED = 1024  # sets of parameters that need not be checked again


class _Slot(Enum):
    FREE = "free"
    ACTIVE = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class CpuEngine:
    """The `Engine` interface over indexes in this process's memory.

    collections: the indexes by name. slots: queries in the running batch, 1..4096. max_top_m, max_k, max_search_width:
    the most that a query may ask for. Memory is allocated here, once; `state_bytes` tells how much, and `BatchState` of
    what. Raises InvalidParams.
    """

    def __init__(
        self,
        collections: Mapping[str, GraphIndex],
        *,
        slots: int = 32,
        max_top_m: int = 512,
        max_k: int | None = None,
        max_search_width: int = 8,
    ) -> None:
        if not collections:
            raise InvalidParams("an engine needs at least one collection")
        limits = (("slots", slots, MAX_SLOTS), ("max_top_m", max_top_m, MAX_TOP_M))
        for name, value, limit in (*limits, ("max_search_width", max_search_width, MAX_SEARCH_WIDTH)):
            if not 1 <= value <= limit:
                raise InvalidParams(f"{name} is {value}, outside 1..{limit}")
        self.max_top_m, self.max_search_width = max_top_m, max_search_width
        self.max_k = max_top_m if max_k is None else min(max_k, max_top_m)
        self._data = [index.data for index in collections.values()]
        self._lines: dict[tuple[int, SearchParams], npt.NDArray[np.int64]] = {}
        self._number = {name: number for number, name in enumerate(collections)}
        self._dims = MappingProxyType({name: index.dim for name, index in collections.items()})
        self._state = BatchState(self._data, slots, max_top_m, max_search_width, self.max_k)
        self._batch = self._state.batch
        self._status = [_Slot.FREE] * slots
        self._asked = [(0, 0)] * slots  # number of the collection, k
        self._free = list(range(slots - 1, -1, -1))
        self._active_count = 0

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def active_slots(self) -> int:
        return self._active_count

    @property
    def dims(self) -> Mapping[str, int]:
        return self._dims

    @property
    def state_bytes(self) -> int:
        """Bytes that the slots take, over the indexes themselves."""
        return self._state.nbytes

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """See `Engine.admit`."""
        number = self._number.get(collection)
        if number is None:
            raise UnknownCollection(f"collection {collection!r} is none of {', '.join(sorted(self._number))}")
        line = self._lines.get((number, params))
        if line is None:
            line = self._new_line(number, params)
        dim = self._data[number].rows.dim
        vector = query if isinstance(query, np.ndarray) else np.asarray(query)
        if vector.dtype != np.float32 or vector.shape != (dim,) or not vector.flags.c_contiguous:
            vector = checked(vector[None], dim)[0]
        if not self._free:
            raise NoFreeSlot(f"all {len(self._status)} slots are taken")
        slot = self._free[-1]
        if not running.admit(self._state.handle, slot, vector, line):
            raise refusal(vector, 0)
        self._free.pop()
        self._asked[slot] = (number, params.k)
        self._activate(slot)
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        """See `Engine.extend`."""
        done = running.advance(self._state.handle, self._active_count)
        if not done:
            return _NONE
        self._active_count -= done
        finished = self._batch.finished[:done].copy()
        for slot in finished.tolist():
            self._status[slot] = _Slot.FINISHED
        return finished

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """See `Engine.result`. Raises InvalidSlot unless the slot is finished."""
        self._expect(slot, _Slot.FINISHED)
        number, k = self._asked[slot]
        batch = self._batch
        return self._data[number].ids_of(batch.nodes[slot, :k].copy()), batch.found[slot, :k].copy()

    def release(self, slot: int) -> None:
        """See `Engine.release`. Raises InvalidSlot for a free slot."""
        self._expect(slot, _Slot.ACTIVE, _Slot.PAUSED, _Slot.FINISHED)
        if self._status[slot] is _Slot.ACTIVE:
            self._deactivate(slot)
        self._status[slot] = _Slot.FREE
        self._free.append(slot)

    def pause(self, slot: int) -> None:
        """See `Engine.pause`. Raises InvalidSlot unless the slot is running."""
        self._expect(slot, _Slot.ACTIVE)
        self._deactivate(slot)
        self._status[slot] = _Slot.PAUSED

    def resume(self, slot: int) -> None:
        """See `Engine.resume`. Raises InvalidSlot unless the slot is paused."""
        self._expect(slot, _Slot.PAUSED)
        self._activate(slot)

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Raises InvalidSlot for a free slot."""
        self._expect(slot, _Slot.ACTIVE, _Slot.PAUSED, _Slot.FINISHED)
        return int(self._batch.slots[slot, EXTENDS])

    def _expect(self, slot: int, *wanted: _Slot) -> None:
        if not 0 <= slot < len(self._status):
            raise InvalidSlot(f"slot {slot} is outside 0..{len(self._status) - 1}")
        if self._status[slot] not in wanted:
            names = " or ".join(status.value for status in wanted)
            raise InvalidSlot(f"slot {slot} is {self._status[slot].value}; it must be {names}")

    def _new_line(self, number: int, params: SearchParams) -> npt.NDArray[np.int64]:
        for name, limit in (("k", self.max_k), ("top_m", self.max_top_m), ("search_width", self.max_search_width)):
            if getattr(params, name) > limit:
                raise InvalidParams(f"{name} is {getattr(params, name)}; this engine's limit is {limit}")
        line = self._state.line(number, params)
        if len(self._lines) >= _REMEMBERED:
            self._lines.clear()
        self._lines[number, params] = line
        return line

    def _activate(self, slot: int) -> None:
        self._batch.active[self._active_count] = slot
        self._active_count += 1
        self._status[slot] = _Slot.ACTIVE

    def _deactivate(self, slot: int) -> None:
        position = int(np.flatnonzero(self._batch.active[: self._active_count] == slot)[0])
        self._batch.active[position : self._active_count - 1] = self._batch.active[position + 1 : self._active_count]
        self._active_count -= 1
