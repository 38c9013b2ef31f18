"""`python -m benchmarks.policy`: see `bench.py`."""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.report import write
from benchmarks.policy import bench as tables
from benchmarks.policy.bench import TRACES, Bench, policies
from benchmarks.policy.records import Report
from benchmarks.policy.report import draw_goodput, markdown


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    bench = Bench(options)
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(policies(bench, pool, options.traces.split(","), options.loads))
    report = Report(
        machine=machine(),
        versions={name: version(name) for name in ("trinity-runtime", "numpy", "msgspec") if _installed(name)},
        requests=options.requests,
        windows=list(options.windows),
        seed=options.seed,
        slos={name: slos for name, (_, slos) in TRACES.items()},
        rows=rows,
        took_s=time.monotonic() - began,
    )
    write(report, markdown(report), options.out / "policy")
    draw_goodput(report, options.out / "policy.png")


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
    parser.add_argument("--requests", type=int, default=1200, help="requests of each window")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=range(0, 12000, 1200), help="first requests of windows"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9, 1.0, 1.1, 1.2])
    parser.add_argument("--fixed", type=float, nargs="+", default=[20e-6, 300e-6], help="fixed part of an extend, s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
