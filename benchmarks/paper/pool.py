"""Experiments with the pool: continuous batching, placement of the index, adaptive reserve."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import plot, table
from benchmarks.policy import bench
from benchmarks.policy.records import SHIPPED
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


def _policy_bench(options: Namespace, **more: Any) -> bench.Bench:
    if options.data is None:
        raise SystemExit("--data is required: a directory of traces")
    given = {"data": options.data, "traces": "azure", "requests": 1200, "windows": [0], "seed": 1}
    return bench.Bench(Namespace(**given | more))


def placements(options: Namespace) -> Result:
    """The best split of eight GPUs for each placement of the pool: own GPUs, with prefill, with decode, with both."""
    found = list(bench.placements(_policy_bench(options)))
    rows = [
        (
            f"×{row.cost}",
            *(f"{p.rate:.1f} ({p.prefill}+{p.decode}" + (f"+{p.pool})" if p.pool else ")") for p in row.best),
        )
        for row in found
    ]
    head = ("search cost", "separate pool, requests/s", "with prefill", "with decode", "coupled")

    def draw(path: Path) -> None:
        with plot(path, 1) as (axes,):
            for number, name in enumerate(head[1:]):
                axes.plot([row.cost for row in found], [row.best[number].rate for row in found], "o-", label=name)
            axes.set_xscale("log")
            axes.set_xlabel("search cost relative to an H100")
            axes.set_ylabel("requests/s at 90% attainment")
            axes.legend(fontsize=8)

    return found, table(head, rows), draw


def reserve(options: Namespace) -> Result:
    """The adaptive reserve r against strict priority of prefill, or decode.

    Three windows of Azure's conversations, with the pool as bottleneck.
    """
    names, loads = (SHIPPED, "prefill-first", "decode-first"), (0.9, 1.0, 1.1, 1.2)
    made = _policy_bench(options, windows=[0, 2400, 4800])
    results: list[dict[str, Any]] = []
    for load in loads:
        one: dict[str, Any] = {"load": load}
        for name in names:
            runs = [made.run(bench.Job("azure", window, 300e-6, load, name)) for window in made.options.windows]
            one[name] = [
                float(np.mean([getattr(run, what) for run in runs]))
                for what in ("attainment", "ttft_attainment", "tpot_attainment")
            ]
        results.append(one)
    rows = [
        (f"{one['load']:.0%}", *(" ".join(f"{share:.3f}" for share in one[name]) for name in names)) for one in results
    ]
    head = ("load", "adaptive r: both, TTFT, TPOT", "always prefill", "always decode")
    return results, table(head, rows), lambda path: _attained(path, results, names)


def _attained(path: Path, results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    with plot(path, 1) as (axes,):
        for name, label in zip(names, ("adaptive r", "always prefill", "always decode"), strict=True):
            axes.plot([100 * one["load"] for one in results], [one[name][0] for one in results], "o-", label=label)
        axes.set_xlabel("load (% of the pool's capacity)")
        axes.set_ylabel("met TTFT and TPOT")
        axes.set_ylim(0, 1.05)
        axes.legend()
