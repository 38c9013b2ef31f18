"""Does the simulated pool wait as the real one does? One list of arrivals through both.

    python -m benchmarks.agreement --data DIR [--collection DIR] [--out benchmarks/results/agreement]

A client asks a real pool process (`benchmarks/pool/processes.py`) at random times, 30% prefill and 70% decode queries,
at half and at 80% of what the pool can do. The simulator gets the same queries at the times at
which the clients enqueued them, each with the extends that it really took. What an extend, a round and a query cost is
what `trinity calibrate` finds on this machine, in the proportion to which the pool's own counters had it in the run:
neighbours and the clients on the other core change a machine's speed from one second to the next. Compared: queries/s,
the mean wait for a slot, and latency to the answer, by stage. Of several repetitions the one with the fastest
extends counts: nothing else ran then.
"""

import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.common.machine import machine
from benchmarks.common.pool_alone import Query, run_pool
from benchmarks.common.report import table, write
from benchmarks.pool.bench import data_of, parser_of
from benchmarks.pool.clients import Load
from benchmarks.pool.processes import Bench
from ipc import Stage
from runtime.node.config import CollectionSection, NodeConfig, PoolSection
from runtime.node.metrics.columns import Counter, PoolMetrics
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.roofline import Roofline
from runtime.simulator.times.service import ServiceTimes

_LOADS = (0.5, 0.8)
_PREFILL = 0.3  # of the queries
_STAGES: tuple[Stage, Stage] = ("prefill", "decode")
_AGREE = 0.15
Figures = dict[str, float]
Times = NDArray[np.int64]


def figures(stage: Stage, at: Times, wait: Times, latency: Times) -> Figures:
    """Of one stage's queries: when they came and how long they waited and took, in ns."""
    return {
        f"{stage} queries/s": len(at) / float((at + latency).max() - at.min()) * 1e9,
        f"{stage} mean wait (µs)": float(wait.mean()) / 1e3,
        f"{stage} p50 latency (µs)": float(np.percentile(latency, 50)) / 1e3,
        f"{stage} p95 latency (µs)": float(np.percentile(latency, 95)) / 1e3,
    }


def compared(bench: Bench, times: ServiceTimes, config: NodeConfig, rate: float, seconds: float, seed: int) -> Any:
    """One run: the real figures, the simulated ones, and the share of its core that the pool had."""
    parts = zip(_STAGES, (_PREFILL, 1 - _PREFILL), strict=True)
    loads = [Load(stage, seconds, (bench.usual,), rate=rate * part, seed=seed + len(stage)) for stage, part in parts]
    before = bench.counters("trinity")
    outcomes = bench.ask("trinity", *loads)
    after = bench.counters("trinity")
    times, paces = as_it_was(times, {name: after[name] - before[name] for name in after})
    rows = np.concatenate([outcome.answers[0] for outcome in outcomes])
    stages = [stage for stage, outcome in zip(_STAGES, outcomes, strict=True) for _ in outcome.answers[0]]
    at = rows[:, 0] - rows[:, 0].min()
    order = np.argsort(at, kind="stable").tolist()
    fates = run_pool([Query(int(at[i]), stages[i], int(rows[i, 3])) for i in order], times, config)
    simulated = np.zeros((len(rows), 2), np.int64)
    simulated[order] = [(fate.wait_ns, fate.latency_ns) for fate in fates]
    found: dict[str, Any] = {"real": {}, "simulated": {}, "pool_cpu": bench.cpu, **paces}
    for stage in _STAGES:
        its = np.array([other == stage for other in stages])
        real = rows[its]
        found["real"] |= figures(stage, at[its], real[:, 1] - real[:, 0], real[:, 2] - real[:, 0])
        found["simulated"] |= figures(stage, at[its], simulated[its, 0], simulated[its, 1])
    return found


def as_it_was(times: ServiceTimes, counted: dict[Counter, float]) -> tuple[ServiceTimes, Figures]:
    """The costs in a run that has counted so much, and how much slower than calibrated extends and the loop were."""
    extends, active = counted[PoolMetrics.EXTENDS], counted[PoolMetrics.SLOT_STEPS]
    queries = sum(counted[queries] for queries in PoolMetrics.QUERIES.values())
    extend = counted[PoolMetrics.EXTEND_SECONDS] / (extends * times.extend_s + active * times.extend_slot_s)
    loop = counted[PoolMetrics.LOOP_SECONDS] / (extends * times.round_s + queries * times.query_s)
    found = replace(
        times,
        extend_s=times.extend_s * extend,
        extend_slot_s=times.extend_slot_s * extend,
        round_s=times.round_s * loop,
        query_s=times.query_s * loop,
        roofline=Roofline(),
    )
    return found, {"extend_pace": extend, "loop_pace": loop}


def markdown(report: dict[str, Any]) -> str:
    told = report["machine"]
    lines = [
        f"# The simulated pool against the real one: {report['data']}",
        "",
        f"{told['processor']}, {told['cores']} cores, {told['system']}, Python {told['python']}; "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + f"; seed {report['seed']}; an extend costs {report['extend_s'] * 1e6:.1f} µs and "
        f"{report['extend_slot_s'] * 1e6:.2f} µs a slot, a query {report['query_s'] * 1e6:.1f} µs more, the "
        f"loop {report['round_s'] * 1e6:.1f} µs an extend, waking {report['wake_s'] * 1e6:.1f} µs.",
    ]
    for load, run in report["runs"].items():
        had = (
            f"{run['pool_cpu']:.0%} of its core was the pool's; extends took {run['extend_pace']:.2f}, its loop "
            f"{run['loop_pace']:.2f} of what was calibrated"
        )
        lines += ["", f"At {float(load):.0%} of the pool's capacity ({had}):"]
        rows = []
        for name, real in run["real"].items():
            ratio = run["simulated"][name] / max(real, 1e-9)
            off = "" if abs(ratio - 1) <= _AGREE else " (off)"
            rows.append([name, f"{real:,.1f}", f"{run['simulated'][name]:,.1f}", f"{ratio:.2f}{off}"])
        lines += ["", *table(["", "real", "simulated", "simulated / real"], rows)]
    return "\n".join(lines)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    repeats = options.rounds or (1 if options.quick else 8)
    seconds = options.seconds or (1.0 if options.quick else 2.0)
    runs = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, collection, queries, recall = data_of(options, Path(folder))
        limits = PoolSection(slots=options.slots or "auto", top_m=options.top_m, search_width=options.search_width)
        config = NodeConfig(pool=limits, collections=(CollectionSection("docs", str(collection)),))
        times = calibrate(config, ServiceTimes())
        bench = Bench(options, collection, queries, stack, pools=("trinity",))
        flood = [Load("decode", seconds, (bench.usual,), window=60, seed=n) for n in range(2)]
        capacity = sum(outcome.per_second() for outcome in bench.ask("trinity", *flood))
        for load in _LOADS:
            found = [
                compared(bench, times, config, load * capacity, seconds, options.seed + 10 * n) for n in range(repeats)
            ]
            runs[str(load)] = min(found, key=lambda run: float(run["extend_pace"]))
            print(f"{load:.0%}: {runs[str(load)]}", file=sys.stderr)
    report = {
        "data": f"{name}, recall@10 {recall:.3f} at top_m {options.top_m}, search_width {options.search_width}",
        "machine": machine(),
        "versions": {name: version(name) for name in ("numpy", "numba", "pyzmq")},
        "seed": options.seed,
        "extend_s": times.extend_s,
        "extend_slot_s": times.extend_slot_s,
        "query_s": times.query_s,
        "round_s": times.round_s,
        "wake_s": times.wake_s,
        "runs": runs,
    }
    write(report, markdown(report), options.out)


if __name__ == "__main__":
    main()
