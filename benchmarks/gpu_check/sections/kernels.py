"""Times of each kernel by CUDA events, and the bandwidth of the rows actually read."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from benchmarks.gpu_check.device_times import StageTimes, copy_bytes_s, time_stages
from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.setup import Setup

_EXTENDS, _ROUNDS = 4, 5
_FEWER_SLOTS = (128, 1)


def check(setup: Setup, outcome: Outcome) -> None:
    """Measure both kernels over full batches and smaller ones."""
    cases = (setup.slots, *_FEWER_SLOTS)
    if not setup.on_gpu:
        for slots in cases:
            outcome.add(f"{slots} slots, each kernel", "skipped: no GPU")
        return
    copy = copy_bytes_s(setup.device)
    row_bytes = int(setup.index.data.rows.codes.strides[0])
    outcome.data |= {"copy_bytes_s": 2 * copy, "row_bytes": row_bytes, "stages": {}}
    for slots in cases:
        times = _measure(setup, slots)
        outcome.data["stages"][str(slots)] = add_times(outcome, slots, times)
        if slots == setup.slots:
            bytes_s = distance_bytes_s(times, row_bytes)
            outcome.add("… rows read", f"{bytes_s / 1e9:,.0f} GB/s, {bytes_s / (2 * copy):.1%} of the copy")
            outcome.data["distance_bytes_s"] = bytes_s


def add_times(outcome: Outcome, slots: int, times: Sequence[StageTimes]) -> list[dict[str, Any]]:
    """Add the median of each kernel to the outcome. Returns all times for the JSON file."""
    for name in times[0].seconds:
        outcome.add(f"{slots} slots, {name}, p50", micros(float(np.median([one.seconds[name] for one in times]))))
    if rows := float(np.median([one.rows for one in times])):
        outcome.add("… rows scored in an extend, p50", f"{rows:,.0f}")
    return [{"seconds": one.seconds, "slots": one.slots, "rows": one.rows} for one in times]


def distance_bytes_s(times: Sequence[StageTimes], row_bytes: int) -> float:
    """Return the bandwidth of rows in the distance kernel over all extends, bytes/s."""
    seconds = sum(taken for one in times for name, taken in one.seconds.items() if name.startswith("compute_distances"))
    return sum(one.rows for one in times) * row_bytes / seconds


def _measure(setup: Setup, slots: int) -> list[StageTimes]:
    """Time extends that advance all slots; the first round is a warm-up."""
    with closing(setup.cuda_engine(slots)) as engine:
        queries = np.resize(setup.data.queries, (slots * (_ROUNDS + 1), setup.index.dim))
        measured: list[StageTimes] = []
        for number in range(_ROUNDS + 1):
            batch = queries[number * slots : (number + 1) * slots]
            held = [engine.admit(query, setup.params, "docs") for query in batch]
            engine.extend()  # untimed: the first one scores the seeds
            times = [time_stages(engine) for _ in range(_EXTENDS)]
            measured += [one for one in times if number and one.slots == slots]
            for slot in held:
                engine.release(slot)
    if not measured:
        raise AssertionError("no extend advanced all slots: the queries finish too early to be measured")
    return measured
