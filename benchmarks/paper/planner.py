"""Experiment: the planner against every fixed split under a changing mix of requests."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.common.report import plot, table
from benchmarks.paper.pool import Result
from benchmarks.paper.serving import GPUS, SHARE, Lengths, arrivals, greatest, lengths, node, trace_lengths
from runtime.node.config import Disaggregate
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos

Split = tuple[int, Disaggregate]
SPLITS: tuple[Split, ...] = (*((prefill, "auto") for prefill in range(1, GPUS)), (1, "never"))
_PHASE_S, _PHASES, _CROSS = 900.0, 2, 1 / 3


class Change(NamedTuple):
    """A workload that alternates between two kinds of requests."""

    name: str
    slos: Slos
    day: Lengths
    night: Lengths
    max_rates: tuple[float, float]  # requests/s above what any split serves


class Request(NamedTuple):
    arrival: Arrival
    by_night: bool


def changes(options: Namespace) -> list[Change]:
    chats, documents = lengths(400, 600, 0.5), lengths(10_000, 60, 0.3)
    found = [
        Change("chats, documents; 2 s, 15 ms", Slos(ttft_s=2.0, tpot_s=0.015), chats, documents, (120, 20)),
        Change("chats, documents; 5 s, 50 ms", Slos(ttft_s=5.0, tpot_s=0.05), chats, documents, (300, 22)),
    ]
    if options.data:
        mooncake = trace_lengths(options.data / "mooncake-conversation.jsonl.gz")
        found.append(Change("chats, Mooncake; 2 s, 25 ms", Slos(ttft_s=2.0, tpot_s=0.025), chats, mooncake, (200, 4)))
    return found


def requests(change: Change, rates: Sequence[float], phase_s: float) -> list[Request]:
    """Return alternating day and night requests with gradual transitions."""
    random, at_s, sent, counts = Random(3), 0.0, list[Request](), [0, 0]
    while at_s < phase_s * _PHASES:
        number, into = divmod(at_s / phase_s, 1.0)
        night = min(into / _CROSS, 1.0) if number % 2 else max(1 - into / _CROSS, 0.0) * (number > 0)
        shares = rates[0] * (1 - night), rates[1] * night
        at_s += random.expovariate(sum(rates))
        if random.random() * sum(rates) > sum(shares):
            continue
        by_night = random.random() * sum(shares) > shares[0]
        kind = change.night if by_night else change.day
        sent.append(Request(Arrival(at_s, *kind[counts[by_night] % len(kind)]), by_night))
        counts[by_night] += 1
    return sent


def attainments(setup: Setup, sent: Sequence[Request]) -> tuple[float, float, int]:
    """Return the shares of day and night requests that met both SLOs, and the number of worker moves.

    The run ends early once a share can no longer reach the target; the shares then cover the requests so far.
    """
    most = (1 - SHARE) * len(sent)
    simulation = Simulation(setup, [request.arrival for request in sent], most_missed=most)
    moves = simulation.run().use["moves"]
    night = {request.arrival.at_s for request in sent if request.by_night}
    good = [0, 0]
    for request in simulation.requests:
        good[request.arrival.at_s in night] += request.met(setup.slos.ttft_s, setup.slos.tpot_s)
    return good[0] / max(len(sent) - len(night), 1), good[1] / max(len(night), 1), int(moves)


def alone(change: Change, split: Split, kind: Lengths, most: float) -> float:
    """Return the rate in requests/s of one kind that a split serves."""
    setup, seconds = node(*split, change.slos), max(1500 / most, 60.0)

    def good(rate: float) -> bool:
        sent = arrivals(kind, rate, seconds)
        return Simulation(setup, sent, most_missed=(1 - SHARE) * len(sent)).run().attainment >= SHARE

    return greatest(good, most, 5)


def run_change(change: Change, phase_s: float = _PHASE_S) -> dict[str, Any]:
    """Measure a workload.

    A split's upper bound `most` is what it serves of each kind alone for a minute; the mix is simulated only for splits
    whose bound exceeds the best result so far.
    """
    names = [f"{p} + {GPUS - p}" if mode != "never" else f"{GPUS} colocated" for p, mode in SPLITS]
    both = zip((change.day, change.night), change.max_rates, strict=True)
    days, nights = ([alone(change, split, kind, most) for split in SPLITS] for kind, most in both)
    rates = max(days), max(nights)
    most = {name: min(day / rates[0], night / rates[1]) for name, day, night in zip(names, days, nights, strict=True)}
    begin = max(range(GPUS - 1), key=lambda i: days[i])

    def served(setup: Setup) -> tuple[float, dict[float, tuple[float, float, int]]]:
        """Return the highest share of both rates at which both kinds meet the SLO target, and all runs."""
        runs: dict[float, tuple[float, float, int]] = {}

        def good(share: float) -> bool:
            runs[share] = attainments(setup, requests(change, [rate * share for rate in rates], phase_s))
            return min(runs[share][:2]) >= SHARE

        return greatest(good, 1.0, 4, 0.4), runs

    found, runs = served(node(*SPLITS[begin], change.slos, "act"))
    fixed: dict[str, float] = {}
    for i in sorted(range(len(SPLITS)), key=lambda i: -most[names[i]]):
        if most[names[i]] > max(fixed.values(), default=0.0):
            fixed[names[i]] = min(served(node(*SPLITS[i], change.slos))[0], most[names[i]])
    one = {
        "change": change.name,
        "rates": rates,
        "alone": {name: pair for name, *pair in zip(names, days, nights, strict=True)},
        "most": most,
        "fixed": fixed,
        "planner": found,
        "moves": runs[found][2] if found in runs else 0,
        "runs": {f"{share:.4f}": run for share, run in sorted(runs.items())},
        "lead": found / max(fixed.values()),
        "oracle": 1 / max(fixed.values()),
    }
    print(one, file=sys.stderr, flush=True)
    return one


HEAD = (
    "by day, by night; SLOs", "best by day", "best by night", "best fixed split", "planner", "planner / fixed",
    "oracle / fixed", "moves",
)  # fmt: skip


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot each workload's splits (light: the bound, if it was not simulated) and the planner."""
    with plot(path, len(found), width=3.5) as panels:
        for axes, one in zip(panels, found, strict=True):
            bars = one["most"] | {"planner": one["planner"]}
            axes.bar(bars.keys(), bars.values(), color=["0.85"] * len(one["most"]) + ["C0"])
            axes.bar(one["fixed"].keys(), one["fixed"].values(), color="0.5")
            axes.set_title(one["change"], fontsize=9)
            axes.set_ylim(0, 1)
            axes.tick_params(axis="x", rotation=90)
            axes.set_ylabel("share of the best rates")


def planner(options: Namespace) -> Result:
    """Alternating workloads: chats by day (400 tokens, answers of 600), documents by night (10,000, 60; or Mooncake's).

    Both rates are the same share of what the best fixed split serves of that kind alone (TTFT; TPOT); they cross over
    in 300 of 900 s. The result is the highest share at which 90% of the day's and 90% of the night's requests meet both
    SLOs, for the planner and for the fixed splits that could be best. The oracle always has the best split for each. A
    GPU that changes its role loads the new model in 10 s while the old worker still serves, which then drains. The
    planner starts with the day's best split.
    """
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(pool.map(run_change, changes(options)))
    rows = []
    for one in found:
        (day, night) = (max(one["alone"], key=lambda name: one["alone"][name][i]) for i in (0, 1))
        fixed = max(one["fixed"], key=lambda name: one["fixed"][name])
        rows.append(
            (
                one["change"], f"{day}: {one['rates'][0]:.0f}/s", f"{night}: {one['rates'][1]:.1f}/s",
                f"{fixed}: {one['fixed'][fixed]:.2f}", f"{one['planner']:.2f}", f"{one['lead']:.2f}",
                f"{one['oracle']:.2f}", one["moves"],
            )
        )  # fmt: skip

    return found, table(HEAD, rows), partial(draw, found)
