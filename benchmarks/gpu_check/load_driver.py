"""Load driver: send queries to an engine at given arrival times, with a compiled loop over its backend.

The loop uses `gpu.engine.Backend`, as a pool does, so that measurements do not include Python's cost per query.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu import Engine, SearchParams
from gpu.compiled import compiled
from gpu.engine import RELEASE
from gpu.slots import MAX_SLOTS
from ipc.native.intrinsics import call_int, monotonic_ns

_INVALID_QUERY, _ENGINE_FAILED = -1, -2


@dataclass
class LoadResult:
    """Results of a run: ids int64 [q, k], distances float32 [q, k], latency_s [q] (NaN: unfinished), and totals."""

    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    latency_s: npt.NDArray[np.float64]
    seconds: float
    steps: int
    extends: int
    host_s: float

    @property
    def finished(self) -> int:
        return int(np.isfinite(self.latency_s).sum())

    def percentile(self, share: float) -> float:
        """Return a quantile of the latencies of finished queries; NaN if there are none."""
        known = self.latency_s[np.isfinite(self.latency_s)]
        return float(np.quantile(known, share)) if len(known) else float("nan")


def poisson(rate: float, count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return arrival times of a Poisson process, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def run_load(
    engine: Engine,
    queries: npt.NDArray[np.float32],
    params: SearchParams,
    arrivals_s: npt.NDArray[np.float64] | None = None,
    limit_s: float = 20.0,
) -> LoadResult:
    """Search each query in the collection "docs" from its arrival time on (None: all at once).

    Latency includes waiting for a slot. host_s: time not spent waiting for the device.
    Raises AssertionError for an invalid query, and the engine's errors.
    """
    count, slots = len(queries), engine.free_slots
    backend = engine.backend()
    due = np.zeros(count, np.int64) if arrivals_s is None else (arrivals_s * 1e9).astype(np.int64)
    ids = np.full((count, params.k), -1, np.int64)
    distances = np.full((count, params.k), np.inf, np.float32)
    took = np.full(count, -1, np.int64)
    owners = np.full(MAX_SLOTS, -1, np.int64)
    functions = (backend.admit, backend.extend, backend.read_result, backend.change_state, backend.handle)
    spec = (backend.number("docs"), params.k, params.top_m, params.search_width, params.patience or 0)
    waited_ns = getattr(engine, "waited_ns", 0)
    vectors = np.ascontiguousarray(queries, np.float32)
    counts = _drive(
        functions, vectors, spec, due, int(limit_s * 1e9), slots, ids, distances, took, owners,
        np.zeros(2 + 2 * MAX_SLOTS, np.int64),
    )  # fmt: skip
    done, steps, extends, spent_ns = (int(one) for one in counts)
    assert done != _INVALID_QUERY, "a query is invalid"
    if done == _ENGINE_FAILED:
        backend.check()
    waited_s = (getattr(engine, "waited_ns", 0) - waited_ns) / 1e9
    latency = np.where(took >= 0, took / 1e9, np.nan)
    return LoadResult(ids, distances, latency, spent_ns / 1e9, steps, extends, spent_ns / 1e9 - waited_s)


@compiled
def _drive(
    functions: Any, vectors: Any, spec: Any, due: Any, limit: int, free: int, ids: Any, distances: Any, took: Any,
    owners: Any, report: Any,
) -> Any:  # fmt: skip
    """Return the number of finished queries, or an error code; steps; total extends; elapsed ns."""
    admit, extend, read_result, change, handle = functions
    collection, k, top_m, width, patience = spec
    count = len(vectors)
    admitted = done = running = steps = extends = 0
    begin = now = monotonic_ns()
    while done < count and now - begin < limit:
        now = monotonic_ns()
        while admitted < count and due[admitted] <= now - begin and free > 0:
            vector = vectors.ctypes.data + admitted * vectors.strides[0]
            slot = call_int(admit, (handle, vector, collection, k, top_m, width, patience))
            if slot < 0:
                return _INVALID_QUERY, steps, extends, now - begin
            owners[slot] = admitted
            free, running, admitted = free - 1, running + 1, admitted + 1
        if running == 0:
            continue
        finished = call_int(extend, (handle, report.ctypes.data))
        if finished < 0:
            return _ENGINE_FAILED, steps, extends, now - begin
        steps += 1
        for i in range(finished):
            slot = report[2 + 2 * i]
            number = owners[slot]
            owners[slot] = -1
            extends += report[3 + 2 * i]
            call_int(
                read_result,
                (
                    handle,
                    slot,
                    ids.ctypes.data + number * ids.strides[0],
                    distances.ctypes.data + number * distances.strides[0],
                ),
            )
            took[number] = monotonic_ns() - begin - due[number]
            call_int(change, (handle, slot, RELEASE))
            free, running, done = free + 1, running - 1, done + 1
    spent = monotonic_ns() - begin
    for slot in range(len(owners)):
        if owners[slot] >= 0:
            call_int(change, (handle, slot, RELEASE))
    return done, steps, extends, spent
