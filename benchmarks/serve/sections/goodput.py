"""SLO attainment by load: the node against the colocated baseline, and the adaptive reserve against fixed ones.

Attainment counts all requests sent: one that fails has missed its limits.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, closed_loop, open_loop, sequential
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.system import System

_LOADS = (0.3, 0.55, 0.8, 1.05)  # of the saturated node's throughput
_SECONDS = 8.0  # of load for each point
_FEWEST = 12  # requests per point, even at a small scale
_FULL = 24  # outstanding requests that saturate the node
_TTFT_SCALE, _TPOT_SCALE = 6.0, 3.0  # limits, in multiples of unloaded times
ATTAINMENT = 0.9

Curve = list[tuple[float, float]]  # requests/s, share of the requests sent that met their limits


def run(bench: Bench) -> Section:
    """Run every load on every system, with the same requests at the same times."""
    section = Section("goodput", "")
    node, colocated = bench.shared_system("node"), bench.shared_system("colocated")
    plain = RequestProfile(bench, node)
    probing = RequestProfile(bench, node, retrieval={"collection": "docs", "k": 4, "every_tokens": 8})
    section.text = (
        f"Limits: {_TTFT_SCALE:g} and {_TPOT_SCALE:g} times the unloaded times: TTFT {plain.ttft_s * 1e3:.0f} "
        f"ms, TPOT {plain.tpot_s * 1e3:.1f} ms; with retrieval and probes {probing.ttft_s * 1e3:.0f} and "
        f"{probing.tpot_s * 1e3:.1f} ms. Goodput is the load at which {ATTAINMENT:.0%} of the sent "
        "requests meet both, interpolated linearly between the measured loads. Load in requests/s; a client "
        "disconnects when its limits cannot be met any more."
    )
    lines: dict[str, Curve] = {system.kind: plain.curve(system, _LOADS) for system in (node, colocated)}
    fewer = _LOADS[:3]
    adaptive = {"adaptive": probing.curve(node, fewer)}
    for reserve in (0.1, 0.9):
        with bench.system("node", control={"enabled": False}, pool={"reserve": reserve}) as fixed:
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
    section.details = {"plain": plain.details, "probing": probing.details}
    return section


class RequestProfile:
    """A kind of requests (`more` fields of their bodies): their limits, and a node's throughput when saturated by them.

    A share of them are `documents`: long prompts with their own TTFT limit.
    """

    def __init__(self, bench: Bench, node: System, *, documents: float = 0.0, **more: object) -> None:
        self._bench, self._documents, self._more = bench, documents, more
        random, shape = np.random.default_rng(bench.seed), bench.shape

        def alone(prompt_tokens: int) -> list[Outcome]:
            bodies = [bench.body(random, prompt_tokens, shape.output_tokens, **more) for _ in range(6)]
            return sequential(node.url, bodies)

        found = alone(shape.prompt_tokens)
        self.ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in found], 50)
        self.tpot_s = _TPOT_SCALE * percentile([o.timings["tpot"] for o in found], 50)
        self.document_ttft_s = self.ttft_s
        if documents:
            long = alone(bench.long_prompt_tokens)
            self.document_ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in long], 50)
        full = [body for _, body in self.load(100.0, bench.seconds(1.5), bench.seed + 200)]
        begin = time.monotonic()
        answered = sum(outcome.completed for outcome in closed_loop(node.url, full, _FULL))
        self._capacity = answered / (time.monotonic() - begin)

    @property
    def details(self) -> dict[str, float]:
        limits = {"ttft_s": self.ttft_s, "document_ttft_s": self.document_ttft_s, "tpot_s": self.tpot_s}
        return limits | {"capacity_per_s": self._capacity}

    def load(self, rate: float, seconds: float, seed: int) -> list[tuple[float, Body]]:
        """Return timed requests, including documents."""
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
        """Return whether a request met its TTFT and TPOT limits."""
        document = len(body.get("prompt", ())) >= self._bench.long_prompt_tokens
        return _met(outcome, self.document_ttft_s if document else self.ttft_s, self.tpot_s)

    def curve(self, system: System, loads: Sequence[float]) -> Curve:
        seconds, seed = self._bench.seconds(_SECONDS), self._bench.seed + 100
        rates = [load * self._capacity for load in loads]
        return [
            (rate, self.attained(system, rate, max(seconds, min(_SECONDS, _FEWEST / rate)), seed)) for rate in rates
        ]

    def attained(self, system: System, rate: float, seconds: float, seed: int) -> float:
        """Return the share of requests that meet their limits at this rate."""
        timed = self.load(rate, seconds, seed)
        found = open_loop(system.url, timed, self.timeout_s)
        met = [self.met(body, outcome) for (_, body), outcome in zip(timed, found, strict=True)]
        return sum(met) / len(met) if met else math.nan

    @property
    def timeout_s(self) -> float:
        """Clients disconnect after this time, when the limits cannot be met any more."""
        return self.document_ttft_s + self.tpot_s * self._bench.shape.most_output_tokens + 1.0


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """Return the load at which just enough requests meet their limits, interpolated linearly between the measured
    loads; 0 if all were too high, the highest if none was."""
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
    return outcome.completed and timings["ttft"] <= ttft_s and timings.get("tpot", 0.0) <= tpot_s
