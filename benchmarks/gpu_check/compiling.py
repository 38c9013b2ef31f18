"""Warm-up of numba's cache for a pool, so that compilation does not count against the section "flood".

`python -m benchmarks.gpu_check.compiling` runs that section on a tiny data set on the CPU: half a minute with a cold
cache. The check runs it in the background while it generates its data.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu_check.time_limit import Skipped


def main() -> None:
    """Run the section. Raises Skipped if a package is missing."""
    try:
        from benchmarks.gpu_check.report import Outcome
        from benchmarks.gpu_check.sections import flood
        from benchmarks.gpu_check.setup import Setup, Source
        from benchmarks.gpu_check.synthetic import random_set
        from gpu import GraphIndex
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed") from None
    data = random_set(500, 16, 20, seed=0)
    given = data, GraphIndex.build(data.base, metric="l2", degree=8, neighbor_codes=False)
    flood.check(Setup("cpu", "CPU", Source("tiny"), "float32", 0, 16, True, {}, given=given), Outcome())


@contextlib.contextmanager
def compile_in_background() -> Iterator[None]:
    """Run `main` in a child process, which is killed at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.compiling"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
