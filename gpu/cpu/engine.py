"""The engine on a CPU: a running batch advanced by one extend at a time."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cpu import backend, running
from gpu.cpu.queries import checked, refusal
from gpu.cpu.state import BatchState
from gpu.cpu.tables import ALLOWED, COLLECTION, EXTENDS
from gpu.engine import Backend
from gpu.index.data import IndexData, check_bitmap
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams
from gpu.slots import Collections, Limits, SlotState, SlotTable

_NONE = np.zeros(0, np.int32)
_REMEMBERED = 1024  # kinds of queries that need not be checked again


_FLOAT32 = np.dtype(np.float32)


class _Kind(NamedTuple):
    """What queries with these parameters have in common."""

    collection: str
    params: SearchParams
    data: IndexData
    shape: tuple[int]  # of a query
    line: npt.NDArray[np.int64]


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
        self._collections = Collections(collections)
        self.limits = Limits.of(slots, max_top_m, max_k, max_search_width)
        self._kinds: dict[tuple[str, SearchParams], _Kind] = {}
        self._latest: _Kind | None = None  # most queries ask what the one before asked
        self._state = self._new_state()
        self._batch = self._state.batch
        self._slots = SlotTable(slots, self._batch.active)
        self._asked: list[_Kind | None] = [None] * slots
        self._allowed: list[npt.NDArray[np.uint64] | None] = [None] * slots  # kept alive for compiled code
        self._handle = backend.Handle()
        self._point_handle()

    @property
    def free_slots(self) -> int:
        return self._slots.free_count

    @property
    def active_slots(self) -> int:
        return self._slots.active_count

    @property
    def dims(self) -> Mapping[str, int]:
        return self._collections.dims

    @property
    def state_bytes(self) -> int:
        """Bytes that the slots take, over the indexes themselves."""
        return self._state.nbytes

    def backend(self) -> Backend:
        """See `Engine.backend`."""
        return Backend(
            backend.admit, backend.extend, backend.harvest, backend.change, self._handle.address,
            self._collections.number, backend.restrict,
        )  # fmt: skip

    def _point_handle(self) -> None:
        ids = [None if data is None else data.ids for data in self._collections.data]
        self._handle.point_to(self._state.handle, self._slots.words, ids)

    def load(self, collection: str, index: GraphIndex) -> None:
        """See `Engine.load`. The slots move to arrays in which queries of this index have room too."""
        self._collections.add(collection, index)
        self._renew_state()

    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """See `Engine.load_part`. It is no work: nothing is copied."""
        self.load(collection, index)
        return True

    def unload(self, collection: str) -> bool:
        """See `Engine.unload`."""
        number, slots = self._collections.number(collection), self._batch.slots
        if any(slots[slot, COLLECTION] == number for slot in self._slots.taken):
            return False
        self._collections.remove(collection)
        self._renew_state()
        return True

    def _new_state(self) -> BatchState:
        limits = self.limits
        return BatchState(self._collections.data, limits.slots, limits.max_top_m, limits.max_search_width, limits.max_k)

    def _renew_state(self) -> None:
        old, self._state = self._state, self._new_state()
        self._batch = self._state.batch
        self._state.take_over(old, self._slots.taken, self._slots.active_count)
        self._slots.active = self._batch.active
        self._point_handle()
        self._kinds.clear()
        self._latest = None

    def admit(
        self,
        query: npt.ArrayLike,
        params: SearchParams,
        collection: str,
        allowed: npt.NDArray[np.uint64] | None = None,
    ) -> int:
        """See `Engine.admit`. allowed: a bit a node (`gpu.index.data`) of those that may be results."""
        asked = self._latest
        if asked is None or params is not asked.params or collection != asked.collection:
            asked = self._latest = self._kind(collection, params)
        vector = query if isinstance(query, np.ndarray) else np.asarray(query)
        if vector.dtype is not _FLOAT32 or vector.shape != asked.shape or not vector.flags.c_contiguous:
            vector = checked(vector[None], asked.shape[0])[0]
        slot = self._slots.next_free()
        if not running.admit(self._state.handle, slot, vector, asked.line):
            raise refusal(vector, 0)
        self._asked[slot] = asked
        if allowed is not None:
            check_bitmap(allowed, len(asked.data.graph))
            self._batch.slots[slot, ALLOWED] = allowed.ctypes.data
        self._allowed[slot] = allowed
        return self._slots.take()

    def extend(self) -> npt.NDArray[np.int32]:
        """See `Engine.extend`."""
        done = running.advance(self._state.handle, self._slots.active_count)
        if not done:
            return _NONE
        self._slots.active_count -= done
        finished = self._batch.finished[:done].copy()
        self._slots.finish(finished.tolist())
        return finished

    @property
    def extends_made(self) -> int:
        """See `Engine.extends_made`."""
        return 1

    @property
    def padded_slots(self) -> int:
        """See `Engine.padded_slots`: an extend is as large as the running batch."""
        return 0

    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """See `Engine.interrupt_when`: there is never more than one extend to wait for."""

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """See `Engine.result`. Raises InvalidSlot unless the slot is finished."""
        self._slots.expect(slot, SlotState.FINISHED)
        asked, batch = self._asked[slot], self._batch
        assert asked is not None
        k = asked.params.k
        return asked.data.ids_of(batch.nodes[slot, :k].copy()), batch.found[slot, :k].copy()

    def release(self, slot: int) -> None:
        """See `Engine.release`. Raises InvalidSlot for a free slot."""
        self._slots.release(slot)

    def pause(self, slot: int) -> None:
        """See `Engine.pause`. Raises InvalidSlot unless the slot is running."""
        self._slots.pause(slot)

    def resume(self, slot: int) -> None:
        """See `Engine.resume`. Raises InvalidSlot unless the slot is paused."""
        self._slots.resume(slot)

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        return int(self._batch.slots[slot, EXTENDS])

    def close(self) -> None:
        """See `Engine.close`. Memory goes with the last reference to it."""

    def _kind(self, collection: str, params: SearchParams) -> _Kind:
        found = self._kinds.get((collection, params))
        if found is None:
            number = self._collections.number(collection)
            self.limits.check(params)
            if len(self._kinds) >= _REMEMBERED:
                self._kinds.clear()
            data = self._collections.at(number)
            found = _Kind(collection, params, data, (data.rows.dim,), self._state.line(number, params))
            self._kinds[collection, params] = found
        return found
