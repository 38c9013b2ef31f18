"""`python -m benchmarks.policy`: see `bench.py`."""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.report import write
from benchmarks.policy import bench as tables
from benchmarks.policy.bench import TRACES, Bench, day, placements, policies
from benchmarks.policy.changing_loads import CHANGES, ChangingBench
from benchmarks.policy.records import Report
from benchmarks.policy.report import draw_goodput, draw_plans, markdown


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    bench, changing = Bench(options), ChangingBench(options)
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(policies(bench, pool, options.traces.split(","), options.loads))
        changes = list(policies(changing, pool, options.changes, (1.0,)))
    report = Report(
        machine=machine(),
        versions={name: version(name) for name in ("trinity-runtime", "numpy", "msgspec") if _installed(name)},
        requests=options.requests,
        windows=list(options.windows),
        seed=options.seed,
        slos={name: slos for name, (_, slos) in TRACES.items()},
        rows=rows,
        changing=changes,
        placements=list(placements(bench)) if not options.quick else [],
        day=day(bench) if not options.quick else None,
        took_s=time.monotonic() - began,
    )
    write(report, markdown(report), options.out / "policy")
    draw_goodput(report, options.out / "policy.png")
    if report.placements:
        draw_plans(report, options.out / "policy-placements.png")


def _installed(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:  # PackageNotFoundError is one
        return False
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=tables.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--changes", nargs="*", default=list(CHANGES), choices=CHANGES, help="changing loads")
    parser.add_argument("--requests", type=int, default=1200, help="requests of each window")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=range(0, 12000, 1200), help="first requests of windows"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9, 1.0, 1.1, 1.2])
    parser.add_argument("--fixed", type=float, nargs="+", default=[20e-6, 300e-6], help="fixed part of an extend, s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only the first table")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
