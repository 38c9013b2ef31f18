"""How many queries are best active at a time on this machine: T_ext measured with 1, 2, 4 … slots."""

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
"""Of an extend and the loop's round about it, at most, that may be what it would take with no slot at all."""
LOOP_NS = 500.0
"""What the loop takes for a round with nothing to receive and nothing to publish (`benchmarks.pool`)."""
_ROUNDS = 3  # of measuring; the quickest counts, for whatever else the machine does only adds
_QUERIES = 16  # of each number of slots, and one more a slot


class Measured(NamedTuple):
    """An extend of `active` slots takes so long."""

    active: int
    extend_ns: float


def fewest_slots(measured: Sequence[Measured]) -> int:
    """The fewest active slots of whose round no more than FIXED_SHARE is fixed, but no more than were measured.

    A line T_ext(n) = a + b·n through all that was measured (least squares of the relative errors, a ≥ 0) says what is
    fixed, a and the loop's own part. Single sizes would not do: where an extend costs in proportion to its slots, as on
    a CPU, their few percent of noise would choose between two slots and thirty.
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


def measure(backend: Backend, data: IndexData, number: int, top_m: int, search_width: int, most: int) -> list[Measured]:
    """T_ext with 1, 2, 4 … `most` slots, over a collection of the engine's that has this number.

    Rows of the index are the queries, each asked once a round: what one has read is in the caches for a while.
    """
    rows = data.rows.codes if data.rows.full is None else data.rows.full
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    queries = [_QUERIES + active for active in sizes]
    picked = np.random.default_rng(0).permutation(len(rows))[: sum(queries) + 1]
    vectors = np.resize(rows[picked, : data.rows.dim].astype(np.float32), (sum(queries) + 1, data.rows.dim))
    engine, report, times = np.array(backend[:5], np.int64), np.zeros(2 + 2 * most, np.int64), np.zeros(4096, np.int64)

    def serve(begin: int, count: int, active: int) -> list[int]:
        asked = vectors[begin : begin + count]
        made = _serve(engine, asked, active, number, top_m, search_width, report, times)
        backend.check()
        took: list[int] = times[:made].tolist()
        return took

    serve(0, 1, 1)  # compiles, and first touches
    begins = itertools.accumulate(queries, initial=1)
    parts = list(zip(begins, queries, sizes, strict=False))
    rounds = [[statistics.median(serve(*part)) for part in parts] for _ in range(_ROUNDS)]
    return [Measured(active, min(took)) for active, took in zip(sizes, zip(*rounds, strict=True), strict=True)]


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
    """Search all `vectors`, `active` at a time; how many extends that filled, and what each took, in `times`."""
    admit, extend, change, handle = engine[0], engine[1], engine[3], engine[4]
    asked = running = made = took = 0
    while asked < len(vectors) or running:
        while running < active and asked < len(vectors):
            vector = vectors.ctypes.data + asked * vectors.strides[0]
            running += call(admit, (handle, vector, number, 1, top_m, width, 0)) >= 0
            asked += 1
        begin = intrinsics.monotonic_ns()
        done = call(extend, (handle, report.ctypes.data))
        took += intrinsics.monotonic_ns() - begin
        if done < 0:
            break
        if report[0] > 0:  # else the engine has not told of this time yet
            if running == active and made < len(times):
                times[made] = took // report[0]
                made += 1
            took = 0
        for i in range(done):
            call(change, (handle, report[2 + 2 * i], RELEASE))
        running -= done
    return made
