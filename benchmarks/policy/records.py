"""Results of `benchmarks.policy`: one row for each trace and load, with the standard error of differences."""

import statistics

import msgspec

from runtime.simulator.result import Result
from runtime.simulator.workload import Slos

SHIPPED = "configured"
OTHERS = ("paper", "fifo", "static")
FIXED = ("fixed:0.1", "fixed:0.3", "fixed:0.5", "fixed:0.7", "fixed:0.9")
Runs = dict[str, list[Result]]  # by policy, one for each window


class Row(msgspec.Struct, kw_only=True):
    """One trace at one load and one cost of extends, over all windows: goodput by policy in requests/s.

    `fixed_s`: the fixed part of an extend; `slots`: N, by window.
    `error`: standard error over the windows of the difference between the shipped policy's goodput and that of the
    best of all others; 0 with one window.
    """

    trace: str
    fixed_s: float
    slots: list[int]
    load: float
    sent_per_s: float
    goodput: dict[str, float]
    attainment: dict[str, float]
    error: float
    changes: float
    reserve: tuple[float, float]

    @classmethod
    def of(cls, trace: str, fixed_s: float, slots: list[int], load: float, runs: Runs) -> "Row":
        goodput = {name: statistics.mean(result.goodput for result in found) for name, found in runs.items()}
        best = max((*OTHERS, *FIXED), key=lambda name: goodput[name])
        differences = [ours.goodput - theirs.goodput for ours, theirs in zip(runs[SHIPPED], runs[best], strict=True)]
        sent_per_s = statistics.mean(result.sent_per_s for result in runs[SHIPPED])
        reserves = [sample.reserve for result in runs[SHIPPED] for sample in result.samples]
        return cls(
            trace=trace,
            fixed_s=fixed_s,
            slots=slots,
            load=load,
            sent_per_s=sent_per_s,
            goodput=goodput,
            attainment={name: statistics.mean(result.attainment for result in found) for name, found in runs.items()},
            error=statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0,
            changes=statistics.mean(result.use["changes"] for result in runs[SHIPPED]),
            reserve=(min(reserves), max(reserves)),
        )

    @property
    def best_other(self) -> float:
        return max(self.goodput[name] for name in OTHERS)

    @property
    def best_fixed(self) -> str:
        return max(FIXED, key=lambda name: self.goodput[name])

    @property
    def best(self) -> float:
        """Goodput of the best of all others, including every fixed reserve."""
        return max(self.best_other, self.goodput[self.best_fixed], 1e-9)

    @property
    def against_all(self) -> float:
        return self.goodput[SHIPPED] / self.best

    @property
    def standing(self) -> str:
        """Compare with the best of all others: "ahead", "even" (behind by less than 2 standard errors) or "behind"."""
        behind = self.best - self.goodput[SHIPPED]
        return "ahead" if behind <= 1e-9 else "even" if behind <= 2 * self.error else "behind"

    def line(self) -> str:
        shown = ", ".join(f"{name} {share:.3f}" for name, share in self.attainment.items())
        return f"{self.trace} {self.fixed_s * 1e6:.0f} µs {self.load:.0%}: {shown}; {self.standing}"


class Report(msgspec.Struct, kw_only=True):
    machine: dict[str, str]
    versions: dict[str, str]
    requests: int
    windows: list[int]
    seed: int
    slos: dict[str, Slos]
    rows: list[Row]
    took_s: float
