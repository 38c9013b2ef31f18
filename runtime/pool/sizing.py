"""Number of slots for `slots = "auto"`: from T_ext measured with 1, 2, 3, 4, 6, 8 … active slots."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, float64, int64

from gpu.engine import PAUSE, RELEASE, Backend
from gpu.index.data import IndexData
from gpu.slots import MAX_SLOTS
from ipc.native import intrinsics
from ipc.native.intrinsics import call, words
from runtime.pool.compiled import compiled

FIXED_SHARE = 0.1
"""Largest share of fixed cost in a round of the loop (an extend and the loop's own time)."""
LOOP_NS = 500
"""Duration of a round without an extend, requests and results (`benchmarks.pool`)."""
BUDGET_NS = 1_000_000_000
"""Longest measurement at a pool's start, of all its collections."""
_NEAR_BEST = 0.95  # of the best rate: more slots would only make queries wait
_ROUNDS = 3  # of measuring; the minimum counts, because other load only adds
_QUERIES = 8  # for each number of slots, plus three for each slot
_SAMPLES = 4096


class ExtendCost(NamedTuple):
    """Measured duration of a round with `active` slots: an extend and the loop's own time.

    Where slots advance on their own (resident kernel), a round is one extend of each: active/extend_ns is the rate.
    """

    active: int
    extend_ns: float


def fewest_slots(measured: Sequence[ExtendCost]) -> int:
    """Return the fewest slots with at most FIXED_SHARE of fixed cost in a round, or with 95% of the best measured rate.

    The fixed cost is `a` of a line T_ext(n) = a + b·n (least squares of the relative errors, a ≥ LOOP_NS). Single
    measurements are not enough: where an extend costs in proportion to its slots, as on a CPU, a few percent of noise
    would decide between two slots and thirty. A line does not describe a resident kernel, whose rate grows with the
    slots until the blocks or the host are busy, and not at all beyond: there the best rate decides.
    """
    active = np.array([one.active for one in measured], np.float64)
    taken = np.array([one.extend_ns for one in measured], np.float64)
    rates = active / taken
    most = int(active[rates >= _NEAR_BEST * rates.max()].min())
    (fixed, each), *_ = np.linalg.lstsq(np.stack([1 / taken, rates], 1), np.ones(len(taken)))
    if fixed < LOOP_NS or len(measured) == 1:
        fixed, each = LOOP_NS, (rates * (1.0 - LOOP_NS / taken)).sum() / (rates**2).sum()
    if each <= 0.0:
        return most
    return min(most, math.ceil(float(fixed) * (1.0 - FIXED_SHARE) / (FIXED_SHARE * float(each))))


def sizes_to(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 … and `most`."""
    steps = sorted({1 << power for power in range(12)} | {3 << power for power in range(11)})
    return [size for size in steps if size < most] + [most]


def measure(
    backend: Backend,
    data: IndexData,
    number: int,
    top_m: int,
    search_width: int,
    most: int,
    *,
    budget_ns: int = BUDGET_NS,
    clock: int = 0,
) -> list[ExtendCost]:
    """Measure rounds with 1 to `most` slots over the engine's collection of this number, within `budget_ns`.

    Sizes with which the engine reports no extend in their share of the time are left out. clock: address of a word with
    the time in ns, 0 for the machine's clock. Rows of the index are the queries, each used once a round, because the
    rows that a query has read stay cached. Raises the engine's error if it fails.
    """
    rows = data.rows
    sizes = sizes_to(most)
    queries = [_QUERIES + 3 * active for active in sizes]
    picked = np.random.default_rng(0).permutation(len(rows.codes))[: sum(queries)]
    stored = rows.codes[picked, : rows.dim].astype(np.float32) / np.float32(rows.scale)
    vectors = np.resize(stored, (sum(queries), rows.dim))
    engine = np.array(backend[:5], np.int64)
    alone = backend.prioritize != 0
    samples, report = np.zeros(_SAMPLES), np.zeros(2 + 2 * most, np.int64)
    scratch = samples, report, np.zeros(MAX_SLOTS, np.bool_), np.zeros(2, np.int64)

    def serve(begin: int, count: int, active: int, limit_ns: int) -> float:
        part = vectors[begin : begin + count]
        made = _serve(engine, part, active, number, top_m, search_width, limit_ns, clock, alone, *scratch)
        backend.check()
        return float(np.median(samples[:made])) if made else 0.0

    limit_ns = budget_ns // (_ROUNDS * len(sizes))
    serve(0, _QUERIES, 1, limit_ns)  # compiles, and faults in memory
    until = time.monotonic_ns() + budget_ns
    runs = list(zip(itertools.accumulate(queries, initial=0), queries, sizes, strict=False))
    best: dict[int, float] = {}
    for begin, count, active in runs * _ROUNDS:
        if time.monotonic_ns() >= until:
            break
        taken = serve(begin, count, active, limit_ns)
        if taken > 0.0:
            best[active] = min(best.get(active, taken), taken)
    return [ExtendCost(active, taken) for active, taken in best.items()]


@compiled
def _serve(
    engine: Any,
    vectors: npt.NDArray[np.float32],
    active: int,
    number: int,
    top_m: int,
    width: int,
    limit_ns: int,
    clock: int,
    alone: bool,
    samples: Any,
    report: Any,
    held: Any,
    result: Any,
) -> Any:
    """Search, `active` queries at a time, until `vectors` have been searched or `limit_ns` is over.

    Write to `samples` the ns of rounds, and return their number: of each call that reports extends, unless slots
    advance `alone`. Then queries admitted together finish together and their extends are reported at once: a mean for
    every `active` finished queries.
    """
    admit, extend, read, change, handle = engine[0], engine[1], engine[2], engine[3], engine[4]
    sent = running = rejected = made = 0
    done = extends = 0  # of this sample, which begins at `last`
    start = last = now = _now(clock)
    while sent - running - rejected < len(vectors) and now - start < limit_ns:
        while running < active and rejected < len(vectors):
            vector = vectors.ctypes.data + sent % len(vectors) * vectors.strides[0]
            slot = call(admit, (handle, vector, number, 1, top_m, width, 0))
            sent += 1
            if slot < 0:
                rejected += 1
            else:
                held[slot] = True
                running += 1
        if running == 0:
            break
        finished = call(extend, (handle, report.ctypes.data))
        if finished < 0:
            return 0
        for i in range(finished):
            slot = report[2 + 2 * i]
            call(read, (handle, slot, result.ctypes.data, result.ctypes.data + 8))
            call(change, (handle, slot, RELEASE))
            held[slot] = False
        running -= finished
        done += finished
        extends += report[0]
        now = _after_loop(clock)
        if extends and (done >= active or not alone) and made < len(samples):
            samples[made] = (now - last) / extends
            last, made, done, extends = now, made + 1, 0, 0
    if made == 0 and extends:
        samples[0], made = (now - last) / extends, 1
    _cancel(change, handle, held)
    return made


@compiled
def _cancel(change: int, handle: int, held: Any) -> None:
    """Cancel the queries in the slots that are held: all are stopped before the first wait for one."""
    for action in (PAUSE, RELEASE):
        for slot in range(len(held)):
            if held[slot]:
                call(change, (handle, slot, action))
    held[:] = False


@compiled
def _now(clock: int) -> Any:
    return words(clock, 1)[0] if clock else intrinsics.monotonic_ns()


@compiled
def _after_loop(clock: int) -> Any:
    """Spend LOOP_NS, for the work of the pool's loop between two extends. Return the time."""
    if clock:
        words(clock, 1)[0] += LOOP_NS
    until = _now(clock) + (0 if clock else LOOP_NS)
    while _now(clock) < until:
        pass
    return _now(clock)


CALLED = (
    _serve,
    (int64[::1], float32[:, ::1], *[int64] * 6, boolean, float64[::1], int64[::1], boolean[::1], int64[::1]),
)
"""The function that Python calls, and the types of its arguments."""
