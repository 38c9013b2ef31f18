"""A `Backend` of an engine written in Python: compiled loops call it through C callbacks."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.engine import FAILED, INVALID, PAUSE, RESUME, Backend, Engine
from gpu.errors import InvalidParams, InvalidVector, UnknownCollection
from gpu.params import SearchParams
from gpu.slots import Collections


class Callbacks:
    """The functions of one engine. An error that is not caused by a query is stored, and `check` raises it."""

    def __init__(self, engine: Engine, collections: Collections) -> None:
        self._engine, self._collections = engine, collections
        self._params: dict[tuple[int, int, int, int], SearchParams] = {}
        self._error: BaseException | None = None
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(self._guarded(function))
            for count, function in ((7, self._admit), (2, self._extend), (4, self._read_result), (3, self._change))
        ]

    def backend(self) -> Backend:
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions]
        admit, extend, read_result, change = addresses
        return Backend(admit, extend, read_result, change, 0, self._collections.number, 0, self._check)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: int) -> int:
            try:
                return function(*arguments[1:])
            except BaseException as error:  # compiled code cannot propagate it
                self._error = error
                return FAILED

        return called

    def _admit(self, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> int:
        try:
            names = {self._collections.number(name): name for name in self._collections.dims}
            if collection not in names:
                return INVALID
            name = names[collection]
            params = self._params.get((k, top_m, width, patience))
            if params is None:
                params = self._params[k, top_m, width, patience] = SearchParams(k, top_m, width, patience or None)
            query = _array(vector, self._engine.dims[name], ctypes.c_float).copy()
            return self._engine.admit(query, params, name)
        except (InvalidVector, InvalidParams, UnknownCollection):
            return INVALID

    def _extend(self, report: int) -> int:
        engine = self._engine
        finished = engine.extend().tolist()
        record = (ctypes.c_int64 * (2 + 2 * len(finished))).from_address(report)
        record[0], record[1] = engine.extends_made, engine.padded_slots
        record[2::2] = finished
        record[3::2] = [engine.extends(slot) for slot in finished]
        return len(finished)

    def _read_result(self, slot: int, ids: int, distances: int) -> int:
        found, near = self._engine.result(slot)
        count = int(np.count_nonzero(found != -1))
        _array(ids, count, ctypes.c_int64)[:] = found[:count]
        _array(distances, count, ctypes.c_float)[:] = near[:count]
        return count

    def _change(self, slot: int, action: int) -> int:
        if action == PAUSE:
            self._engine.pause(slot)
        elif action == RESUME:
            self._engine.resume(slot)
        else:
            self._engine.release(slot)
        return 0


def _array(address: int, count: int, kind: Any) -> npt.NDArray[Any]:
    return np.ctypeslib.as_array((kind * count).from_address(address)) if count else np.empty(0)
