"""Experiment with the pool: continuous against static batches."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import plot, table
from ipc import Stage
from runtime.node.config import NodeConfig, PoolSection
from runtime.simulator.times.service import ServiceTimes
from runtime.testing.standalone_pool import Query, QueryOutcome, run_pool

Draw = Callable[[Path], None]
Result = tuple[Any, list[str], Draw]
_SLOTS, _QUERIES = 256, 20_000
_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)


def batching(options: Namespace) -> Result:
    """Continuous batching, where queries join the running batch at the next extend, against static batches.

    Seven of ten queries take 17 to 19 extends, the others 65 to 67 (top_m 64 and 256), the same in both, so recall is
    equal. Utilization: the queries' extends divided by the extends of all slots, under overload.
    """
    times, random = ServiceTimes(), Random(1)
    extends = [random.choice((17, 18, 19) if random.random() < 0.7 else (65, 66, 67)) for _ in range(_QUERIES)]
    top_m = [64 if count < 64 else 256 for count in extends]
    capacity = _SLOTS / (sum(extends) / _QUERIES * times.extend_time_s(_SLOTS))

    def run(policy: str, load: float) -> list[QueryOutcome]:
        chance, at_s, queries = Random(2), 0.0, []
        for count, size in zip(extends, top_m, strict=True):
            stage: Stage = "prefill" if chance.random() < 0.5 else "decode"
            queries.append(Query(round(at_s * 1e9), stage, count, size))
            at_s += chance.expovariate(load * capacity)
        section = PoolSection(slots=_SLOTS, queue=100_000, policy=policy)  # type: ignore[arg-type]
        return run_pool(queries, times, NodeConfig(pool=section))

    results, rows = [], []
    for load in _LOADS:
        one: dict[str, Any] = {"load": load}
        for name in ("trinity", "static"):
            took = [outcome.latency_ns / 1e6 for outcome in run(name, load)]
            one[name] = [float(np.percentile(took, q)) for q in (50, 95)]
        results.append(one)
        cells = [f"{value:.2f}" for name in ("trinity", "static") for value in one[name]]
        rows.append((f"{load:.0%}", *cells, f"{one['static'][1] / one['trinity'][1]:.1f}×"))
    use = {}
    for name in ("trinity", "static"):
        together = [Query(0, "decode", count, size) for count, size in zip(extends, top_m, strict=True)]
        section = PoolSection(slots=_SLOTS, queue=100_000, policy=name)  # type: ignore[arg-type]
        span_s = max(outcome.latency_ns for outcome in run_pool(together, times, NodeConfig(pool=section))) / 1e9
        use[name] = sum(extends) / (span_s / times.extend_time_s(_SLOTS) * _SLOTS)
    head = ("load", "continuous: p50 ms", "p95", "static: p50 ms", "p95", "p95 static / continuous")
    summary = f"Slots in use under overload: {use['trinity']:.0%} continuous, {use['static']:.0%} in static batches."

    def draw(path: Path) -> None:
        with plot(path, 2) as panels:
            for axes, q, name in zip(panels, (0, 1), ("p50", "p95"), strict=True):
                for kind, label in (("trinity", "continuous"), ("static", "static batches")):
                    axes.plot([100 * load for load in _LOADS], [one[kind][q] for one in results], "o-", label=label)
                axes.set_title(f"{name} of a query, ms")
                axes.set_xlabel("load (% of full slots)")
            panels[0].legend()

    return {"by_load": results, "in_use": use}, [*table(head, rows), "", summary], draw
