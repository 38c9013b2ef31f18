"""What engines do in Python for each query and step: check what they are asked, and call their `Backend`."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import checked, refusal
from gpu.engine import INVALID, PAUSE, RELEASE, RESUME, Backend
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams
from gpu.slots import Collections, Limits, SlotState, SlotTable


def function_of(address: int, arguments: int) -> Callable[..., int]:
    """A compiled function, to be called from Python."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)


class BackendEngine(ABC):
    """The part of the `Engine` interface that is about slots; a subclass loads indexes, and calls `_serve` once."""

    def __init__(self, collections: Mapping[str, GraphIndex], limits: Limits) -> None:
        self._collections = Collections(collections)
        self.limits = limits
        self._report = np.zeros(2 + 2 * limits.slots, np.int64)
        self.extends_made = 0
        self.padded_slots = 0

    def _serve(self, backend: Backend, slots: SlotTable) -> None:
        """Queries may be admitted from now on."""
        self._backend, self._slots = backend, slots
        self._admit, self._extend = function_of(backend.admit, 7), function_of(backend.extend, 2)
        self._harvest, self._change = function_of(backend.harvest, 4), function_of(backend.change, 3)

    @abstractmethod
    def _wanted(self, slot: int) -> int:
        """How many results a slot's query asks for."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise DeviceError if the engine was closed, and nothing may be asked of it any more."""

    @property
    def free_slots(self) -> int:
        return self._slots.free_count

    @property
    def active_slots(self) -> int:
        return self._slots.active_count

    @property
    def dims(self) -> Mapping[str, int]:
        return self._collections.dims

    def backend(self) -> Backend:
        """See `Engine.backend`."""
        return self._backend

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """See `Engine.admit`."""
        self._check_open()
        number = self._collections.number(collection)
        self.limits.check(params)
        dim, vector = self._collections.dims[collection], np.asarray(query)
        if vector.dtype != np.float32 or vector.shape != (dim,) or not vector.flags.c_contiguous:
            vector = checked(vector[None], dim)[0]
        self._slots.expect_free()
        asked = (number, params.k, params.top_m, params.search_width, params.patience or 0)
        slot = self._admit(self._backend.handle, vector.ctypes.data, *asked)
        if slot == INVALID:
            raise refusal(vector, 0)
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        """See `Engine.extend`."""
        self._check_open()
        if not self._slots.active_count:
            return np.empty(0, np.int32)
        done = self._extend(self._backend.handle, self._report.ctypes.data)
        if done < 0:
            self._backend.check()
        self.extends_made, self.padded_slots = self._report[:2].tolist()
        return self._report[2 : 2 + 2 * done : 2].astype(np.int32)

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """See `Engine.result`. Raises InvalidSlot unless the slot is finished."""
        self._slots.expect(slot, SlotState.FINISHED)
        self._check_open()
        k = self._wanted(slot)
        ids, distances = np.full(k, -1, np.int64), np.full(k, np.inf, np.float32)
        self._harvest(self._backend.handle, slot, ids.ctypes.data, distances.ctypes.data)
        return ids, distances

    def release(self, slot: int) -> None:
        """See `Engine.release`. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        self._change_slot(slot, RELEASE)

    def pause(self, slot: int) -> None:
        """See `Engine.pause`. Raises InvalidSlot unless the slot is running."""
        self._slots.expect(slot, SlotState.ACTIVE)
        self._change_slot(slot, PAUSE)

    def resume(self, slot: int) -> None:
        """See `Engine.resume`. Raises InvalidSlot unless the slot is paused."""
        self._slots.expect(slot, SlotState.PAUSED)
        self._change_slot(slot, RESUME)

    def _change_slot(self, slot: int, what: int) -> None:
        self._check_open()
        if self._change(self._backend.handle, slot, what) < 0:
            self._backend.check()
