"""The engine interface: `Backend`, C functions for compiled loops, and `Engine`, their Python wrapper."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import query_error, validate_queries
from gpu.errors import InvalidVector
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams
from gpu.slots import Collections, Limits, SlotState, SlotTable
from ipc.native.records import Array, Record, record, record_at

INVALID, FAILED = -1, -2
PAUSE, RESUME, RELEASE = range(3)
_NONE = np.zeros(0, np.int32)


@record
class Finished(Record):
    """A slot that has finished, and the extends that its query took."""

    slot: int
    extends: int


@record
class Report(Record):
    """What a backend's `extend` writes."""

    extends: int
    padded: int
    finished: Annotated[Array[Finished], 0]


report_at = record_at(Report)


class Backend(NamedTuple):
    """An engine's interface for compiled loops: addresses of C functions, and a handle, their first argument.

    All arguments and results are int64; addresses are byte addresses.

        admit(handle, vector, collection, k, top_m, width, patience)
            Assign a slot to the float32 query at `vector` and return it; INVALID for a vector that is not finite or
            too large in norm, or an unknown collection. Precondition: a slot is free, the parameters are within limits.
        extend(handle, report)
            Advance every running slot. Returns the number of finished slots. Writes a `Report`: the extends made, the
            padded slots, those covered beyond the running ones, and the finished slots, in admission order. Resident
            engines, whose slots advance on their own, return when a slot has finished or on an interrupt, and report
            slots in the order in which they finished; one extend is counted for every [running slots] extends of single
            slots, so the count may be 0.
        read_result(handle, slot, ids, distances)
            Write a finished slot's ids (int64) and distances (float32), nearest first. Returns their number; INVALID
            if the query was admitted in place and its vector is not finite or too large in norm.
        change_state(handle, slot, action)
            PAUSE, RESUME or RELEASE a slot; see `Engine`.
        set_filter(handle, slot, allowed, allowed_count)
            Restrict the query of a slot that was admitted since the last extend to the rows whose bits are set in the
            bitmap at `allowed` (uint64 words, `allowed_count` bits set). It must stay valid until the slot is released.
        prioritize(handle, slot)
            Start the query of a slot that was admitted since the last extend before queries without priority. 0 for
            engines that advance every slot in each extend.
        admit_in_place(handle, vector, collection, k, top_m, width, patience)
            As `admit`, for a vector in the engine's device memory, which is read there when the query starts: it must
            stay valid until the slot is released. INVALID for a collection that is unknown or has no graph. The query
            must not get a filter. 0 for engines on a CPU.

    A negative result other than INVALID means that the engine has failed; `Backend.check` then raises the error.

    The engine must outlive its backend. While a loop uses the backend, only `load`, `load_part` and `unload` of the
    engine may be called. `number` maps a collection's name to the number that `admit` takes; raises UnknownCollection.
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
    admit_in_place: int = 0


def c_callable(address: int, arguments: int) -> Callable[..., int]:
    """Wrap a C function of int64 arguments for calls from Python."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)


class Engine(ABC):
    """A running batch with a fixed number of slots, which each call of `extend` advances by one extend.

    Life cycle of a slot: `admit` → (`extend` …, `pause`, `resume`) → finished → `result` → `release`; `release` also
    cancels a query. Not thread-safe. This class validates arguments; subclasses load indexes and call `_start` once.

    extends_made: extends of the last call of `extend`: 1, unless the backend makes several per launch. padded_slots:
    slots that it covered beyond the active ones, because launches have fixed sizes.
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
        """Bind the backend's functions; queries can be admitted afterwards."""
        self._backend, self._slots = backend, slots
        self._admit, self._extend = c_callable(backend.admit, 7), c_callable(backend.extend, 2)
        self._read_result, self._change = c_callable(backend.read_result, 4), c_callable(backend.change_state, 3)

    @abstractmethod
    def _requested_k(self, slot: int) -> int:
        """Return k of a slot's query."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise DeviceError if the engine is closed."""

    @property
    def free_slots(self) -> int:
        return self._slots.free_count

    @property
    def active_slots(self) -> int:
        """Number of slots that the next `extend` advances: neither free, paused nor finished."""
        return self._slots.active_count

    @property
    def dims(self) -> Mapping[str, int]:
        """The vector length of each collection."""
        return self._collections.dims

    def backend(self) -> Backend:
        """Return the interface for compiled loops; see `Backend` for the methods that may be called meanwhile."""
        return self._backend

    @abstractmethod
    def load(self, collection: str, index: GraphIndex) -> None:
        """Load another index under a new name; running queries continue.

        Raises InvalidParams for a name in use, and the backend's error for an index that does not fit.
        """

    @abstractmethod
    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """Do a part of `load` without stalling the loop, and return whether loading is complete. Call it again between
        two extends until it is, or cancel with `unload`. Raises the errors of `load`."""

    @abstractmethod
    def unload(self, collection: str) -> bool:
        """Unload an index. Returns False and does nothing while a slot searches it. Raises UnknownCollection.

        To replace an index, load the new one under a new name, admit queries to it, and unload the old one.
        """

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """Assign a free slot to `query` (float32 [d]) and return it.

        Raises NoFreeSlot, InvalidVector (wrong length, NaN, infinity), UnknownCollection or InvalidParams.
        """
        self._check_open()
        number = self._collections.number(collection)
        self.limits.check(params)
        dim, vector = self._collections.dims[collection], np.asarray(query)
        if vector.dtype != np.float32 or vector.shape != (dim,) or not vector.flags.c_contiguous:
            vector = validate_queries(vector[None], dim)[0]
        self._slots.expect_free()
        spec = (number, params.k, params.top_m, params.search_width, params.patience or 0)
        address = vector.__array_interface__["data"][0]  # three times as fast as `ctypes.data`
        slot = self._admit(self._backend.handle, address, *spec)
        if slot == INVALID:
            raise query_error(vector, 0)
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        """Advance every active slot by one extend and return the slots that it finished, in admission order.

        A resident backend returns them in the order in which they finished. A backend with several extends per launch
        stops at the first one that finishes a slot.
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
        """End a launch of several extends after the current one when `arrived`, polled meanwhile, returns True."""

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return ids and distances (both [k], nearest first) of a finished slot; missing results are -1 and +inf.

        Raises InvalidSlot for a slot in any other state, and InvalidVector for a query whose vector the device refused.
        """
        self._slots.expect(slot, SlotState.FINISHED)
        self._check_open()
        k = self._requested_k(slot)
        count = self._read_result(self._backend.handle, slot, *self._result_addresses)
        if count == INVALID:
            raise InvalidVector("the query's vector in device memory is not finite, or too long")
        ids, distances = self._ids[:k].copy(), self._distances[:k].copy()
        if count < k:
            ids[count:], distances[count:] = -1, np.inf
        return ids, distances

    def release(self, slot: int) -> None:
        """Free a slot, and cancel its query if it still runs. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        self._change_state(slot, RELEASE)

    def pause(self, slot: int) -> None:
        """Exclude a running slot from `extend`, keeping its state. Raises InvalidSlot for a slot in any other state."""
        self._slots.expect(slot, SlotState.ACTIVE)
        self._change_state(slot, PAUSE)

    def resume(self, slot: int) -> None:
        """Resume a paused slot where it stopped. Raises InvalidSlot for a slot in any other state."""
        self._slots.expect(slot, SlotState.PAUSED)
        self._change_state(slot, RESUME)

    def _change_state(self, slot: int, action: int) -> None:
        self._check_open()
        if self._change(self._backend.handle, slot, action) < 0:
            self._backend.check()

    @abstractmethod
    def extends(self, slot: int) -> int:
        """Return the number of extends of the slot's query so far. Raises InvalidSlot for a free slot."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and device; the engine cannot be used afterwards. Idempotent."""
