"""SLO attainment by load: the node against the colocated baseline.

Attainment counts all requests sent: one that fails has missed its limits.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Outcome, closed_loop, open_loop, sequential
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
    section.text = (
        f"Limits: {_TTFT_SCALE:g} and {_TPOT_SCALE:g} times the unloaded times: TTFT {plain.ttft_s * 1e3:.0f} "
        f"ms, TPOT {plain.tpot_s * 1e3:.1f} ms. Goodput is the load at which {ATTAINMENT:.0%} of the sent "
        "requests meet both, interpolated linearly between the measured loads. Load in requests/s; a client "
        "disconnects when its limits cannot be met any more."
    )
    lines: dict[str, Curve] = {system.kind: plain.curve(system, _LOADS) for system in (node, colocated)}
    section.curves = {"node and colocated: requests/s, attainment": lines}
    for name, points in lines.items():
        section.measures.append(Measure(f"{name}: goodput at {ATTAINMENT:.0%}", goodput(points), "requests/s"))
    ratio = _ratio(goodput(lines["node"]), goodput(lines["colocated"]))
    section.measures.append(Measure("goodput, node / colocated", ratio, "×"))
    section.details = {"plain": plain.details}
    return section


class RequestProfile:
    """The limits of the requests, and a node's throughput when saturated by them."""

    def __init__(self, bench: Bench, node: System) -> None:
        self._bench = bench
        random, shape = np.random.default_rng(bench.seed), bench.shape
        bodies = [bench.body(random, shape.prompt_tokens, shape.output_tokens) for _ in range(6)]
        outcomes = sequential(node.url, bodies)
        self.ttft_s = _TTFT_SCALE * percentile([o.timings["ttft"] for o in outcomes], 50)
        self.tpot_s = _TPOT_SCALE * percentile([o.timings["tpot"] for o in outcomes], 50)
        full = [body for _, body in bench.load(100.0, bench.seconds(1.5), bench.seed + 200)]
        begin = time.monotonic()
        answered = sum(outcome.completed for outcome in closed_loop(node.url, full, _FULL))
        self._capacity = answered / (time.monotonic() - begin)

    @property
    def details(self) -> dict[str, float]:
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "capacity_per_s": self._capacity}

    def curve(self, system: System, loads: Sequence[float]) -> Curve:
        seconds, seed = self._bench.seconds(_SECONDS), self._bench.seed + 100
        rates = [load * self._capacity for load in loads]
        return [
            (rate, self.attained(system, rate, max(seconds, min(_SECONDS, _FEWEST / rate)), seed)) for rate in rates
        ]

    def attained(self, system: System, rate: float, seconds: float, seed: int) -> float:
        """Return the share of requests that meet their limits at this rate."""
        outcomes = open_loop(system.url, self._bench.load(rate, seconds, seed), self.timeout_s)
        met = [_met(outcome, self.ttft_s, self.tpot_s) for outcome in outcomes]
        return sum(met) / len(met) if met else math.nan

    @property
    def timeout_s(self) -> float:
        """Clients disconnect after this time, when the limits cannot be met any more."""
        return self.ttft_s + self.tpot_s * self._bench.shape.most_output_tokens + 1.0


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """Return the load at which just enough requests meet their limits, interpolated linearly between the measured
    loads; 0 if all were too high, the highest if none was."""
    best, last = 0.0, (0.0, 1.0)
    for rate, attainment in points:
        if attainment < ATTAINMENT:
            fallen = last[1] - attainment
            return best + (rate - last[0]) * (last[1] - ATTAINMENT) / fallen if best else 0.0
        best, last = rate, (rate, attainment)
    return best


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan" if not one else "inf")


def _met(outcome: Outcome, ttft_s: float, tpot_s: float) -> bool:
    timings = outcome.timings
    return outcome.completed and timings["ttft"] <= ttft_s and timings.get("tpot", 0.0) <= tpot_s
