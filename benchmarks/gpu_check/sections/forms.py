"""The first section: does the engine start here, in each form, with the CPU engine's results?

Runs in a process of its own, which is killed when its time is over: a compiler that does not end cannot be
interrupted. `python -m benchmarks.gpu_check.sections.forms DEVICE` runs it; if it fails, the last line of its errors is
the reason.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import get_args

import numpy as np

from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.synthetic import random_set
from gpu import Engine, GraphIndex, SearchParams, open_engine
from gpu.devices import CPU

LIMIT_S = 20.0
_PARAMS = SearchParams(10, 64, 4)


def check(setup: Setup, outcome: Outcome, limit_s: float = LIMIT_S) -> None:
    """Run the forms in a child process. Raises AssertionError with one line."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.sections.forms", setup.device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the engine has not started on {setup.device} within {limit_s:.0f} s") from None
    for line in done.stdout.splitlines():
        form, _, result = line.partition(": ")
        outcome.add(form, result)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise AssertionError(lines[-1])


def forms_on(device: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the launch forms and the options of their engines."""
    if device == CPU:
        yield "cpu", {}
        return
    from gpu.cuda.graphs import LaunchForm

    for form in get_args(LaunchForm):
        yield form, {"form": form, "extends_per_launch": 1 if form == "plain" else 64}


def main(device: str) -> None:
    """Search a small index in each form. Raises AssertionError, and the engine's errors."""
    data = random_set(1000, 96, 64, seed=5)
    index = GraphIndex.build(data.base, metric="l2", dtype="float16", degree=16, neighbor_codes=False)
    expected = index.search(data.queries, 10, 64, 4)[0]
    for form, options in forms_on(device):
        with closing(_open(device, index, options)) as engine:
            ids = _search(engine, data.queries)
            same = float(np.mean(ids == expected))
            reason = getattr(engine, "fallback_reason", "")
            assert same > 0.99, f"form {form}: {same:.1%} of the ids are the CPU engine's"
            print(
                f"{form}: {same:.1%} of the CPU engine's ids" + (f"; falls back: {reason}" if reason else ""),
                flush=True,
            )


def _open(device: str, index: GraphIndex, options: dict[str, object]) -> Engine:
    if device == CPU:
        return open_engine(device, {"docs": index}, slots=8, max_top_m=64)
    from gpu.cuda.engine import CudaEngine

    return CudaEngine.open(device, {"docs": index}, slots=8, max_top_m=64, **options)


def _search(engine: Engine, queries: np.ndarray) -> np.ndarray:
    """Search one query after another."""
    ids = []
    for query in queries:
        slot = engine.admit(query, _PARAMS, "docs")
        while slot not in engine.extend():
            pass
        ids.append(engine.result(slot)[0])
        engine.release(slot)
    return np.array(ids)


if __name__ == "__main__":
    main(sys.argv[1])
