"""Number of slots for `slots = "auto"`: from T_ext measured with 1, 2, 4 … active slots."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.engine import RELEASE, Backend
from gpu.index.data import IndexData
from ipc.memory import intrinsics
from ipc.memory.intrinsics import call
from runtime.pool.compiled import compiled

FIXED_SHARE = 0.1
"""Largest share of fixed cost in a round of the loop (an extend and the loop's own time)."""
LOOP_NS = 500.0
"""Duration of a round without an extend, requests and results (`benchmarks.pool`)."""
_ROUNDS = 3  # of measuring; the minimum counts, because other load only adds
_QUERIES = 16  # for each number of slots, plus one for each slot


class ExtendCost(NamedTuple):
    """Measured duration of an extend with `active` slots."""

    active: int
    extend_ns: float


def fewest_slots(measured: Sequence[ExtendCost]) -> int:
    """Return the fewest slots with at most FIXED_SHARE of fixed cost in a round, and no more than were measured.

    The fixed cost is `a` of a line T_ext(n) = a + b·n (least squares of the relative errors, a ≥ 0) plus the loop's own
    time. Single measurements are not enough: where an extend costs in proportion to its slots, as on a CPU, a few
    percent of noise would decide between two slots and thirty.
    """
    active = np.array([one.active for one in measured], np.float64)
    taken = np.array([one.extend_ns for one in measured], np.float64)
    ones = np.ones(len(taken))
    (fixed, each), *_ = np.linalg.lstsq(np.stack([1 / taken, active / taken], 1), ones)
    if fixed < 0.0 or len(measured) == 1:
        fixed, each = 0.0, float((active / taken).sum() / ((active / taken) ** 2).sum())
    most = max(one.active for one in measured)
    if each <= 0.0:
        return most
    return min(most, math.ceil((float(fixed) + LOOP_NS) * (1.0 - FIXED_SHARE) / (FIXED_SHARE * float(each))))


def measure(
    backend: Backend, data: IndexData, number: int, top_m: int, search_width: int, most: int
) -> list[ExtendCost]:
    """Measure T_ext with 1, 2, 4 … `most` slots over the engine's collection of this number.

    Rows of the index are the queries, each used once a round, because the rows that a query has read stay cached.
    """
    rows = data.rows.codes if data.rows.full is None else data.rows.full
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    queries = [_QUERIES + active for active in sizes]
    picked = np.random.default_rng(0).permutation(len(rows))[: sum(queries) + 1]
    vectors = np.resize(rows[picked, : data.rows.dim].astype(np.float32), (sum(queries) + 1, data.rows.dim))
    engine, report, times = np.array(backend[:5], np.int64), np.zeros(2 + 2 * most, np.int64), np.zeros(4096, np.int64)

    def serve(begin: int, count: int, active: int) -> list[int]:
        part = vectors[begin : begin + count]
        made = _serve(engine, part, active, number, top_m, search_width, report, times)
        backend.check()
        took: list[int] = times[:made].tolist()
        return took

    serve(0, 1, 1)  # compiles, and faults in memory
    begins = itertools.accumulate(queries, initial=1)
    runs = list(zip(begins, queries, sizes, strict=False))
    rounds = [[statistics.median(serve(*run)) for run in runs] for _ in range(_ROUNDS)]
    return [ExtendCost(active, min(took)) for active, took in zip(sizes, zip(*rounds, strict=True), strict=True)]


@compiled
def _serve(
    engine: Any,
    vectors: npt.NDArray[np.float32],
    active: int,
    number: int,
    top_m: int,
    width: int,
    report: Any,
    times: Any,
) -> Any:
    """Search all `vectors`, `active` at a time. Return the number of full extends; `times` has their ns."""
    admit, extend, change, handle = engine[0], engine[1], engine[3], engine[4]
    sent = running = made = took = 0
    while sent < len(vectors) or running:
        while running < active and sent < len(vectors):
            vector = vectors.ctypes.data + sent * vectors.strides[0]
            running += call(admit, (handle, vector, number, 1, top_m, width, 0)) >= 0
            sent += 1
        begin = intrinsics.monotonic_ns()
        done = call(extend, (handle, report.ctypes.data))
        took += intrinsics.monotonic_ns() - begin
        if done < 0:
            break
        if report[0] > 0:  # otherwise the engine reports this time with a later extend
            if running == active and made < len(times):
                times[made] = took // report[0]
                made += 1
            took = 0
        for i in range(done):
            call(change, (handle, report[2 + 2 * i], RELEASE))
        running -= done
    return made
