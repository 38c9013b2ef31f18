"""What an engine is: `Backend`, its functions for compiled loops, and `Engine`, which calls them from Python."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import query_error, validate_queries
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams
from gpu.slots import Collections, Limits, SlotState, SlotTable

INVALID, FAILED = -1, -2
PAUSE, RESUME, RELEASE = range(3)
_NONE = np.zeros(0, np.int32)


class Backend(NamedTuple):
    """An engine as compiled loops call it: C functions by their addresses, and one handle that they all take first.

    All arguments and results are int64; addresses are bytes.

        admit(handle, vector, collection, k, top_m, width, patience)
            Give the float32 at `vector` a slot, which is returned; INVALID for a vector that cannot be searched or a
            collection that is not there. There must be a free slot, and the parameters be within the engine's limits.
        extend(handle, report)
            Advance every running slot. Returns how many are done: report[0] extends were made, over report[1] slots
            more than are running, and from report[2] on stand pairs: a slot that is done, oldest first, and its
            extends. Where slots go on by themselves, it returns when one is done, or with none; an extend was made
            when slots have together made as many as are running, and may be none yet.
        read_result(handle, slot, ids, distances)
            Write a done slot's ids (int64) and distances (float32), nearest first. Returns how many there are.
        change_state(handle, slot, action)
            PAUSE, RESUME or RELEASE a slot, as `Engine` has it.
        set_filter(handle, slot, allowed, allowed_count)
            Let the query of a slot that was admitted since the last extend find only rows whose bits are set, uint64
            words at `allowed`, `allowed_count` of them. They must stay until the slot is released.
        prioritize(handle, slot)
            Start the query of a slot that was admitted since the last extend before queries without priority. 0 for
            engines that advance every slot in each extend.

    Below 0 (but for INVALID) each says that the engine has failed; `Backend.check` raises why.

    The engine that gave it must outlive it, and may not be used meanwhile but for `load`, `load_part` and `unload`.
    `number` is what `admit` calls a collection; it raises UnknownCollection.
    """

    admit: int
    extend: int
    read_result: int
    change_state: int
    handle: int
    number: Callable[[str], int]
    set_filter: int
    check: Callable[[], None] = lambda: None
    prioritize: int = 0


def c_callable(address: int, arguments: int) -> Callable[..., int]:
    """A compiled function, to be called from Python."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)


class Engine(ABC):
    """A fixed number of slots, all advanced by one extend at a time.

    A slot goes `admit` → (`extend` …, `pause`, `resume`) → finished → `result` → `release`; `release` also cancels.
    It belongs to one thread. What it is asked is checked here; a subclass loads indexes, and calls `_start` once.

    extends_made: by the last `extend`: 1, unless the backend makes several in one launch. padded_slots: beyond the
    active ones, that it covered: launches may have fixed sizes.
    """

    def __init__(self, collections: Mapping[str, GraphIndex], limits: Limits) -> None:
        self._collections = Collections(collections)
        self.limits = limits
        self._report = np.zeros(2 + 2 * limits.slots, np.int64)
        self._report_address, self._counts = int(self._report.ctypes.data), self._report.data
        self._ids, self._distances = np.zeros(limits.max_k, np.int64), np.zeros(limits.max_k, np.float32)  # of one slot
        self._result_addresses = (int(self._ids.ctypes.data), int(self._distances.ctypes.data))
        self.extends_made = 0
        self.padded_slots = 0

    def _start(self, backend: Backend, slots: SlotTable) -> None:
        """Queries may be admitted from now on."""
        self._backend, self._slots = backend, slots
        self._admit, self._extend = c_callable(backend.admit, 7), c_callable(backend.extend, 2)
        self._harvest, self._change = c_callable(backend.read_result, 4), c_callable(backend.change_state, 3)

    @abstractmethod
    def _requested_k(self, slot: int) -> int:
        """How many results a slot's query asks for."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise DeviceError if the engine was closed, and nothing may be asked of it any more."""

    @property
    def free_slots(self) -> int:
        """Slots that `admit` could fill now."""
        return self._slots.free_count

    @property
    def active_slots(self) -> int:
        """Slots that the next `extend` advances: admitted, neither paused nor finished."""
        return self._slots.active_count

    @property
    def dims(self) -> Mapping[str, int]:
        """The vector length of each collection."""
        return self._collections.dims

    def backend(self) -> Backend:
        """What a compiled loop calls instead of the methods below; see `Backend` for what may be called beside it."""
        return self._backend

    @abstractmethod
    def load(self, collection: str, index: GraphIndex) -> None:
        """Search one more index from now on, under a name of its own; queries in their slots go on.

        Raises InvalidParams for a name that is taken, and what the backend raises for an index that does not fit.
        """

    @abstractmethod
    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """A part of `load`, for a loop that is not to stand still: whether it is done. Ask again, between two extends,
        until it is, or `unload` what is not wanted any more. Raises as `load`."""

    @abstractmethod
    def unload(self, collection: str) -> bool:
        """Forget an index, once no slot searches it: False, and nothing is done, until then. Raises UnknownCollection.

        Replacing an index is to load the new one under a new name, to admit under that, and to unload the old one.
        """

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """Give `query` (float32 [d]) a slot and return it.

        Raises NoFreeSlot, InvalidVector (wrong length, NaN, infinity), UnknownCollection or InvalidParams.
        """
        self._check_open()
        number = self._collections.number(collection)
        self.limits.check(params)
        dim, vector = self._collections.dims[collection], np.asarray(query)
        if vector.dtype != np.float32 or vector.shape != (dim,) or not vector.flags.c_contiguous:
            vector = validate_queries(vector[None], dim)[0]
        self._slots.expect_free()
        asked = (number, params.k, params.top_m, params.search_width, params.patience or 0)
        address = vector.__array_interface__["data"][0]  # in a third of the time that `ctypes` takes
        slot = self._admit(self._backend.handle, address, *asked)
        if slot == INVALID:
            raise query_error(vector, 0)
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        """Advance every active slot by one extend and return the slots that this finished, in admission order.

        A backend may be made to do several extends at once; it stops at the first that finishes a slot.
        """
        self._check_open()
        if not self._slots.active_count:
            return _NONE
        done = self._extend(self._backend.handle, self._report_address)
        if done < 0:
            self._backend.check()
        self.extends_made, self.padded_slots = self._counts[0], self._counts[1]
        return self._report[2 : 2 + 2 * done : 2].astype(np.int32) if done else _NONE

    @abstractmethod
    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """Let an `extend` that makes several end with the one at hand when `arrived`, asked meanwhile, is True."""

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids and distances (both [k], nearest first) of a finished slot; missing ones are -1 and +inf.

        Raises InvalidSlot unless it is finished.
        """
        self._slots.expect(slot, SlotState.FINISHED)
        self._check_open()
        k = self._requested_k(slot)
        count = self._harvest(self._backend.handle, slot, *self._result_addresses)
        ids, distances = self._ids[:k].copy(), self._distances[:k].copy()
        if count < k:
            ids[count:], distances[count:] = -1, np.inf
        return ids, distances

    def release(self, slot: int) -> None:
        """Free a slot in any state, and forget its query. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        self._change_state(slot, RELEASE)

    def pause(self, slot: int) -> None:
        """Keep a running slot's state but leave it out of `extend`. Raises InvalidSlot for any other."""
        self._slots.expect(slot, SlotState.ACTIVE)
        self._change_state(slot, PAUSE)

    def resume(self, slot: int) -> None:
        """Take a paused slot into `extend` again; it goes on where it stopped. Raises InvalidSlot for any other."""
        self._slots.expect(slot, SlotState.PAUSED)
        self._change_state(slot, RESUME)

    def _change_state(self, slot: int, what: int) -> None:
        self._check_open()
        if self._change(self._backend.handle, slot, what) < 0:
            self._backend.check()

    @abstractmethod
    def extends(self, slot: int) -> int:
        """How many extends the slot's query has taken so far. Raises InvalidSlot for a free slot."""

    @abstractmethod
    def close(self) -> None:
        """Give memory and device back; the engine is of no use afterwards. Idempotent."""
