"""Control law benchmark: the default law against a constant reserve, by more than noise?

    python -m benchmarks.policy.control --data DIR --out benchmarks/results/policy-control

The nodes, traces, loads and windows of `benchmarks.policy`, with the same probe interval and with rare probes, so that
most of the queries are prefill's; both variants get the same requests in each window. The law is the default because it
is ahead by two standard errors in some rows, and not behind by more than 1% in any.
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
from benchmarks.policy.records import SHIPPED
from runtime.node.config import PoolSection
from runtime.simulator.workload import Workload

_EVERY, _FIXED, _LOADS = (32, 256), (20e-6, 300e-6), (0.9, 1.0, 1.1, 1.2)
_STAYS = f"fixed:{PoolSection().reserve:g}"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput in requests/s over all windows, with constant r (`stays`) and with the law (`shipped`).

    `every`: tokens between probes. `error`: standard error of the difference over the windows.
    """

    every: int
    trace: str
    fixed_s: float
    load: float
    windows: int
    stays: float
    shipped: float
    error: float

    @classmethod
    def of(cls, every: int, job: Job, stays: Sequence[float], shipped: Sequence[float]) -> "Pair":
        differences = [ours - theirs for ours, theirs in zip(shipped, stays, strict=True)]
        return cls(
            every=every,
            trace=job.trace,
            fixed_s=job.fixed_s,
            load=job.load,
            windows=len(differences),
            stays=statistics.mean(stays),
            shipped=statistics.mean(shipped),
            error=statistics.stdev(differences) / len(differences) ** 0.5,
        )

    @property
    def ratio(self) -> float:
        return self.shipped / self.stays

    @property
    def standing(self) -> str:
        """Compare with the constant reserve: "even" within two standard errors, else "ahead" or "behind"."""
        difference = self.shipped - self.stays
        if abs(difference) <= 2 * self.error:
            return "even"
        return "ahead" if difference > 0 else "behind"


def markdown(pairs: Sequence[Pair]) -> str:
    """Return the table with a summary."""
    rows = [
        (
            str(pair.every), pair.trace, f"{pair.fixed_s * 1e6:.0f} µs", f"{pair.load:.0%}", str(pair.windows),
            f"{pair.stays:.2f}", f"{pair.shipped:.2f}", f"{pair.ratio:.3f}", f"{pair.error / pair.stays:.3f}",
            pair.standing,
        )
        for pair in pairs
    ]  # fmt: skip
    standings = [pair.standing for pair in pairs]
    ratios = [pair.ratio for pair in pairs]
    return "\n".join(
        [
            "# The control law against a constant reserve",
            "",
            f"`python -m benchmarks.policy.control`: windows of 1,200 requests, both with the same, simulated. Of "
            f"{len(pairs)} rows it is ahead by two standard errors in {standings.count('ahead')}, behind in "
            f"{standings.count('behind')}; its goodput is {min(ratios):.3f} to {max(ratios):.3f} times that of the "
            f"constant configured reserve, {statistics.mean(ratios):.3f} in the mean. `every`: tokens between "
            "probes. Rows are omitted where the fixed part alone exceeds the time of a whole extend.",
            "",
            *table(("every", "trace", "fixed", "load", "windows", "r stays", "the law", "ratio", "±", ""), rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--every", type=int, nargs="+", default=_EVERY, help="tokens between probes")
    parser.add_argument("--requests", type=int, default=1200, help="of each window")
    parser.add_argument("--windows", type=int, nargs="+", default=range(0, 12000, 1200), help="first requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policy-control"))
    options = parser.parse_args()
    benches = {every: Bench(options, Workload(probe_every_tokens=every)) for every in options.every}
    pairs = []
    for every, trace, fixed_s, load in product(options.every, options.traces.split(","), _FIXED, _LOADS):
        bench = benches[every]
        try:
            stays, shipped = (
                [bench.run(Job(trace, begin, fixed_s, load, policy)).goodput for begin in bench.windows(trace)]
                for policy in (_STAYS, SHIPPED)
            )
        except SystemExit:  # no pool with this fixed part can be the scarcest resource
            continue
        pairs.append(Pair.of(every, Job(trace, 0, fixed_s, load, SHIPPED), stays, shipped))
        print(pairs[-1], file=sys.stderr, flush=True)
    found = {"machine": machine(), "seed": options.seed, "requests": options.requests, "pairs": pairs}
    keep(found, markdown(pairs), options.out)


if __name__ == "__main__":
    main()
