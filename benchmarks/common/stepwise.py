"""Stepwise search without the pool: fills an engine's slots as they become free, with the functions that the pool's
loop calls."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from gpu import CpuEngine, GraphIndex
from gpu.engine import RELEASE
from ipc.native.intrinsics import call


class Stepwise:
    """A single-threaded engine over an index with so many slots, for searches up to `max_top_m` and `max_width`."""

    def __init__(self, index: GraphIndex, slots: int, max_top_m: int = 1024, max_width: int = 1) -> None:
        self._engine = CpuEngine({"data": index}, slots=slots, max_top_m=max_top_m, max_search_width=max_width)
        self._backend = np.array(self._engine.backend()[:5], np.int64)
        self._slots = slots
        self._owners, self._report = np.zeros(slots, np.int64), np.zeros(2 + 2 * slots, np.int64)

    def search(
        self, queries: npt.NDArray[np.float32], k: int, top_m: int, width: int = 1
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return ids int64 [q, k] and distances float32 [q, k] of contiguous float32 queries [q, d]."""
        ids, distances = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        _run(self._backend, queries, self._slots, top_m, width, self._owners, self._report, ids, distances)
        return ids, distances


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _run(
    engine: Any, vectors: Any, slots: int, top_m: int, width: int, owners: Any, report: Any, ids: Any, distances: Any
) -> None:
    """owners: int64 [slots], the query in each slot. report: int64 [2 + 2 · slots], written by the engine."""
    admit, extend, read_result, change, handle = engine[0], engine[1], engine[2], engine[3], engine[4]
    k = ids.shape[1]
    admitted = running = 0
    while admitted < len(vectors) or running:
        while running < slots and admitted < len(vectors):
            slot = call(admit, (handle, vectors.ctypes.data + admitted * vectors.strides[0], 0, k, top_m, width, 0))
            owners[slot] = admitted
            admitted += 1
            running += 1
        done = call(extend, (handle, report.ctypes.data))
        for i in range(done):
            slot = report[2 + 2 * i]
            own_ids, own_distances = ids[owners[slot]], distances[owners[slot]]
            call(read_result, (handle, slot, own_ids.ctypes.data, own_distances.ctypes.data))
            call(change, (handle, slot, RELEASE))
        running -= done
