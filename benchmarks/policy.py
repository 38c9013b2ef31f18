"""Which policy serves more requests within their SLOs? The simulator's answer, on real traces, at 50 to 120% load.

    python -m benchmarks.policy --data ../shared/data/traces

Two tables, both simulated (production's scheduler, router and control law on a virtual clock; nothing is timed here):

1. Policies. A node of 3 prefill and 4 decode GPUs, with the vector pool as its scarcest resource: an extend costs
   `--fixed` s plus so much a slot that the pool is busy all the time at 100% load, and the next resource at 80%. With
   an H100's own extend times the pool has nothing to decide (the second table's "busy" column shows it); this is the
   case that policies are for: searches that are hard for the pool they have.
2. Placements. Eight GPUs with an H100's service times: the best split of each placement, with the greatest rate at
   which 90% of the sent requests meet both SLOs.

Goodput is over *sent* requests: the rate times the share that met TTFT and TPOT. Every policy gets the same requests at
the same times. The traces' own rates are scaled (RAGPulse's by far the most: it has 42 requests an hour).
"""

import argparse
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from runtime.node.config import (
    ControlSection,
    DecodeSection,
    HttpSection,
    NodeConfig,
    PoolSection,
    PrefillSection,
)
from runtime.simulator.capacity import capacity, demands
from runtime.simulator.node import simulate
from runtime.simulator.plan import Plan, plans
from runtime.simulator.plot import draw
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.result import Result
from runtime.simulator.service import ServiceTimes
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival, at_rate, load_trace
from runtime.simulator.workload import Slos

TRACES = {
    "azure": ("azure-2023-conv.csv", Slos(ttft_s=0.5, tpot_s=0.025)),
    "mooncake": ("mooncake-conversation.jsonl.gz", Slos(ttft_s=5.0, tpot_s=0.05)),
    "ragpulse": ("ragpulse/0_trace.jsonl.gz", Slos(ttft_s=1.0, tpot_s=0.025)),
}
NAIVE = ("prefill-first", "decode-first", "fifo")
FIXED = ("fixed:0.1", "fixed:0.3", "fixed:0.5", "fixed:0.7", "fixed:0.9")
SPARE = 1.25  # how much more of the pool than of the next resource a request takes


class Row(msgspec.Struct, kw_only=True):
    """One trace at one load: goodput by policy, in requests/s, and what the sent rate was."""

    trace: str
    load: float
    sent_per_s: float
    goodput: dict[str, float]
    attainment: dict[str, float]
    changes: int
    reserve: tuple[float, float]

    @property
    def best_naive(self) -> float:
        return max(self.goodput[name] for name in NAIVE)

    @property
    def best_fixed(self) -> float:
        return max(self.goodput[name] for name in FIXED)


class Report(msgspec.Struct, kw_only=True):
    machine: str
    python: str
    requests: int
    seed: int
    fixed_s: float
    slot_s: dict[str, float]
    slos: dict[str, Slos]
    rows: list[Row]
    plans: dict[str, list[Plan]]
    took_s: float


def node(slos: Slos) -> NodeConfig:
    """The first table's node. The loop's and the pool's target for prefill's waits: a twentieth of TTFT's SLO."""
    target_s = slos.ttft_s / 20
    return NodeConfig(
        http=HttpSection(max_in_flight=100_000),
        prefill=PrefillSection(workers=3, slots=16, chunk_tokens=2048),
        decode=DecodeSection(workers=4, slots=64),
        pool=PoolSection(workers=1, slots=32, prefill_target_s=target_s),
        control=ControlSection(prefill_wait_target_s=target_s),
    )


def scarce_pool(setup: Setup, arrivals: list[Arrival], fixed_s: float) -> Setup:
    """The same node with a pool that is its scarcest resource."""
    needs = demands(setup, arrivals)
    others = max(seconds for name, seconds in needs.items() if name != "pool")
    unit = demands(replace(setup, times=replace(setup.times, extend_s=0.0, extend_slot_s=1e-6)), arrivals)["pool"]
    slot_s = SPARE * others / unit * 1e-6 - fixed_s / setup.config.pool.slots
    if slot_s < 0:
        sys.exit(f"--fixed {fixed_s}: an extend of {setup.config.pool.slots} slots takes no longer than that")
    return replace(setup, times=replace(setup.times, extend_s=fixed_s, extend_slot_s=slot_s))


def run(setup: Setup, arrivals: list[Arrival], policy: str) -> Result:
    return simulate(replace(setup, policy=PolicyChoice.parse(policy)), arrivals)


def main() -> None:
    options = _options()
    began = time.monotonic()
    rows: list[Row] = []
    slots: dict[str, float] = {}
    found: dict[str, list[Plan]] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.processes) as workers:
        for name in options.traces.split(","):
            file, slos = TRACES[name]
            arrivals = load_trace(options.data / file, options.requests)
            setup = scarce_pool(Setup(config=node(slos), slos=slos, seed=options.seed), arrivals, options.fixed)
            slots[name] = setup.times.extend_slot_s
            most = capacity(setup, arrivals)
            for load in options.loads:
                sent = at_rate(arrivals, load * most)
                names = ("adaptive", *NAIVE, *FIXED)
                results = dict(zip(names, workers.map(partial(run, setup, sent), names), strict=True))
                rows.append(_row(name, load, results))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
                if load == 1.0:
                    draw([results["adaptive"], results["prefill-first"]], options.out / f"policy-{name}.png")
            if not options.no_plans:
                roomy = replace(setup, times=ServiceTimes())
                roomy = replace(roomy, config=replace(roomy.config, pool=PoolSection(slots=256)))
                found[name] = plans(
                    roomy, arrivals, gpus=8, tried=1, progress=lambda text: print(text, file=sys.stderr)
                )
    report = Report(
        machine=f"{platform.machine()}, {platform.system()}",
        python=platform.python_version(),
        requests=options.requests,
        seed=options.seed,
        fixed_s=options.fixed,
        slot_s=slots,
        slos={name: slos for name, (_, slos) in TRACES.items()},
        rows=rows,
        plans=found,
        took_s=time.monotonic() - began,
    )
    (options.out / "policy.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    text = markdown(report)
    (options.out / "policy.md").write_text(text, encoding="utf-8")
    print(text)


def _row(trace: str, load: float, results: dict[str, Result]) -> Row:
    adaptive = results["adaptive"]
    reserves = [sample.reserve for sample in adaptive.samples]
    return Row(
        trace=trace,
        load=load,
        sent_per_s=adaptive.sent_per_s,
        goodput={name: result.goodput for name, result in results.items()},
        attainment={name: result.attainment for name, result in results.items()},
        changes=int(adaptive.use["changes"]),
        reserve=(min(reserves), max(reserves)),
    )


def _line(row: Row) -> str:
    shown = ", ".join(f"{name} {share:.3f}" for name, share in row.attainment.items())
    return f"{row.trace} {row.load:.0%}: {shown}; {row.changes} changes"


def markdown(report: Report) -> str:
    """The tables."""
    lines = [
        "# Policies and placements, simulated",
        "",
        f"`python -m benchmarks.policy`: {report.requests} requests of each trace, seed {report.seed}, "
        f"{report.took_s:.0f} s on {report.machine}, Python {report.python}. Simulated, not measured: service times of "
        "an H100 with an 8-billion-parameter Llama from data sheets (`runtime/simulator/service.py`).",
        "",
        "## Goodput (requests/s that met TTFT and TPOT, over sent requests)",
        "",
        "3 prefill and 4 decode GPUs; a pool that is busy all the time at 100% load: an extend costs "
        + f"{report.fixed_s * 1e6:.0f} µs and "
        + ", ".join(f"{slot * 1e6:.0f} µs a slot ({name})" for name, slot in report.slot_s.items())
        + ". SLOs: "
        + ", ".join(f"{name} TTFT {slo.ttft_s} s, TPOT {slo.tpot_s * 1e3:.0f} ms" for name, slo in report.slos.items())
        + ".",
        "",
        "| trace | load | sent/s | adaptive | prefill-first | decode-first | FIFO | best fixed r "
        "| / best naive | / best fixed | r |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        fixed = max(FIXED, key=lambda name, row=row: row.goodput[name])  # type: ignore[misc]
        adaptive = row.goodput["adaptive"]
        lines.append(
            f"| {row.trace} | {row.load:.0%} | {row.sent_per_s:.2f} | {adaptive:.2f} | "
            + " | ".join(f"{row.goodput[name]:.2f}" for name in NAIVE)
            + f" | {row.goodput[fixed]:.2f} ({fixed[6:]}) | {_ratio(adaptive, row.best_naive)} | "
            f"{_ratio(adaptive, row.best_fixed)} | {row.reserve[0]:.2f}–{row.reserve[1]:.2f} |"
        )
    lines += ["", _verdict(report.rows), ""]
    if report.plans:
        lines += [
            "## Placements of the index on 8 GPUs",
            "",
            "The greatest rate at which 90% of the sent requests met both SLOs; the best split of each placement. "
            "`busiest` is the resource that the utilisation law says ends first.",
            "",
            "| trace | index | prefill | decode | pool | decode slots | busiest | capacity/s | rate/s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for trace, found in report.plans.items():
            for placement in ("pool", "with-prefill", "coupled"):
                best = next((plan for plan in found if plan.placement == placement), None)
                if best is not None:
                    lines.append(
                        f"| {trace} | {placement} | {best.prefill} | {best.decode} | {best.pool} "
                        f"| {best.decode_slots} | {best.busiest} | {best.capacity:.2f} | {best.rate:.2f} |"
                    )
    return "\n".join(lines) + "\n"


def _ratio(value: float, other: float) -> str:
    return f"{value / other:.2f}" if other > 0 else "–"


def _verdict(rows: list[Row]) -> str:
    lost = [row for row in rows if row.goodput["adaptive"] < row.best_naive * 0.9995]
    behind = [row for row in rows if row.goodput["adaptive"] < row.best_fixed * 0.95]
    shown = ", ".join(f"{row.trace} {row.load:.0%} ({_ratio(row.goodput['adaptive'], row.best_naive)})" for row in lost)
    return (
        f"Adaptive is at least as good as every naive policy in {len(rows) - len(lost)} of {len(rows)} rows"
        + (f"; it loses at {shown}" if lost else "")
        + f". It has 0.95 of the best fixed r or more in {len(rows) - len(behind)} of {len(rows)}."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--requests", type=int, default=1200, help="the first so many of each trace")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.0, 1.1, 1.2])
    parser.add_argument("--fixed", type=float, default=20e-6, help="the fixed part of an extend, in s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-plans", action="store_true", help="the first table only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
