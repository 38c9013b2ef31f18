"""Queries through an engine at the times at which they arrive, one by one."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu import Engine, SearchParams


@dataclass
class Driven:
    """ids int64 [q, k], distances float32 [q, k], latency_s [q] (NaN: not finished within the limit), and the whole."""

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
        """Of the latencies of what was finished; NaN if nothing was."""
        known = self.latency_s[np.isfinite(self.latency_s)]
        return float(np.quantile(known, share)) if len(known) else float("nan")


def poisson(rate: float, count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Arrival times of a Poisson process, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def drive(
    engine: Engine,
    queries: npt.NDArray[np.float32],
    params: SearchParams,
    arrivals_s: npt.NDArray[np.float64] | None = None,
    limit_s: float = 60.0,
) -> Driven:
    """Search for each query from its arrival on (None: all at once), in the collection "docs".

    Latency is from the arrival, so waiting for a slot counts. host_s: time beside waiting for the device.
    """
    count = len(queries)
    arrivals = np.zeros(count) if arrivals_s is None else arrivals_s
    due = arrivals.tolist()
    ids = np.full((count, params.k), -1, np.int64)
    distances = np.full((count, params.k), np.inf, np.float32)
    latency = np.full(count, np.nan)
    owner: dict[int, int] = {}
    admitted = done = steps = extends = 0
    waited_ns = getattr(engine, "waited_ns", 0)
    begin = now = time.perf_counter()
    while done < count and now - begin < limit_s:
        now = time.perf_counter()
        while admitted < count and due[admitted] <= now - begin and engine.free_slots:
            owner[engine.admit(queries[admitted], params, "docs")] = admitted
            admitted += 1
        if not engine.active_slots:
            continue
        finished = engine.extend()
        steps += 1
        for slot in finished.tolist():
            number = owner.pop(slot)
            ids[number], distances[number] = engine.result(slot)
            latency[number] = time.perf_counter() - begin - due[number]
            extends += engine.extends(slot)
            engine.release(slot)
            done += 1
    seconds = time.perf_counter() - begin
    for slot in owner:
        engine.release(slot)
    waited_s = (getattr(engine, "waited_ns", 0) - waited_ns) / 1e9
    return Driven(ids, distances, latency, seconds, steps, extends, seconds - waited_s)
