"""Requests that meet their limits, over load: this node against the colocated one, an adaptive reserve against fixed.

Attainment is over the requests that were sent: one that fails has missed its limits.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Outcome, at_once, in_turn, offer
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.stand import Stand

_LOADS = (0.3, 0.55, 0.8, 1.05)  # of what the node answers when it always has enough to do
_SECONDS = 8.0  # of load for each point
_FEWEST = 12  # requests of a point, also at a small scale
_FULL = 24  # outstanding requests that are enough
_TTFT_SCALE, _TPOT_SCALE = 6.0, 3.0  # limits, in unloaded times
ATTAINMENT = 0.9

Curve = list[tuple[float, float]]  # requests/s, share of the sent requests that met their limits


def run(bench: Bench) -> Section:
    """Every load for every system, with the same requests at the same times."""
    section = Section("goodput", "")
    node, colocated = bench.kept("node"), bench.kept("colocated")
    plain = Kind(bench, node)
    probing = Kind(bench, node, retrieval={"collection": "docs", "k": 4, "every_tokens": 8})
    section.text = (
        f"Limits: {_TTFT_SCALE:g} and {_TPOT_SCALE:g} times what a request takes alone: TTFT {plain.ttft_s * 1e3:.0f} "
        f"ms, TPOT {plain.tpot_s * 1e3:.1f} ms; with retrieval and probes {probing.ttft_s * 1e3:.0f} and "
        f"{probing.tpot_s * 1e3:.1f} ms. Goodput is the greatest load tried at which {ATTAINMENT:.0%} of the sent "
        "requests meet both. Load in requests/s; who cannot meet the limits any more hangs up."
    )
    lines: dict[str, Curve] = {stand.kind: plain.curve(stand, _LOADS) for stand in (node, colocated)}
    fewer = _LOADS[:3]
    adaptive = {"adaptive": probing.curve(node, fewer)}
    for reserve in (0.1, 0.9):
        with bench.stand("node", control={"enabled": False}, pool={"reserve": reserve}) as fixed:
            adaptive[f"r = {reserve:g}"] = probing.curve(fixed, fewer)
    section.curves = {
        "node and colocated: requests/s, attainment": lines,
        "reserve, with retrieval and probes: requests/s, attainment": adaptive,
    }
    for name, points in (lines | adaptive).items():
        section.measures.append(Measure(f"{name}: goodput at {ATTAINMENT:.0%}", goodput(points), "requests/s"))
    best_fixed = max(goodput(points) for name, points in adaptive.items() if name != "adaptive")
    section.measures += [
        Measure("goodput, node / colocated", _ratio(goodput(lines["node"]), goodput(lines["colocated"])), "×"),
        Measure("goodput, adaptive / best fixed r", _ratio(goodput(adaptive["adaptive"]), best_fixed), "×"),
    ]
    section.details = {"plain": plain.told, "probing": probing.told}
    return section


class Kind:
    """Requests of one kind (`more` of their bodies): their limits, and what a node answers of them when it is full."""

    def __init__(self, bench: Bench, node: Stand, **more: object) -> None:
        self._bench, self._more = bench, more
        random, shape = np.random.default_rng(bench.seed), bench.shape
        bodies = [bench.body(random, shape.prompt_tokens, shape.output_tokens, **more) for _ in range(6)]
        alone = in_turn(node.url, bodies)
        self.ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in alone], 50)
        self.tpot_s = _TPOT_SCALE * percentile([o.timings["tpot"] for o in alone], 50)
        full = [body for _, body in bench.load(100.0, bench.seconds(1.5), bench.seed + 200, **more)]
        begin = time.monotonic()
        answered = sum(outcome.whole for outcome in at_once(node.url, full, _FULL))
        self._capacity = answered / (time.monotonic() - begin)

    @property
    def told(self) -> dict[str, float]:
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "capacity_per_s": self._capacity}

    def curve(self, stand: Stand, loads: Sequence[float]) -> Curve:
        return [(load * self._capacity, self._attained(stand, load * self._capacity)) for load in loads]

    def _attained(self, stand: Stand, rate: float) -> float:
        seconds = max(self._bench.seconds(_SECONDS), min(_SECONDS, _FEWEST / rate))
        timed = self._bench.load(rate, seconds, self._bench.seed + 100, **self._more)
        patience_s = self.ttft_s + self.tpot_s * self._bench.shape.most_output_tokens + 1.0
        met = [_met(outcome, self.ttft_s, self.tpot_s) for outcome in offer(stand.url, timed, patience_s)]
        return sum(met) / len(met) if met else math.nan


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """The greatest load tried at which enough requests met their limits; 0 if there is none."""
    return max((rate for rate, attainment in points if attainment >= ATTAINMENT), default=0.0)


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan" if not one else "inf")


def _met(outcome: Outcome, ttft_s: float, tpot_s: float) -> bool:
    timings = outcome.timings
    return outcome.whole and timings["ttft"] <= ttft_s and timings.get("tpot", 0.0) <= tpot_s
