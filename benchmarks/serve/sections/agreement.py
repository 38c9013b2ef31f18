"""Agreement of simulator and real node: the same requests at the same times through both.

Prefill has one core and decode the other; the light processes (frontend, pool, client) have priority over them, as if
they had a core of their own, and their CPU use is reported. Service times are fitted to requests that have the node to
themselves (`service_times`), before each round; the simulator predicts the effects of concurrency.

Other processes have priority over the models too, so a trial counts only if they, including the host's steal, used less
than a tenth of a core during the trial and the fit of its service times. Invalid trials are repeated while time
remains. Results are medians over the valid trials.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import TypeVar

import numpy as np

from benchmarks.serve.arrivals import arrivals
from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, closed_loop, open_loop
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.service_times import SlotWaits, chat_request, fit_service_times, simulate
from benchmarks.serve.system import System
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes

T = TypeVar("T")
_LOADS = (0.4, 0.6, 0.8)  # of the saturated node's throughput
_ROUNDS = 3
_SECONDS = 10.0  # of load for each, per round
_MAX_OTHERS = 0.1  # cores used by other processes in a valid trial
_LONGEST_S = 180.0  # no round starts later, except the first three
_ALONE = 12  # requests sent sequentially
_FULL = 24  # outstanding requests that saturate the node
_AGREE = 0.15
_TEXT = (
    "A trace's requests with retrieval and probes, through the real node and through the simulated one, sequentially "
    "and at fractions of the real node's capacity: medians of the rounds, and minimum to maximum. Service times are "
    "fitted to requests that have the node to themselves."
)
_STAGES = ("queue", "embed", "retrieval", "admission", "prefill", "handover")


@dataclass
class Timings:
    """Times of requests in s, the mean wait of their queries, and the throughput."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    rate: float = 0.0  # answers/s
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*_STAGES, "probe_stall")})

    def set_rate(self, ends_s: Sequence[float]) -> None:
        ends = sorted(ends_s)
        if len(ends) > 1:
            self.rate = (len(ends) - 1) / (ends[-1] - ends[0])

    def figures(self) -> dict[str, float]:
        return {
            "TTFT p50 (ms)": percentile(self.ttft, 50) * 1e3,
            "TTFT p95 (ms)": percentile(self.ttft, 95) * 1e3,
            "TPOT p50 (ms)": percentile(self.tpot, 50) * 1e3,
            "TPOT p95 (ms)": percentile(self.tpot, 95) * 1e3,
            "queries' mean wait (µs)": self.wait_s * 1e6,
            "answers/s": self.rate,
        }

    def by_stage(self) -> dict[str, float]:
        """Means in ms."""
        return {name: sum(values) / max(len(values), 1) * 1e3 for name, values in self.stages.items()}


@dataclass(frozen=True)
class Trial:
    """One trial through both nodes. `cores`: used by the models, the rest of the node, and others; `beside_fit`: used
    by others during the fit of the service times."""

    real: Timings
    simulated: Timings
    cores: tuple[float, ...]
    beside_fit: float

    @property
    def others(self) -> float:
        return max(self.cores[2], self.beside_fit)

    @property
    def counts(self) -> bool:
        return self.others <= _MAX_OTHERS

    def ratios(self) -> dict[str, float]:
        """Return simulated / real; NaN if the real value is 0."""
        theirs = self.real.figures()
        return {name: ours / theirs[name] if theirs[name] else nan for name, ours in self.simulated.figures().items()}


def run(bench: Bench) -> Section:
    """Run sequential requests and each load: the simulator replays the real node's arrivals, prompts, answers and
    probes."""
    begin = time.monotonic()
    names = {0.0: "alone", **{load: f"{load:.0%}" for load in _LOADS}}
    trials: dict[str, list[Trial]] = {name: [] for name in names.values()}
    known: list[ServiceTimes] = []
    with bench.system("node", models_last=True, handover={"disaggregate": "always"}) as system:
        base = calibrate(system.plan.config, ServiceTimes())
        full = [body for _, body in _load(bench, 100.0, 1.0, bench.seed + 200)]
        ends = sorted(outcome.ended_s for outcome in closed_loop(system.url, full, _FULL))[_FULL // 2 : -_FULL]
        capacity = (len(ends) - 1) / (ends[-1] - ends[0])  # without ramp-up and ramp-down
        while missing := [load for load in names if sum(trial.counts for trial in trials[names[load]]) < _ROUNDS]:
            if len(known) >= _ROUNDS and time.monotonic() - begin > bench.seconds(_LONGEST_S):
                break
            times, (_, _, beside_fit) = _watched(system, lambda: fit_service_times(bench, system, base))
            known.append(times)
            for load in missing:
                tries = trials[names[load]]
                tries.append(_trial(bench, system, times, load, capacity, sum(p.counts for p in tries), beside_fit))
    section = Section("agreement", f"{_TEXT} {_verdict(trials)}")
    for name, tries in trials.items():
        found = [trial.ratios() for trial in tries if trial.counts] or [trial.ratios() for trial in tries]
        for figure in found[0]:
            ratios = [ratio[figure] for ratio in found]
            ratio = median(ratios)
            off = "" if abs(ratio - 1) <= _AGREE else " (off)"
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            section.measures.append(Measure(f"{name}: {figure}, simulated / real, {spread}{off}", ratio, "×"))
        section.details[name] = [
            {
                "counts": trial.counts, "requests": len(trial.real.ttft), "real": trial.real.figures(),
                "simulated": trial.simulated.figures(), "real stages (ms)": trial.real.by_stage(),
                "simulated stages (ms)": trial.simulated.by_stage(), "others beside the fit": trial.beside_fit,
                "cores used by models, the rest, others": trial.cores,
            }
            for trial in tries
        ]  # fmt: skip
    section.details["capacity_per_s"] = capacity
    section.details["times"] = [
        {name: getattr(times, name) for name in times.__struct_fields__ if name != "roofline"} for times in known
    ]
    return section


def _verdict(trials: dict[str, list[Trial]]) -> str:
    """Return whether the run is valid, and the reason."""
    most = max(trial.others for tries in trials.values() for trial in tries)
    count = {name: sum(trial.counts for trial in tries) for name, tries in trials.items()}
    valid_trials = ", ".join(f"{name} {number} of {len(trials[name])}" for name, number in count.items())
    valid = "**Valid**" if min(count.values()) >= _ROUNDS else "**Not valid**"
    return f"{valid}: valid trials, of at least {_ROUNDS}: {valid_trials}; others used up to {most:.2f} cores in one."


def _watched(system: System, action: Callable[[], T]) -> tuple[T, tuple[float, ...]]:
    """Run `action`; return its result and the cores used by the models, the rest of the node and others."""
    begin, used = time.monotonic(), system.used_s()
    result = action()
    seconds = time.monotonic() - begin
    return result, tuple((now - then) / seconds for now, then in zip(system.used_s(), used, strict=True))


def _trial(
    bench: Bench, system: System, times: ServiceTimes, load: float, capacity: float, number: int, beside_fit: float
) -> Trial:
    """Run a round's requests at one load (0: sequentially)."""
    count = bench.seconds(_SECONDS) if load else bench.count(_ALONE)
    timed = _load(bench, load * capacity or 1.0, count, bench.seed + 100 + number)
    before = SlotWaits.read(system)
    outcomes, cores = _watched(
        system,
        lambda: open_loop(system.url, timed) if load else closed_loop(system.url, [body for _, body in timed], 1),
    )
    real = _real(outcomes, SlotWaits.read(system).mean_s(before))
    return Trial(real, _simulated(system, times, outcomes, bench.seed + number), cores, beside_fit)


def _load(bench: Bench, rate: float, seconds: float, seed: int) -> list[tuple[float, Body]]:
    random = np.random.default_rng(seed)
    found = arrivals(bench.data, rate, seconds, seed, bench.shape)
    return [(a.at_s, chat_request(bench, random, a.prompt_tokens, a.output_tokens)) for a in found]


def _real(outcomes: Sequence[Outcome], wait_s: float) -> Timings:
    completed = [outcome for outcome in outcomes if outcome.completed]
    result = Timings(
        [outcome.timings["ttft"] for outcome in completed], [outcome.timings["tpot"] for outcome in completed], wait_s
    )
    result.set_rate([outcome.ended_s for outcome in completed])
    for name, values in result.stages.items():
        values += [outcome.timings.get(name, 0.0) for outcome in completed]
    return result


def _simulated(system: System, times: ServiceTimes, outcomes: Sequence[Outcome], seed: int) -> Timings:
    simulation = simulate(system, times, [outcome for outcome in outcomes if outcome.completed], seed)
    done = [request for request in simulation.requests if request.outcome == FINISHED]
    pools = simulation.pools
    wait_s = sum(pool.wait_ns for pool in pools) / max(sum(pool.served for pool in pools), 1) / 1e9
    result = Timings([request.ttft_s for request in done], [request.tpot_s for request in done], wait_s)
    result.set_rate([request.end_ns / 1e9 for request in done])
    for request in done:
        for name, value in _stages(request).items():
            result.stages[name].append(value)
    return result


def _stages(request: SimRequest) -> dict[str, float]:
    """Return the stage times of a simulated request, named like the real ones."""
    stamps = (
        request.received_ns, request.taken_ns, request.embedded_ns, request.searched_ns, request.begun_ns,
        request.prefilled_ns, request.first_token_ns,
    )  # fmt: skip
    spans = {name: (end - begin) / 1e9 for name, begin, end in zip(_STAGES, stamps, stamps[1:], strict=False)}
    return spans | {"probe_stall": request.stalled_ns / 1e9}
