"""Throughput with all slots busy, and latency by arrival rate."""

from contextlib import closing

import numpy as np

from benchmarks.gpu_check.load_driver import LoadResult, poisson, run_load
from benchmarks.gpu_check.report import Outcome, micros, rate
from benchmarks.gpu_check.setup import Setup

_SHARES = (0.2, 0.4, 0.6, 0.8, 0.9)


def check(setup: Setup, outcome: Outcome) -> None:
    """Measure both, with recall."""
    count = 80 if setup.small else 100_000
    queries = repeated(setup.data.queries, count)
    seconds = 0.2 if setup.small else 2.0
    with closing(setup.engine()) as engine:
        run_load(engine, queries[: len(queries) // 10], setup.params)
        full = run_load(engine, queries, setup.params)
        capacity = full.finished / full.seconds
        outcome.add("all slots busy", f"{rate(capacity)} at recall@10 {recall_of(setup, full):.4f}")
        outcome.data |= {"capacity_per_s": capacity, "rates": []}
        for share in _SHARES:
            offered = share * capacity
            count = max(20, min(int(offered * seconds), len(queries)))
            load = run_load(engine, queries[:count], setup.params, poisson(offered, count), 4 * seconds)
            outcome.add(f"Poisson at {share:.0%} ({rate(offered)})", summary(load))
            outcome.data["rates"].append({"offered_per_s": offered, **figures(load)})


def repeated(queries: np.ndarray, count: int) -> np.ndarray:
    """Repeat queries cyclically to `count`."""
    times = -(-count // len(queries))
    return np.ascontiguousarray(np.tile(queries, (times, 1))[:count])


def recall_of(setup: Setup, load: LoadResult) -> float:
    """Return the recall@10 of the first round of repeated queries."""
    known = min(len(setup.data.queries), len(load.ids))
    truth = setup.data.truth[:known, None, :10]
    return float((load.ids[:known, :10, None] == truth).any(axis=2).mean())


def figures(load: LoadResult) -> dict[str, float]:
    """Return a run's figures for the JSON file."""
    latencies = {f"p{share * 100:g}_s": load.percentile(share) for share in (0.5, 0.9, 0.99)}
    return {"finished": load.finished, "asked": len(load.ids), "seconds": load.seconds, **latencies}


def summary(load: LoadResult) -> str:
    """Format a run's latencies for the table."""
    late = len(load.ids) - load.finished
    text = f"p50 {micros(load.percentile(0.5))}, p99 {micros(load.percentile(0.99))}"
    return text if not late else f"{text}, {late} of {len(load.ids)} not finished in time"
