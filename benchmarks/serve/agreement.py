"""Does the simulated node wait as the real one does? The same requests at the same times through both.

Prefill has one core and decode the other; what is light (frontend, pool, client) goes before them, as if it had a core
of its own, and how much it took of theirs is told. Service times are fitted to requests that have the node to
themselves (`fitted`), before each round; what requests do to each other is the simulator's own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from benchmarks.serve.arrivals import arrivals
from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once, offer
from benchmarks.serve.fitted import EVERY, asked, fitted, waits
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.stand import Stand
from runtime.node.control.law import quantile
from runtime.node.metrics.columns import PoolMetrics
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_LOADS = (0.4, 0.6, 0.8)  # of what the node answers when it always has enough to do
_ROUNDS = 2
_SECONDS = 13.0  # of load for each, a round
_ALONE = 12  # requests that are sent one after the other
_FULL = 24  # outstanding requests that are enough to fill the node
_AGREE = 0.15
_STAGES = ("queue", "embed", "retrieval", "admission", "prefill", "handover")


@dataclass
class Told:
    """What requests took, in s; their queries' waits by bucket; and when they ended, from the first one's sending."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # answers/s, one of each round
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*_STAGES, "probe_stall")})

    def add_waits(self, waits: Sequence[float]) -> None:
        self.waits = [a + b for a, b in zip(self.waits or [0.0] * len(waits), waits, strict=True)]

    def add_ends(self, ends_s: Sequence[float]) -> None:
        ends = sorted(ends_s)
        if len(ends) > 1:
            self.rates.append((len(ends) - 1) / (ends[-1] - ends[0]))

    def figures(self) -> dict[str, float]:
        edges = PoolMetrics.WAIT["prefill"].buckets
        return {
            "TTFT p50 (ms)": percentile(self.ttft, 50) * 1e3,
            "TTFT p95 (ms)": percentile(self.ttft, 95) * 1e3,
            "TPOT p50 (ms)": percentile(self.tpot, 50) * 1e3,
            "TPOT p95 (ms)": percentile(self.tpot, 95) * 1e3,
            "prefill queries' wait p50 (µs)": quantile(0.5, edges, self.waits) * 1e6,
            "prefill queries' wait p95 (µs)": quantile(0.95, edges, self.waits) * 1e6,
            "answers/s": median(self.rates) if self.rates else 0.0,
        }

    def by_stage(self) -> dict[str, float]:
        """Means in ms."""
        return {name: sum(values) / max(len(values), 1) * 1e3 for name, values in self.stages.items()}


def run(bench: Bench) -> Section:
    """Both alone and at each load: the simulator is given arrivals, prompts, answers and probes as the real node had
    them."""
    section = Section(
        "agreement",
        "A trace's requests with retrieval and probes, through the real node and through the simulated one, one at a "
        "time and at shares of what the real one can do. Service times are those of requests that have the node to "
        "themselves.",
    )
    found: dict[str, tuple[Told, Told]] = {}
    with bench.stand("node", models_last=True, handover={"disaggregate": "always"}) as stand:
        base = calibrate(stand.plan.config, ServiceTimes())
        full = [body for _, body in _load(bench, 100.0, bench.seconds(1.5), bench.seed + 200)]
        begin = time.monotonic()
        capacity = sum(outcome.whole for outcome in at_once(stand.url, full, _FULL)) / (time.monotonic() - begin)
        cores: dict[str, list[list[float]]] = {}
        known = []
        for number in range(_ROUNDS):
            times = fitted(bench, stand, base)
            known.append(times)
            for load in (0.0, *_LOADS):
                name = f"{load:.0%}" if load else "alone"
                seconds, seed = bench.seconds(_SECONDS), bench.seed + 100 + number
                timed = _load(bench, load * capacity or 1.0, seconds if load else bench.count(_ALONE), seed)
                real, simulated = found.setdefault(name, (Told(), Told()))
                before, begin, used = waits(stand), time.monotonic(), stand.used_s()
                outcomes = offer(stand.url, timed) if load else at_once(stand.url, [body for _, body in timed], 1)
                seconds = time.monotonic() - begin
                share = [(now - then) / seconds for now, then in zip(stand.used_s(), used, strict=True)]
                cores.setdefault(name, []).append(share)
                _add_real(real, outcomes, [new - old for new, old in zip(waits(stand), before, strict=True)])
                _add_simulated(simulated, stand, times, outcomes, bench.seed + number)
    for name, (real, simulated) in found.items():
        ours, theirs = simulated.figures(), real.figures()
        for figure, value in theirs.items():
            ratio = ours[figure] / value if value else float("nan")
            off = "" if abs(ratio - 1) <= _AGREE else " (off)"
            section.measures.append(Measure(f"{name}: {figure}, simulated / real{off}", ratio, "×"))
        section.details[name] = {
            "requests": len(real.ttft), "real": theirs, "simulated": ours, "real stages (ms)": real.by_stage(),
            "simulated stages (ms)": simulated.by_stage(), "cores used by models, the rest, others": cores[name],
        }  # fmt: skip
    most = max(others for shares in cores.values() for _, _, others in shares)
    section.measures.append(
        Measure("cores that others used, at the most: over the bar no ratio counts", most, "", "≤", 0.1)
    )
    section.details["capacity_per_s"] = capacity
    section.details["times"] = [
        {name: getattr(times, name) for name in times.__struct_fields__ if name != "roofline"} for times in known
    ]
    return section


def _load(bench: Bench, rate: float, seconds: float, seed: int) -> list[tuple[float, Body]]:
    random = np.random.default_rng(seed)
    found = arrivals(bench.data, rate, seconds, seed, bench.shape)
    return [(a.at_s, asked(bench, random, a.prompt_tokens, a.output_tokens)) for a in found]


def _add_real(told: Told, outcomes: Sequence[Outcome], waited: Sequence[float]) -> None:
    whole = [outcome for outcome in outcomes if outcome.whole]
    told.ttft += [outcome.timings["ttft"] for outcome in whole]
    told.tpot += [outcome.timings["tpot"] for outcome in whole]
    told.add_waits(waited)
    told.add_ends([outcome.ended_s for outcome in whole])
    for name, values in told.stages.items():
        values += [outcome.timings.get(name, 0.0) for outcome in whole]


def _add_simulated(told: Told, stand: Stand, times: ServiceTimes, outcomes: Sequence[Outcome], seed: int) -> None:
    begin = min(outcome.sent_s for outcome in outcomes)
    whole = [outcome for outcome in outcomes if outcome.whole]
    probes = sum((outcome.tokens - 1) // EVERY for outcome in whole)
    hits = sum(len(outcome.probed) for outcome in whole) / max(probes, 1)
    setup = Setup(
        config=stand.plan.config,
        times=times,
        workload=Workload(probe_every_tokens=EVERY, probe_hit=min(hits, 1.0)),
        seed=seed,
    )
    simulation = Simulation(setup, [Arrival(o.sent_s - begin, max(len(o.prompt), 1), o.tokens) for o in whole])
    simulation.run()
    done = [request for request in simulation.requests if request.outcome == FINISHED]
    told.ttft += [request.ttft_s for request in done]
    told.tpot += [request.tpot_s for request in done]
    told.add_waits([sum(bucket) for bucket in zip(*(pool.wait_counts for pool in simulation.pools), strict=True)])
    told.add_ends([request.end_ns / 1e9 for request in done])
    for request in done:
        for name, value in _stages(request).items():
            told.stages[name].append(value)


def _stages(request: SimRequest) -> dict[str, float]:
    """As the real ones are named."""
    stamps = (
        request.received_ns, request.taken_ns, request.embedded_ns, request.searched_ns, request.begun_ns,
        request.prefilled_ns, request.first_token_ns,
    )  # fmt: skip
    spans = {name: (end - begin) / 1e9 for name, begin, end in zip(_STAGES, stamps, stamps[1:], strict=False)}
    return spans | {"probe_stall": request.stalled_ns / 1e9}
