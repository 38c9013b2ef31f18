"""Requests that meet their limits, over load: this node against the colocated one, an adaptive reserve against fixed.

Attainment is over the requests that were sent: one that fails has missed its limits.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once, in_turn, offer
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
        f"{probing.tpot_s * 1e3:.1f} ms. Goodput is the load at which {ATTAINMENT:.0%} of the sent "
        "requests meet both, on straight lines between those tried. Load in requests/s; who cannot meet the limits "
        "any more hangs up."
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
    """Requests of one kind (`more` of their bodies): their limits, and what a node answers of them when it is full.

    A share of them are `documents`: long prompts, with a limit of their own for the first token.
    """

    def __init__(self, bench: Bench, node: Stand, *, documents: float = 0.0, **more: object) -> None:
        self._bench, self._documents, self._more = bench, documents, more
        random, shape = np.random.default_rng(bench.seed), bench.shape

        def alone(prompt_tokens: int) -> list[Outcome]:
            bodies = [bench.body(random, prompt_tokens, shape.output_tokens, **more) for _ in range(6)]
            return in_turn(node.url, bodies)

        found = alone(shape.prompt_tokens)
        self.ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in found], 50)
        self.tpot_s = _TPOT_SCALE * percentile([o.timings["tpot"] for o in found], 50)
        self.document_ttft_s = self.ttft_s
        if documents:
            long = alone(bench.long_prompt_tokens)
            self.document_ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in long], 50)
        full = [body for _, body in self.load(100.0, bench.seconds(1.5), bench.seed + 200)]
        begin = time.monotonic()
        answered = sum(outcome.whole for outcome in at_once(node.url, full, _FULL))
        self._capacity = answered / (time.monotonic() - begin)

    @property
    def told(self) -> dict[str, float]:
        limits = {"ttft_s": self.ttft_s, "document_ttft_s": self.document_ttft_s, "tpot_s": self.tpot_s}
        return limits | {"capacity_per_s": self._capacity}

    def load(self, rate: float, seconds: float, seed: int) -> list[tuple[float, Body]]:
        """Timed requests, documents among them."""
        random = np.random.default_rng(seed + 1000)
        tokens, output = self._bench.long_prompt_tokens, self._bench.shape.output_tokens
        return [
            (
                at_s,
                self._bench.body(random, tokens, output, **self._more) if random.random() < self._documents else body,
            )
            for at_s, body in self._bench.load(rate, seconds, seed, **self._more)
        ]

    def met(self, body: Body, outcome: Outcome) -> bool:
        """Whether a request had its first token and the others within its limits."""
        document = len(body.get("prompt", ())) >= self._bench.long_prompt_tokens
        return _met(outcome, self.document_ttft_s if document else self.ttft_s, self.tpot_s)

    def curve(self, stand: Stand, loads: Sequence[float]) -> Curve:
        seconds, seed = self._bench.seconds(_SECONDS), self._bench.seed + 100
        rates = [load * self._capacity for load in loads]
        return [(rate, self.attained(stand, rate, max(seconds, min(_SECONDS, _FEWEST / rate)), seed)) for rate in rates]

    def attained(self, stand: Stand, rate: float, seconds: float, seed: int) -> float:
        """The share of the requests of some seconds that keep their limits."""
        timed = self.load(rate, seconds, seed)
        found = offer(stand.url, timed, self.patience_s)
        met = [self.met(body, outcome) for (_, body), outcome in zip(timed, found, strict=True)]
        return sum(met) / len(met) if met else math.nan

    @property
    def patience_s(self) -> float:
        """Who waits longer than that for the end of an answer hangs up."""
        return self.document_ttft_s + self.tpot_s * self._bench.shape.most_output_tokens + 1.0


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """The load at which just enough requests meet their limits, on straight lines between those tried; 0 if no load
    tried was little enough, the greatest tried if none was too much."""
    found, last = 0.0, (0.0, 1.0)
    for rate, attainment in points:
        if attainment < ATTAINMENT:
            fallen = last[1] - attainment
            return found + (rate - last[0]) * (last[1] - ATTAINMENT) / fallen if found else 0.0
        found, last = rate, (rate, attainment)
    return found


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan" if not one else "inf")


def _met(outcome: Outcome, ttft_s: float, tpot_s: float) -> bool:
    timings = outcome.timings
    return outcome.whole and timings["ttft"] <= ttft_s and timings.get("tpot", 0.0) <= tpot_s
