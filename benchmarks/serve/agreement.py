"""Does the simulated node wait as the real one does? The same requests at the same times through both.

Service times are fitted to what single requests take on the running node (`fitted`): a node's processes, clients and
cores are what they are, and `trinity calibrate` measures a model and an index alone. Queueing, batching, the pool and
their effects on each other under load are the simulator's own; nothing is fitted to them.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once, in_turn, offer
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.stand import Stand
from runtime.node.control.law import quantile
from runtime.node.metrics.columns import PoolMetrics
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import FINISHED
from runtime.simulator.times.calibrate import Line, calibrate
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_LOADS = (0.4, 0.6, 0.8)  # of what the node answers when it always has enough to do
_SECONDS = 20.0  # of load for each
_FULL = 24  # outstanding requests that are enough to fill the node
_EVERY = 8  # tokens between probes
_ALONE_TOKENS = (32, 96, 224, 448)  # of prompts that are asked one at a time
_ROWS = (1, 4, 8, 16)  # rows decoded together, to fit a step by
_AGREE = 0.15

_RETRIEVAL = {"collection": "docs", "k": 4, "every_tokens": _EVERY}


def run(bench: Bench) -> Section:
    """Both at each load: the simulator is given the arrivals, prompts and answers as the real node had them."""
    section = Section(
        "agreement",
        "A trace's requests with retrieval and probes, through the real node and through the simulated one, at shares "
        f"of what the real one can do; a ratio within {_AGREE:.0%} of 1 agrees. Service times are those of single "
        "requests on the running node.",
    )
    stand = bench.kept("node")
    times, hits = fitted(bench, stand)
    workload = Workload(probe_every_tokens=_EVERY, probe_hit=hits)
    setup = Setup(config=stand.plan.config, times=times, workload=workload, seed=bench.seed)
    full = [body for _, body in bench.load(100.0, bench.seconds(1.5), bench.seed + 200, retrieval=_RETRIEVAL)]
    begin = time.monotonic()
    capacity = sum(outcome.whole for outcome in at_once(stand.url, full, _FULL)) / (time.monotonic() - begin)
    for load in _LOADS:
        timed = bench.load(load * capacity, bench.seconds(_SECONDS), bench.seed + 100, retrieval=_RETRIEVAL)
        before = _waits(stand)
        outcomes = offer(stand.url, timed)
        real = _figures(
            [outcome.timings["ttft"] for outcome in outcomes if outcome.whole],
            [outcome.timings["tpot"] for outcome in outcomes if outcome.whole],
            [new - old for new, old in zip(_waits(stand), before, strict=True)],
            [outcome.ended_s for outcome in outcomes if outcome.whole],
        )
        simulated = _simulated(setup, outcomes)
        for name, value in real.items():
            ratio = simulated[name] / value if value else float("nan")
            off = "" if abs(ratio - 1) <= _AGREE else " (off)"
            section.measures.append(Measure(f"{load:.0%}: {name}, simulated / real{off}", ratio, "×"))
        section.details[f"{load:.0%}"] = {
            "sent": len(outcomes), "whole": sum(outcome.whole for outcome in outcomes), "real": real,
            "simulated": simulated,
        }  # fmt: skip
    section.details |= {"capacity_per_s": capacity, "probe_hit": hits}
    section.details["times"] = {name: getattr(times, name) for name in times.__struct_fields__ if name != "roofline"}
    return section


def _simulated(setup: Setup, outcomes: Sequence[Outcome]) -> dict[str, float]:
    begin = min(outcome.sent_s for outcome in outcomes)
    simulation = Simulation(
        setup,
        [Arrival(o.sent_s - begin, max(len(o.prompt), 1), max(o.tokens, 1)) for o in outcomes if o.whole],
    )
    simulation.run()
    done = [request for request in simulation.requests if request.outcome == FINISHED]
    return _figures(
        [request.ttft_s for request in done],
        [request.tpot_s for request in done],
        [sum(bucket) for bucket in zip(*(pool.wait_counts for pool in simulation.pools), strict=True)],
        [request.end_ns / 1e9 for request in done],
    )


def _figures(
    ttft_s: Sequence[float], tpot_s: Sequence[float], waits: Sequence[float], ends_s: Sequence[float]
) -> dict[str, float]:
    edges = PoolMetrics.WAIT["prefill"].buckets
    ends = sorted(ends_s)
    return {
        "TTFT p50 (ms)": percentile(ttft_s, 50) * 1e3,
        "TTFT p95 (ms)": percentile(ttft_s, 95) * 1e3,
        "TPOT p50 (ms)": percentile(tpot_s, 50) * 1e3,
        "TPOT p95 (ms)": percentile(tpot_s, 95) * 1e3,
        "prefill queries' wait p50 (µs)": quantile(0.5, edges, waits) * 1e6,
        "prefill queries' wait p95 (µs)": quantile(0.95, edges, waits) * 1e6,
        "answers/s": (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0,
    }


def _waits(stand: Stand) -> list[float]:
    """Prefill queries' waits for a slot so far, by bucket."""
    tables = [table for table in stand.tables.values() if table.role == "pool"]
    return [
        sum(bucket) for bucket in zip(*(table.read(PoolMetrics.WAIT["prefill"])[:-1] for table in tables), strict=True)
    ]


# ---- service times of a running node


def fitted(bench: Bench, stand: Stand) -> tuple[ServiceTimes, float]:
    """What single requests take on the node, and the share of probes that bring passages."""
    times = calibrate(stand.plan.config, ServiceTimes())
    random = np.random.default_rng(bench.seed + 3)

    def body(tokens: int, answer: int, **more: object) -> Body:
        return bench.body(random, tokens, answer, **more)

    repeats = bench.count(6, least=3)
    alone = {
        tokens: in_turn(stand.url, [body(tokens, 2, retrieval=_RETRIEVAL) for _ in range(repeats)])
        for tokens in _ALONE_TOKENS
    }
    asked = [outcome for outcomes in alone.values() for outcome in outcomes]
    passes = Line.fit(
        [fmean(len(outcome.prompt) for outcome in outcomes) for outcomes in alone.values()],
        [_median(outcomes, lambda timings: timings["prefill"]) for outcomes in alone.values()],
    )
    by_rows = []
    for rows in _ROWS:
        together = at_once(stand.url, [body(48, 24) for _ in range(3 * rows)], rows)
        by_rows.append(_median(together, lambda timings: timings["tpot"]))
    steps = Line.fit(_ROWS, by_rows)
    probing = in_turn(stand.url, [body(96, 4 * _EVERY + 1, retrieval=_RETRIEVAL) for _ in range(repeats)])
    brought = sum(len(outcome.probed) for outcome in probing)
    times = replace(
        times,
        source=f"single requests on the running node; the rest: {times.source}",
        prefill_pass_s=passes.fixed,
        prefill_token_s=passes.each,
        prefill_pair_s=0.0,  # in the line, for prompts of these lengths
        decode_step_s=steps.fixed,
        decode_row_s=steps.each,
        decode_context_s=0.0,
        embed_s=_median(asked, lambda timings: timings["queue"] + timings["embed"]),
        # What a hand-over takes beside the copy itself, and the first token's way.
        link_s=_median(asked, lambda t: t["ttft"] - t["queue"] - t["embed"] - t["retrieval"] - t["prefill"]),
        link_bytes_s=1e15,
    )
    return times, brought / (4 * len(probing))


def _median(outcomes: Sequence[Outcome], of: Callable[[dict[str, float]], float]) -> float:
    return median(of(outcome.timings) for outcome in outcomes if outcome.whole)
