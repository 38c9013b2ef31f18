"""A few queries over a small index, watched by compute-sanitizer.

python -m benchmarks.gpu_check.sections.small_run DEVICE plain|fused
"""

import sys

from benchmarks.gpu_check.drive import drive
from benchmarks.gpu_check.made import random_set
from gpu import Engine, GraphIndex, SearchParams, open_engine


def main(device: str, fused: bool) -> None:
    """int8 over l2, so that rescoring is watched too; pauses and releases among the queries."""
    data = random_set(800, 40, 24, seed=3)
    index = GraphIndex.build(data.base, metric="l2", dtype="int8", degree=8)
    engine = _engine(device, fused, {"docs": index})
    paused = engine.admit(data.queries[0], SearchParams(5, 32, 2), "docs")
    engine.extend()
    engine.pause(paused)
    found = drive(engine, data.queries[1:], SearchParams(5, 32, 2))
    engine.resume(paused)
    engine.extend()
    engine.release(paused)
    engine.close()
    assert found.finished == len(data.queries) - 1
    print(f"{found.finished} queries in {found.steps} steps")


def _engine(device: str, fused: bool, collections: dict[str, GraphIndex]) -> Engine:
    if not fused:
        return open_engine(device, collections, slots=8, max_top_m=64)
    from gpu.cuda.engine import CudaEngine

    return CudaEngine.open(device, collections, slots=8, max_top_m=64, extends_per_launch=4, form="fused")


if __name__ == "__main__":
    device, form = sys.argv[1:]
    if form not in ("plain", "fused"):
        sys.exit(__doc__)
    main(device, fused=form == "fused")
