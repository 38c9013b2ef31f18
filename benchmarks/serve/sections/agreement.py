"""Does the simulated node wait as the real one does? The same requests at the same times through both.

Prefill has one core and decode the other; what is light (frontend, pool, client) goes before them, as if it had a core
of its own, and how much it took of theirs is told. Service times are fitted to requests that have the node to
themselves (`fitted`), before each round; what requests do to each other is the simulator's own.

Whoever else runs here goes before the models too, so a play counts only if others, and the host by its steal, took less
than a tenth of a core meanwhile and while its service times were fitted; there are more rounds for what does not count,
while there is time. Figures are medians over the plays that count.
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
from benchmarks.serve.client import Body, Outcome, at_once, offer
from benchmarks.serve.fitted import Waits, asked, fitted, played
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.stand import Stand
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes

T = TypeVar("T")
_LOADS = (0.4, 0.6, 0.8)  # of what the node answers when it always has enough to do
_ROUNDS = 3
_SECONDS = 10.0  # of load for each, a round
_MOST_OTHERS = 0.1  # cores that others use while a play counts
_LONGEST_S = 180.0  # from then on no round begins but the first three
_ALONE = 12  # requests that are sent one after the other
_FULL = 24  # outstanding requests that are enough to fill the node
_AGREE = 0.15
_TEXT = (
    "A trace's requests with retrieval and probes, through the real node and through the simulated one, one at a time "
    "and at shares of what the real one can do: medians of the rounds, and from the least to the most. Service times "
    "are those of requests that have the node to themselves."
)
_STAGES = ("queue", "embed", "retrieval", "admission", "prefill", "handover")


@dataclass
class Told:
    """What requests took, in s; their queries' mean wait; and when they ended, from the first one's sending."""

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
class Play:
    """Some requests through both nodes. cores: how many were used by the models, the rest of the node, and others;
    beside_fit: how many others used while service times were fitted."""

    real: Told
    simulated: Told
    cores: tuple[float, ...]
    beside_fit: float

    @property
    def others(self) -> float:
        return max(self.cores[2], self.beside_fit)

    @property
    def counts(self) -> bool:
        return self.others <= _MOST_OTHERS

    def ratios(self) -> dict[str, float]:
        """Simulated over real; of what was not there NaN."""
        theirs = self.real.figures()
        return {name: ours / theirs[name] if theirs[name] else nan for name, ours in self.simulated.figures().items()}


def run(bench: Bench) -> Section:
    """Both alone and at each load: the simulator is given arrivals, prompts, answers and probes as the real node had
    them."""
    begin = time.monotonic()
    names = {0.0: "alone", **{load: f"{load:.0%}" for load in _LOADS}}
    plays: dict[str, list[Play]] = {name: [] for name in names.values()}
    known: list[ServiceTimes] = []
    with bench.stand("node", models_last=True, handover={"disaggregate": "always"}) as stand:
        base = calibrate(stand.plan.config, ServiceTimes())
        full = [body for _, body in _load(bench, 100.0, 1.0, bench.seed + 200)]
        ends = sorted(outcome.ended_s for outcome in at_once(stand.url, full, _FULL))[_FULL // 2 : -_FULL]
        capacity = (len(ends) - 1) / (ends[-1] - ends[0])  # neither while it fills nor while it empties
        while lacking := [load for load in names if sum(play.counts for play in plays[names[load]]) < _ROUNDS]:
            if len(known) >= _ROUNDS and time.monotonic() - begin > bench.seconds(_LONGEST_S):
                break
            times, (_, _, beside_fit) = _watched(stand, lambda: fitted(bench, stand, base))
            known.append(times)
            for load in lacking:
                tries = plays[names[load]]
                tries.append(_play(bench, stand, times, load, capacity, sum(p.counts for p in tries), beside_fit))
    section = Section("agreement", f"{_TEXT} {_verdict(plays)}")
    for name, tries in plays.items():
        found = [play.ratios() for play in tries if play.counts] or [play.ratios() for play in tries]
        for figure in found[0]:
            ratios = [ratio[figure] for ratio in found]
            ratio = median(ratios)
            off = "" if abs(ratio - 1) <= _AGREE else " (off)"
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            section.measures.append(Measure(f"{name}: {figure}, simulated / real, {spread}{off}", ratio, "×"))
        section.details[name] = [
            {
                "counts": play.counts, "requests": len(play.real.ttft), "real": play.real.figures(),
                "simulated": play.simulated.figures(), "real stages (ms)": play.real.by_stage(),
                "simulated stages (ms)": play.simulated.by_stage(), "others beside the fit": play.beside_fit,
                "cores used by models, the rest, others": play.cores,
            }
            for play in tries
        ]  # fmt: skip
    section.details["capacity_per_s"] = capacity
    section.details["times"] = [
        {name: getattr(times, name) for name in times.__struct_fields__ if name != "roofline"} for times in known
    ]
    return section


def _verdict(plays: dict[str, list[Play]]) -> str:
    """Whether the run is valid, and why."""
    most = max(play.others for tries in plays.values() for play in tries)
    count = {name: sum(play.counts for play in tries) for name, tries in plays.items()}
    told = ", ".join(f"{name} {number} of {len(plays[name])}" for name, number in count.items())
    valid = "**Valid**" if min(count.values()) >= _ROUNDS else "**Not valid**"
    return f"{valid}: plays that count, of at least {_ROUNDS}: {told}; others used up to {most:.2f} cores in one."


def _watched(stand: Stand, action: Callable[[], T]) -> tuple[T, tuple[float, ...]]:
    """What it returns, and how many cores the models, the rest of the node and others used meanwhile."""
    begin, used = time.monotonic(), stand.used_s()
    result = action()
    seconds = time.monotonic() - begin
    return result, tuple((now - then) / seconds for now, then in zip(stand.used_s(), used, strict=True))


def _play(
    bench: Bench, stand: Stand, times: ServiceTimes, load: float, capacity: float, number: int, beside_fit: float
) -> Play:
    """A round's requests at one load (0: one after the other)."""
    count = bench.seconds(_SECONDS) if load else bench.count(_ALONE)
    timed = _load(bench, load * capacity or 1.0, count, bench.seed + 100 + number)
    before = Waits.so_far(stand)
    outcomes, cores = _watched(
        stand,
        lambda: offer(stand.url, timed) if load else at_once(stand.url, [body for _, body in timed], 1),
    )
    real = _real(outcomes, Waits.so_far(stand).mean_s(before))
    return Play(real, _simulated(stand, times, outcomes, bench.seed + number), cores, beside_fit)


def _load(bench: Bench, rate: float, seconds: float, seed: int) -> list[tuple[float, Body]]:
    random = np.random.default_rng(seed)
    found = arrivals(bench.data, rate, seconds, seed, bench.shape)
    return [(a.at_s, asked(bench, random, a.prompt_tokens, a.output_tokens)) for a in found]


def _real(outcomes: Sequence[Outcome], wait_s: float) -> Told:
    whole = [outcome for outcome in outcomes if outcome.whole]
    told = Told([outcome.timings["ttft"] for outcome in whole], [outcome.timings["tpot"] for outcome in whole], wait_s)
    told.set_rate([outcome.ended_s for outcome in whole])
    for name, values in told.stages.items():
        values += [outcome.timings.get(name, 0.0) for outcome in whole]
    return told


def _simulated(stand: Stand, times: ServiceTimes, outcomes: Sequence[Outcome], seed: int) -> Told:
    simulation = played(stand, times, [outcome for outcome in outcomes if outcome.whole], seed)
    done = [request for request in simulation.requests if request.outcome == FINISHED]
    pools = simulation.pools
    wait_s = sum(pool.wait_ns for pool in pools) / max(sum(pool.served for pool in pools), 1) / 1e9
    told = Told([request.ttft_s for request in done], [request.tpot_s for request in done], wait_s)
    told.set_rate([request.end_ns / 1e9 for request in done])
    for request in done:
        for name, value in _stages(request).items():
            told.stages[name].append(value)
    return told


def _stages(request: SimRequest) -> dict[str, float]:
    """As the real ones are named."""
    stamps = (
        request.received_ns, request.taken_ns, request.embedded_ns, request.searched_ns, request.begun_ns,
        request.prefilled_ns, request.first_token_ns,
    )  # fmt: skip
    spans = {name: (end - begin) / 1e9 for name, begin, end in zip(_STAGES, stamps, stamps[1:], strict=False)}
    return spans | {"probe_stall": request.stalled_ns / 1e9}
