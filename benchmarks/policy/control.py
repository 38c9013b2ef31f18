"""The control law against the shipped reserve, pair by pair: is it ever better, or worse, by more than noise?

    python -m benchmarks.policy.control --data DIR --out benchmarks/results/policy-control

The nodes, traces, loads and windows of `benchmarks.policy`; both get the same requests in each window. The law would be
on by default if it were ahead somewhere and nowhere behind by two standard errors.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.common.machine import machine
from benchmarks.common.report import keep, table
from benchmarks.policy.bench import TRACES, Bench, Job
from benchmarks.policy.rows import ADAPTIVE, SHIPPED

_LOADS, _FIXED = (0.9, 1.0, 1.1, 1.2), (20e-6, 300e-6)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput in requests/s over all windows. `error`: a standard error of the difference, from how it varies over
    them."""

    trace: str
    fixed_s: float
    load: float
    windows: int
    shipped: float
    adaptive: float
    error: float

    @classmethod
    def of(cls, trace: str, fixed_s: float, load: float, shipped: Sequence[float], adaptive: Sequence[float]) -> "Pair":
        differences = [ours - theirs for ours, theirs in zip(adaptive, shipped, strict=True)]
        return cls(
            trace=trace,
            fixed_s=fixed_s,
            load=load,
            windows=len(differences),
            shipped=statistics.mean(shipped),
            adaptive=statistics.mean(adaptive),
            error=statistics.stdev(differences) / len(differences) ** 0.5,
        )

    @property
    def ratio(self) -> float:
        return self.adaptive / self.shipped

    @property
    def standing(self) -> str:
        """Against the shipped reserve: even within two standard errors."""
        difference = self.adaptive - self.shipped
        if abs(difference) <= 2 * self.error:
            return "even"
        return "ahead" if difference > 0 else "behind"


def markdown(pairs: Sequence[Pair]) -> str:
    """The table, and what follows from it."""
    rows = [
        (
            pair.trace, f"{pair.fixed_s * 1e6:.0f} µs", f"{pair.load:.0%}", str(pair.windows), f"{pair.shipped:.2f}",
            f"{pair.adaptive:.2f}", f"{pair.ratio:.3f}", f"{pair.error / pair.shipped:.3f}", pair.standing,
        )
        for pair in pairs
    ]  # fmt: skip
    standings = [pair.standing for pair in pairs]
    ratios = [pair.ratio for pair in pairs]
    return "\n".join(
        [
            "# The control law against the shipped reserve",
            "",
            f"`python -m benchmarks.policy.control`: windows of 1,200 requests, both with the same, simulated. Of "
            f"{len(pairs)} rows it is ahead by two standard errors in {standings.count('ahead')}, behind in "
            f"{standings.count('behind')}; it has {min(ratios):.3f} to {max(ratios):.3f} of the shipped goodput, "
            f"{statistics.mean(ratios):.3f} in the mean.",
            "",
            *table(("trace", "fixed", "load", "windows", "r = .3", "the law", "ratio", "±", ""), rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of traces")
    parser.add_argument("--requests", type=int, default=1200, help="of each window")
    parser.add_argument("--windows", type=int, nargs="+", default=range(0, 12000, 1200), help="first requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy-control"))
    options = parser.parse_args()
    bench, pairs = Bench(options), []
    for trace, fixed_s, load in product(TRACES, _FIXED, _LOADS):
        shipped, adaptive = (
            [bench.run(Job(trace, begin, fixed_s, load, policy)).goodput for begin in bench.windows(trace)]
            for policy in (SHIPPED, ADAPTIVE)
        )
        pairs.append(Pair.of(trace, fixed_s, load, shipped, adaptive))
        print(pairs[-1], file=sys.stderr, flush=True)
    found = {"machine": machine(), "seed": options.seed, "requests": options.requests, "pairs": pairs}
    keep(found, markdown(pairs), options.out)


if __name__ == "__main__":
    main()
