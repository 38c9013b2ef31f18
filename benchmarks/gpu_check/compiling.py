"""Have what a pool is compiled of in numba's cache, so that the section "flood" does not spend its time on it.

`python -m benchmarks.gpu_check.compiling` does that section over a tiny set on the CPU: half a minute where nothing of
it is there yet. The check runs it beside the making of its data.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu_check.time_limit import Skipped


def main() -> None:
    """Raises Skipped where a package is missing."""
    try:
        from benchmarks.gpu_check.report import Outcome
        from benchmarks.gpu_check.sections import flood
        from benchmarks.gpu_check.setup import Setup, Source
        from benchmarks.gpu_check.synthetic import random_set
        from gpu import GraphIndex
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed") from None
    data = random_set(500, 16, 20, seed=0)
    given = data, GraphIndex.build(data.base, metric="l2", degree=8)
    flood.check(Setup("cpu", "CPU", Source("tiny"), "float32", 0, 16, True, {}, given=given), Outcome())


@contextlib.contextmanager
def compile_in_background() -> Iterator[None]:
    """`main` in a process of its own, which is ended with the block if it is not over by then."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.compiling"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
