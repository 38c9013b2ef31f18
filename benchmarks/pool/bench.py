"""Pool benchmark: cost of the rings and the loop, and prefill latency under a decode flood.

    python -m benchmarks.pool --data DIR [--rounds 3] [--seconds 3] [--only idle] [--out benchmarks/results/pool]
    python -m benchmarks.pool --quick

Over MiniLM's 70,639 vectors of 384 dimensions, and throughput also over 8,000 of 64 (`--quick`: everything over these).

Real pool processes, clients and the bare engine on one machine (`benchmarks/pool/processes.py`), in the default
configuration. Every round runs all sections; figures are medians over rounds. Latencies are from the client's enqueue
to the pool's publish, because the client polls two rings. Throughputs are per second of CPU time of the pool's (or the
engine's) process, which excludes other processes' load. Runs in which other processes had the cores for more than .5%
of the time are repeated, whatever their results.

- throughput: clients keep 240 queries each outstanding; compared with the engine alone in one process on the pool's
  core, alternating every second, run to completion and stepwise, over the same queries in random order. The loop's own
  time is all that the pool does between two extends (preparation of queries and control work included); measured with
  usual and with short queries, it is split into a cost per query and a cost per step.
- overload: one client sends prefill queries at random times, 15% of the pool's capacity; the other decode queries at
  twice the capacity (queries that do not fit into its ring are dropped).
- idle: one client sends one query at a time; the round trip from its submit to its poll without the engine's time: at
  20 per second, so that the pool sleeps before each, and back to back, so that it spins. Below the former is the
  floor: the wake-up of any process here (`benchmarks/pool/wake_up.py`), measured in the same round.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.machine import machine
from benchmarks.common.report import table, write
from benchmarks.pool.clients import Load, Outcome, Vectors
from benchmarks.pool.processes import IDLE_PER_S, Bench
from runtime.node.config import NodeConfig
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.worker_config import SEARCH_WIDTH
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.reader import CollectionReader

_PREFILL_SHARE, _OVERLOAD = 0.15, 2.0
_WINDOW = 240  # of 256 slots of a ring
_TURNS = 3
_SECTIONS = ("throughput", "overload", "idle")
_SHORT = (1.0, 10, 32, 4)

Found = dict[str, float]


def one_round(bench: Bench, seconds: float, seed: int, sections: Sequence[str]) -> Found:
    """Run each section once."""
    results = {"load_average": os.getloadavg()[0]}
    if "throughput" in sections or "overload" in sections:
        results |= _throughput(bench, seconds, seed)
    if "overload" in sections:
        results |= _overload(bench, seconds, seed, results["pool_per_s"])
    if "idle" in sections:
        results |= _idle(bench, seconds, seed)
    return results


def _throughput(bench: Bench, seconds: float, seed: int) -> Found:
    part = [Load("decode", seconds / _TURNS, (bench.usual,), window=_WINDOW, seed=seed + n) for n in range(2)]
    alone, served = [], []
    for _ in range(_TURNS):  # alternating: both share the machine's noise
        alone.append(bench.engine(seconds / _TURNS))
        served.append((*_own_time(bench, part), bench.cpu))
    capacity, cpu = fmean(one[0] for one in served), fmean(one[2] for one in served)
    usual = np.sum([one[1] for one in served], axis=0)
    _, other = _own_time(bench, [load._replace(classes=(_SHORT,), seconds=seconds) for load in part])
    # loop seconds = queries · a + steps · b, of two runs that differ in steps a query
    a, b = np.linalg.solve([usual[:2], other[:2]], [usual[2], other[2]]) * 1e6
    return {
        "engine_per_cpu_s": fmean(one[0] for one in alone),
        "stepwise_per_cpu_s": fmean(one[1] for one in alone),
        "pool_per_cpu_s": capacity / cpu,
        "pool_per_s": capacity,
        "pool_cpu": cpu,
        "loop_us_a_query": float(a),
        "loop_us_a_step": float(b),
        "extend_us_a_query": usual[3] / usual[0] * 1e6,
        "steps_a_query": usual[1] / usual[0],
    }


def _own_time(bench: Bench, loads: list[Load]) -> tuple[float, list[float]]:
    """Return queries per second; and the pool's queries, steps, seconds outside of extends, and seconds in extends."""
    capacity = sum(outcome.per_second() for outcome in bench.run_load(*loads))
    counters = (
        PoolMetrics.QUERIES["decode"], PoolMetrics.EXTENDS, PoolMetrics.LOOP_SECONDS, PoolMetrics.EXTEND_SECONDS
    )  # fmt: skip
    return capacity, [bench.counted[counter] for counter in counters]


def _overload(bench: Bench, seconds: float, seed: int, capacity: float) -> Found:
    prefill = Load("prefill", seconds, (bench.usual,), rate=_PREFILL_SHARE * capacity, seed=seed)
    flood = Load("decode", seconds, (bench.usual,), rate=_OVERLOAD * capacity, seed=seed + 1)
    (alone,) = bench.run_load(prefill)
    results = {"alone_p50_us": alone.p(50), "alone_p99_us": alone.p(99)}
    (only,) = bench.run_load(flood)
    results["decode_only_per_cpu_s"] = only.per_second() / bench.cpu
    first, second = bench.run_load(prefill, flood)
    return results | {
        "prefill_p50_us": first.p(50),
        "prefill_p99_us": first.p(99),
        "decode_p99_us": second.p(99),
        "prefill_per_cpu_s": first.per_second() / bench.cpu,
        "decode_per_cpu_s": second.per_second() / bench.cpu,
    }


def _idle(bench: Bench, seconds: float, seed: int) -> Found:
    (asleep,) = bench.run_load(Load("decode", seconds, (bench.usual,), rate=IDLE_PER_S, seed=seed))
    (spinning,) = bench.run_load(Load("decode", seconds, (bench.usual,), window=1, seed=seed))
    return {
        "idle_asleep_us": asleep.overhead_us(),
        "idle_spinning_us": spinning.overhead_us(),
        "idle_floor_us": bench.wake_up_us(),
    }


def disturbed(*benches: Bench) -> Found:
    """Return the repeated runs since the last call, and the largest loss of the counted ones."""
    results = {
        "measured_again": float(sum(bench.retries for bench in benches)),
        "lost_percent": 100 * max(bench.lost for bench in benches),
    }
    for bench in benches:
        bench.retries, bench.lost = 0, 0.0
    return results


def _per_second(outcomes: list[Outcome]) -> float:
    return sum(outcome.per_second() for outcome in outcomes)


# ---- the report


def overall(rounds: list[Found]) -> Found:
    """Return the median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


class Bar(NamedTuple):
    """A figure with its required bound. names: the measured values that `value` takes."""

    figure: str
    sign: str
    bar: float
    value: Callable[..., float]
    names: str

    def of(self, results: Found) -> float | None:
        """Return the figure; None if it was not measured."""
        names = self.names.split()
        return self.value(*(results[name] for name in names)) if set(names) <= set(results) else None


def bars(quick: bool) -> list[Bar]:
    """Return the bars. With `quick`, over 64 dimensions, the loop's share of a query's time is larger."""
    return [
        Bar("pool / engine", "≥", 0.85 if quick else 0.95, truediv, "pool_per_cpu_s engine_per_cpu_s"),
        Bar("stepwise / run to completion", "≥", 0.95, truediv, "stepwise_per_cpu_s engine_per_cpu_s"),
        Bar("the loop's own time, µs a query", "≤", 3.0, float, "loop_us_a_query"),
        Bar("the loop's own time, µs a step", "≤", 3.0, float, "loop_us_a_step"),
        Bar("prefill p99, overload / alone", "≤", 1.25, truediv, "prefill_p99_us alone_p99_us"),
        Bar(
            "decode / (decode alone - prefill's share)", "≥", 0.95, lambda own, alone, share: own / (alone - share),
            "decode_per_cpu_s decode_only_per_cpu_s prefill_per_cpu_s",
        ),
        Bar("one query at idle, pool asleep, µs beside the engine", "≤", 120.0, float, "idle_asleep_us"),
        Bar("one query at idle, pool spinning, µs beside the engine", "≤", 25.0, float, "idle_spinning_us"),
        Bar("pool / engine, 64 dimensions", "≥", 0.85, truediv, "small_pool_per_cpu_s small_engine_per_cpu_s"),
        Bar(
            "stepwise / run to completion, 64 dimensions", "≥", 0.95, truediv,
            "small_stepwise_per_cpu_s small_engine_per_cpu_s",
        ),
    ]  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    host, shown = report["machine"], report["settings"]
    lines = [
        f"# The pool: {report['data']}",
        "",
        f"{host['processor']}, {host['cores']} cores, {host['system']}, Python {host['python']}; "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + f"; seed {shown['seed']}, {shown['rounds']} rounds of {shown['seconds']:g} s; "
        f"load average {report['overall']['load_average']:.1f}; "
        f"{sum(each['measured_again'] for each in report['rounds']):.0f} runs were disturbed and repeated, "
        f"the counted ones lost at most {max(each['lost_percent'] for each in report['rounds']):.1f}% of its time to "
        f"others; took {report['took_s'] / 60:.1f} minutes.",
        "",
    ]
    rows = []
    for bar in bars(shown["quick"]):
        value = bar.of(report["overall"])
        if value is not None:
            met = value >= bar.bar if bar.sign == "≥" else value <= bar.bar
            each = ", ".join(f"{bar.of(results):.2f}" for results in report["rounds"])
            rows.append((bar.figure, f"{bar.sign} {bar.bar:g}", f"{value:.2f}{'' if met else ' (missed)'}", each))
    measured = [(name, f"{value:,.1f}") for name, value in report["overall"].items()]
    lines += table(("ratio", "bar", "", "of each round"), rows)
    return "\n".join([*lines, "", *table(("measured, the median round", ""), measured)])


def synthetic(options: argparse.Namespace, folder: Path) -> tuple[str, Path, Vectors, float]:
    """Return 8,000 clustered vectors of 64 dimensions, as `data_of`."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(64, 64))
    base = (centres[random.integers(64, size=8000)] + 0.4 * random.normal(size=(8000, 64))).astype(np.float32)
    queries = (centres[random.integers(64, size=500)] + 0.4 * random.normal(size=(500, 64))).astype(np.float32)
    truth = np.argsort(((queries[:, None] - base[None]) ** 2).sum(-1), axis=1)[:, :10]
    return _built("synthetic-64-l2, 8,000 clustered vectors", options, folder / "small", base, queries, truth)


def data_of(options: argparse.Namespace, folder: Path) -> tuple[str, Path, Vectors, float]:
    """Return the name of the data, a collection, queries, and recall@10 with the parameters used."""
    if options.quick:
        return synthetic(options, folder)
    if options.data is None:
        sys.exit("--data DIR is needed, or --quick for synthetic vectors")
    name = "minilm-384-cosine"
    parts = ("base", "query", "truth")
    files = [path for part in parts for path in options.data.rglob(f"{name}.{part}.npy")]
    if len(files) != len(parts):
        sys.exit(f"{options.data} has {name}.{{base,query,truth}}.npy not exactly once")
    base, queries, truth = map(np.load, files)
    collection = options.collection or folder / "docs"
    return _built(name, options, collection, base.astype(np.float32), queries.astype(np.float32), truth[:, :10])


def _built(
    name: str, options: argparse.Namespace, collection: Path, base: Vectors, queries: Vectors, truth: Any
) -> tuple[str, Path, Vectors, float]:
    if not collection.exists():
        print("building the index", file=sys.stderr)
        metric = "l2" if "l2" in name else "cosine"
        bulk_load.build(base, collection, metric=metric, degree=32)  # type: ignore[arg-type]
    with CollectionReader(collection) as opened:
        ids, _ = opened.search(queries, 10, top_m=options.top_m, search_width=options.search_width)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids.tolist(), truth.tolist(), strict=True)])
    return name, collection, queries, float(recall)


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all pool benchmarks."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with minilm-384-cosine.{base,query,truth}.npy")
    parser.add_argument("--collection", type=Path, help="folder of the collection, built if it does not exist")
    parser.add_argument("--quick", action="store_true", help="synthetic vectors, one short round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--slots", type=int, default=0, help="instead of the default")
    parser.add_argument("--top-m", type=int, default=NodeConfig().pool.top_m)
    parser.add_argument("--search-width", type=int, default=SEARCH_WIDTH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(_SECTIONS), help="sections, comma-separated")
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := sorted(set(sections) - set(_SECTIONS)):
        parser.error(f"--only: no section {unknown[0]!r}; sections: {', '.join(_SECTIONS)}")
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    rounds = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, collection, queries, recall = data_of(options, Path(folder))
        bench = Bench(options, collection, queries, stack)
        small = None if options.quick or "throughput" not in sections else synthetic(options, Path(folder))
        small_bench = None if small is None else Bench(options, small[1], small[2], stack)
        for number in range(options.rounds):
            seed = options.seed + 100 * number
            rounds.append(one_round(bench, options.seconds, seed, sections))
            if small_bench is not None:
                results = _throughput(small_bench, options.seconds, seed)
                rounds[-1] |= {f"small_{key}": value for key, value in results.items()}
            rounds[-1] |= disturbed(*filter(None, (bench, small_bench)))
            shown = {bar.figure: bar.of(rounds[-1]) for bar in bars(options.quick)}
            line = ", ".join(f"{figure}: {value:.2f}" for figure, value in shown.items() if value is not None)
            print(f"round {number + 1}: {line}", file=sys.stderr)
    report = {
        "data": f"{name}, recall@10 {recall:.3f} at top_m {options.top_m}, search_width {options.search_width}"
        + ("" if small is None else f"; {small[0]}, recall@10 {small[3]:.3f}"),
        "machine": machine(),
        "versions": {name: version(name) for name in ("numpy", "numba", "pyzmq")},
        "settings": {key: getattr(options, key) for key in ("seed", "rounds", "seconds", "slots", "quick", "only")},
        "rounds": [{key: round(value, 2) for key, value in results.items()} for results in rounds],
        "overall": {key: round(value, 2) for key, value in overall(rounds).items()},
        "took_s": round(time.monotonic() - began, 1),
    }
    write(report, markdown(report), options.out)
