"""A few queries over a small index, run under compute-sanitizer and ncu.

python -m benchmarks.gpu_check.sections.small_run DEVICE plain|resident
"""

import signal
import sys

from benchmarks.gpu_check.load_driver import run_load
from benchmarks.gpu_check.synthetic import random_set
from gpu import Engine, GraphIndex, SearchParams, open_engine
from gpu.devices import CPU


def main(device: str, form: str) -> None:
    """Search, pause, resume and release."""
    data = random_set(800, 40, 24, seed=3)
    index = GraphIndex.build(data.base, metric="l2", degree=8)
    engine = engine_of(device, form, {"docs": index})
    paused = engine.admit(data.queries[0], SearchParams(5, 32, 2), "docs")
    if form != "resident":  # with which it would finish
        engine.extend()
    engine.pause(paused)
    load = run_load(engine, data.queries[1:], SearchParams(5, 32, 2))
    engine.resume(paused)
    engine.extend()
    engine.release(paused)
    engine.close()
    assert load.finished == len(data.queries) - 1
    print(f"{load.finished} queries in {load.steps} steps")


def engine_of(device: str, form: str, collections: dict[str, GraphIndex]) -> Engine:
    """Open an engine with this launch form."""
    if device == CPU:
        return open_engine(device, collections, slots=8, max_top_m=64)
    from gpu.cuda.engine import CudaEngine

    per_launch = {"plain": 1, "resident": 1024}[form]
    return CudaEngine.open(device, collections, slots=8, max_top_m=64, extends_per_launch=per_launch, form=form)


if __name__ == "__main__":
    signal.alarm(30)  # a tool that is stopped leaves it running
    device, form = sys.argv[1:]
    if form not in ("plain", "resident"):
        sys.exit(__doc__)
    main(device, form)
