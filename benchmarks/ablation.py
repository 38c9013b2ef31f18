"""Ablation of the pool's policy: one rule is changed at a time, everything else stays as shipped.

    python -m benchmarks.ablation --data DIR

A variant is one edit of a copy of the source, which is compiled and run in a separate process. Everything is simulated:
the compiled production policy on virtual clocks; the same seed gives the same results on any machine.

- **pool**: the pool alone with a CPU's costs in the compiled loop (an extend 0.3 µs and 4.5 µs per slot, a round 0.5
  µs, a query 2 µs), at 70, 95 and 130% of its capacity. Queries arrive as a trace's requests would send them: one
  prefill query each, then a decode query every 32 tokens. A tenth of decode's queries are large (130 extends instead of
  19). A third of the queries have a caller's deadline. `attainment`: prefill within L_pre,max and decode within a
  quarter of a second, over all sent. `misses`: the share of queries with a deadline that were not answered in time.
- **pool, flood**: the same pool for two seconds with uniform queries at random times: prefill at 15% of the capacity,
  decode at 200%. **pool, mixed**: decode queries only, at random times, 70% of the capacity, a tenth of them large.
  **pool, one slot**: a pool of large vectors (45 µs per slot), for which "auto" selects one slot: prefill 150%, decode
  30%.
- **node**: the whole node of `benchmarks.policy`, with the pool as bottleneck, at 110%, with windows as long as there
  and fixed costs of 20 or 300 µs per extend. "prefill p99" is TTFT's there, "decode/s" tokens, `attainment` that of
  TTFT and TPOT, `misses` the share of requests that ended without an answer.

An effect is the mean over seeds of variant ÷ shipped (shares: variant − shipped, in points), its spread half of their
range. The table shows effects more than 5% beyond the spread, the largest over all cases.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.common.machine import machine
from benchmarks.common.report import keep, table
from benchmarks.policy.bench import TRACES, node, scarce_pool
from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.simulator.capacity import capacity
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.pool import slots_of
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival, at_rate, load_trace
from runtime.testing.standalone_pool import Query, run_pool

ROOT = Path(__file__).parents[1]
CPU = ServiceTimes(extend_s=0.3e-6, extend_slot_s=4.5e-6, round_s=0.5e-6, query_s=2e-6)
ONE_SLOT_CPU = msgspec.structs.replace(CPU, extend_slot_s=45e-6)
ONE_SLOT = "pool, one slot"
POOL_LOADS, NODE_LOAD, NODE_FIXED_S, NODE_REQUESTS = (0.7, 0.95, 1.3), 1.1, (20e-6, 300e-6), 1200
PROBE_TOKENS, TOKEN_S = 32, 0.025
Kind = tuple[int, int]
USUAL, SMALL, LARGE = (128, 35), (64, 19), (512, 130)  # top_m, extends: from MiniLM's 70,639 vectors
LIMITS_NS = {"prefill": 10_000_000, "decode": 100_000_000}  # callers' deadlines
IN_TIME_NS = {"prefill": 50_000_000, "decode": 250_000_000}
AT_RANDOM: dict[str, dict[Stage, tuple[float, list[Kind]]]] = {
    "pool, flood": {"prefill": (0.15, [USUAL]), "decode": (2.0, [USUAL])},
    "pool, mixed": {"decode": (0.7, [SMALL] * 9 + [LARGE])},
    ONE_SLOT: {"prefill": (1.5, [USUAL]), "decode": (0.3, [USUAL])},
}
AT_RANDOM_S = 2.0
SHARES = ("prefill in time", "attainment", "misses")
FIGURES = ("prefill p99", "decode/s", "small p99", "large p99", *SHARES)
LEAST = 0.05

Figures = dict[str, float]
Cases = dict[str, list[Figures]]  # by case, a seed each


class Variant(NamedTuple):
    """One edit of the source: `old` occurs once in `file`."""

    name: str
    file: str
    old: str
    new: str


_POLICY, _TABLES, _SIZING = (f"runtime/pool/{name}.py" for name in ("policy", "tables", "sizing"))
_SETTINGS, _CONFIG = "runtime/pool/settings.py", "runtime/node/config.py"
_LAW = "runtime/node/control/law.py"
_RULES = 'policy: PoolPolicy = "trinity"'


def _rules(name: str) -> Variant:
    return Variant(f'policy = "{name}"', _CONFIG, _RULES, _RULES.replace('= "trinity"', f'= "{name}"'))


VARIANTS = (
    Variant("shipped", _CONFIG, _RULES, _RULES),
    _rules("paper"),
    _rules("fifo"),
    _rules("static"),
    Variant("no aging", _POLICY, "now - t.decode_ran_ns >= t.aging_ns", "t.rules < 0"),
    Variant("no pauses", _CONFIG, "Meta(ge=0, le=10_000)] = 64", "Meta(ge=0, le=10_000)] = 0"),
    Variant("no reserve", _CONFIG, "reserve: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.3",
            "reserve: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0"),
    Variant("no L_pre,max", _CONFIG, 'slo.ttft_s / 20 if self.prefill_target_s == "auto"',
            'slo.ttft_s * 60 if self.prefill_target_s == "auto"'),
    Variant("no room kept in the queue", _SETTINGS, "self.queue - self.queue // 4", "self.queue"),
    Variant("prefill never yields", _LAW, "flush = {1: most, ", "flush = {1: self.flush_prefill_s, "),
    Variant("stalls go first when they are too much alone", _LAW, "_STRAINED = 0.3", "_STRAINED = 1.2"),
    Variant("stalls count as configured alone", _LAW, "if signals.step_s > 0:", "if signals.step_s < 0:"),
    Variant("no demotion of missed queries", _POLICY, "TRINITY:\n        _demote_missed",
            "FIFO:\n        _demote_missed"),
    Variant("no credit", _POLICY, ", float(t.aging_ns))", ", 0.0)"),
    Variant("credit does not pause at once", _POLICY, "urgent = credit or ", "urgent = "),
    Variant("no bursts", _POLICY, "credit and cheap and (present", "t.rules < 0 and (present"),
    Variant("each prefill query a burst", _POLICY, "cheap and (present > quota or", "cheap and (present > 0 or"),
    Variant("no virtual deadlines", _POLICY, "if decode and t.rules == TRINITY:",
            "if decode and t.rules < 0:"),
    Variant("virtual deadlines do not preempt", _POLICY, "if t.rules == TRINITY and (yields",
            "if t.rules < 0 and (yields"),
    Variant("_STRETCH 6 → 1.5", _POLICY, "_STRETCH = 6.0", "_STRETCH = 1.5"),
    Variant("_STRETCH 6 → 24", _POLICY, "_STRETCH = 6.0", "_STRETCH = 24.0"),
    Variant("late queries run", _POLICY, "    _reject_late(t, now)\n    if", "    if"),
    Variant("_INERTIA 16 → 0", _TABLES, "_INERTIA = 16.0", "_INERTIA = 1e-9"),
    Variant("_MEMORY 64 → 8", _TABLES, "_MEMORY = 64.0", "_MEMORY = 8.0"),
    Variant("FIXED_SHARE .1 → .03", _SIZING, "FIXED_SHARE = 0.1", "FIXED_SHARE = 0.03"),
    Variant("FIXED_SHARE .1 → .3", _SIZING, "FIXED_SHARE = 0.1", "FIXED_SHARE = 0.3"),
)  # fmt: skip


# ---- measurement of the imported source


def figures(options: argparse.Namespace) -> Cases:
    """Measure the source that this process has imported."""
    found: Cases = {}
    for case in AT_RANDOM:
        times = times_of(case)
        found[case] = [of_pool(random_queries(case, seed), times) for seed in range(options.seeds)]
    for trace in options.traces.split(","):
        windows = [window(options, trace, seed, options.requests) for seed in range(options.seeds)]
        for load in POOL_LOADS:
            found[f"pool, {trace} {load:.0%}"] = [
                of_pool(queries_of(one, load, seed), CPU) for seed, one in enumerate(windows)
            ]
        windows = [window(options, trace, seed, NODE_REQUESTS) for seed in range(options.seeds)]
        for fixed_s in NODE_FIXED_S:
            found[f"node, {trace} {fixed_s * 1e6:.0f} µs"] = [
                of_node(trace, one, fixed_s, seed) for seed, one in enumerate(windows)
            ]
    return found


def window(options: argparse.Namespace, trace: str, seed: int, requests: int) -> list[Arrival]:
    """Return a seed's part of the trace."""
    begin = 1200 + seed * requests
    found = load_trace(options.data / TRACES[trace][0], begin + requests)[begin:]
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def queries_of(arrivals: list[Arrival], load: float, seed: int) -> list[Query]:
    """Return the queries of a window's requests, scaled in time to this load of the pool."""
    random, drawn = Random(seed), []
    for arrival in at_rate(arrivals, 10.0):
        drawn.append((arrival.at_s, "prefill", USUAL))
        for probe in range(1, (arrival.output_tokens - 1) // PROBE_TOKENS + 1):
            kind = LARGE if random.random() < 0.1 else SMALL
            drawn.append((arrival.at_s + TOKEN_S * PROBE_TOKENS * (probe + random.random()), "decode", kind))
    drawn.sort()
    pace = sum(needed_s(kind) for _, _, kind in drawn) / load / drawn[-1][0]
    return [
        Query(
            round(at_s * pace * 1e9),
            "prefill" if stage == "prefill" else "decode",
            extends + random.randint(-2, 3),
            top_m,
            None if random.randrange(3) else LIMITS_NS[stage],
        )
        for at_s, stage, (top_m, extends) in drawn
    ]


def random_queries(case: str, seed: int) -> list[Query]:
    """Return `AT_RANDOM_S` seconds of a case's queries."""
    random, drawn = Random(seed), []
    for stage, (load, kinds) in AT_RANDOM[case].items():
        rate, at_s = load / fmean(needed_s(kind, times_of(case)) for kind in kinds), 0.0
        while (at_s := at_s + random.expovariate(rate)) < AT_RANDOM_S:
            top_m, extends = random.choice(kinds)
            drawn.append(Query(round(at_s * 1e9), stage, extends + random.randint(-2, 3), top_m))
    return sorted(drawn, key=lambda query: query.at_ns)


def times_of(case: str) -> ServiceTimes:
    return ONE_SLOT_CPU if case == ONE_SLOT else CPU


def needed_s(kind: Kind, times: ServiceTimes = CPU) -> float:
    """Return a query's share of a fully used pool's time."""
    slots = slots_of(NodeConfig().pool, times)
    return kind[1] * (times.extend_time_s(slots) + times.round_s) / slots + times.query_s


def of_pool(queries: list[Query], times: ServiceTimes) -> Figures:
    both = list(zip(queries, run_pool(queries, times, NodeConfig()), strict=True))
    done = [(query, outcome.latency_ns) for query, outcome in both if outcome.status == "ok"]
    limited = sum(query.limit_ns is not None for query in queries)
    met = sum(query.limit_ns is not None and latency <= query.limit_ns for query, latency in done)
    last_ns = queries[-1].at_ns  # answers after the last arrival do not measure the policy
    decoded = sum(query.stage == "decode" and query.at_ns + latency <= last_ns for query, latency in done)
    in_time = [latency <= IN_TIME_NS[query.stage] for query, latency in done]
    prefill = [kept for kept, (query, _) in zip(in_time, done, strict=True) if query.stage == "prefill"]
    prefill_queries = sum(query.stage == "prefill" for query in queries)
    found = {
        "prefill p99": _p99([latency for query, latency in done if query.stage == "prefill"]),
        "decode/s": decoded / last_ns * 1e9,
        "small p99": _p99([latency for query, latency in done if query.top_m == SMALL[0]]),
        "large p99": _p99([latency for query, latency in done if query.top_m == LARGE[0]]),
        "attainment": sum(in_time) / len(queries),
    }
    if prefill_queries:
        found["prefill in time"] = sum(prefill) / prefill_queries
    return found | ({"misses": 1 - met / limited} if limited else {})


def of_node(trace: str, arrivals: list[Arrival], fixed_s: float, seed: int) -> Figures:
    slos = TRACES[trace][1]
    setup = scarce_pool(Setup(config=node(slos), slos=slos, seed=seed), arrivals, fixed_s)
    simulation = Simulation(setup, at_rate(arrivals, NODE_LOAD * capacity(setup, arrivals)))
    result = simulation.run()
    return {
        "prefill p99": result.ttft_s.p99,
        "decode/s": sum(decode.batch.tokens for decode in simulation.decodes.values()) / result.use["span_s"],
        "attainment": result.attainment,
        "misses": 1 - result.outcomes.get("finished", 0) / result.sent,
    }


def _p99(values: list[int]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


# ---- variants, each in a separate process


def write_source(variant: Variant, folder: Path) -> None:
    """Copy the source to `folder` with the variant's edit applied."""
    for package in ("benchmarks", "gpu", "ipc", "runtime"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    file = folder / variant.file
    text = file.read_text(encoding="utf-8")
    if text.count(variant.old) != 1:
        sys.exit(f"{variant.name}: {variant.old!r} occurs {text.count(variant.old)} times in {variant.file}, not once")
    file.write_text(text.replace(variant.old, variant.new), encoding="utf-8")


def run(variant: Variant, options: argparse.Namespace, folder: Path) -> Cases:
    """Run a variant. The compilation cache of earlier variants is reused for unchanged sources."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    write_source(variant, source)
    env = os.environ | {"PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(folder / "compiled"), "NUMBA_OPT": "1"}
    arguments = [f"--{name}={getattr(options, name)}" for name in ("data", "traces", "requests", "seeds")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ablation", "--one", *arguments],
        cwd=source, env=env, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return msgspec.json.decode(done.stdout, type=Cases)


class Report(msgspec.Struct, frozen=True):
    """Results of all variants."""

    machine: dict[str, str]
    seeds: int
    requests: int
    traces: str
    took_s: float
    figures: dict[str, Cases]


class Effect(NamedTuple):
    """Effect of a variant on a metric in a case, relative (shares: absolute), and half the range over the seeds."""

    mean: float
    spread: float
    case: str

    @property
    def shows(self) -> bool:
        return abs(self.mean) - self.spread >= LEAST


def effects(base: Cases, found: Cases, figure: str) -> Iterator[Effect]:
    for case, seeds in base.items():
        pairs = [(one[figure], other[figure]) for one, other in zip(seeds, found[case], strict=True) if figure in one]
        if not pairs or (figure not in SHARES and min(one for one, _ in pairs) <= 0):
            continue
        each = [other - one if figure in SHARES else other / one - 1 for one, other in pairs]
        yield Effect(fmean(each), (max(each) - min(each)) / 2, case)


def markdown(report: Report) -> str:
    info, found = report.machine, report.figures
    base = found["shipped"]
    lines = [
        "# Ablation of the policy's rules",
        "",
        f"`python -m benchmarks.ablation`: {report.seeds} seeds, each with {report.requests} requests of its own "
        f"({NODE_REQUESTS} for a whole node) from {report.traces}; simulated, "
        f"in {report.took_s / 60:.0f} minutes on {info['processor']}, "
        f"{info['cores']} cores, Python {info['python']}. A cell is the largest effect over all cases, for the "
        "worse and for the better, that exceeds the spread over seeds (±) by 5% (shares: 5 points); “·”: none.",
        "",
    ]
    changes = []
    for name, cases in found.items():
        if name != "shipped":
            cells = [_cell([one for one in effects(base, cases, figure) if one.shows]) for figure in FIGURES]
            changes.append([name, *cells, "yes" if any(cell != "·" for cell in cells) else "no"])
    lines += [*table(["change", *FIGURES, "any"], changes), "", "Shipped, means over seeds (times in ms):", ""]
    shipped = []
    for case, seeds in base.items():
        means = {figure: fmean(one[figure] for one in seeds) for figure in FIGURES if figure in seeds[0]}
        shipped.append([case, *(_shown(case, figure, means) for figure in FIGURES)])
    return "\n".join([*lines, *table(["case", *FIGURES], shipped)])


def _cell(shown: list[Effect]) -> str:
    ends = dict.fromkeys([max(shown), min(shown)]) if shown else {}
    return "; ".join(f"{one.mean:+.0%} ±{one.spread * 100:.0f} ({one.case})" for one in ends) or "·"


def _shown(case: str, figure: str, means: Figures) -> str:
    if figure not in means:
        return "–"
    if figure in SHARES:
        return f"{means[figure]:.1%}"
    if figure == "decode/s":
        return f"{means[figure]:,.0f}"
    return f"{means[figure] * (1e-6 if case.startswith('pool') else 1e3):,.2f}"


def main() -> None:
    options = _options()
    if options.one:
        sys.stdout.buffer.write(msgspec.json.encode(figures(options)))
        return
    began = time.monotonic()
    found: dict[str, Cases] = {}
    options.data = options.data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            if variant.name != "shipped" and options.only and variant.name not in options.only:
                continue
            found[variant.name] = run(variant, options, Path(folder))
            took_s = time.monotonic() - began
            print(f"{took_s:5.0f} s: {variant.name}", file=sys.stderr, flush=True)
            report = Report(machine(), options.seeds, options.requests, options.traces, took_s, found)
            keep(report, markdown(report), options.out / "ablation")  # results so far


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--requests", type=int, default=200, help="requests per seed, for the pool alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="names of variants; default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--one", action="store_true", help="measure this source only and print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
