"""Compile the functions that tests need once, before several processes would each do it: `python -m tests.compile`.

Machine code is cached on disk next to its sources (`gpu.compiled`, `ipc.native.compiled`): a second run takes seconds.
So is Python's byte code of the tests, in which pytest rewrites assertions: seconds in each process that finds none.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
COLLECT = ("-m", "pytest", "-qq", "--collect-only", "-m", "not nodes")


@contextmanager
def byte_code() -> Iterator[None]:
    """Collect the tests beside the block, if there is no byte code of them."""
    if any(TESTS.rglob("*-pytest-*.pyc")):
        yield
        return
    with subprocess.Popen([sys.executable, *COLLECT], cwd=TESTS.parent, stdout=subprocess.DEVNULL):
        yield


def compile_functions() -> None:
    """Modules are imported here, since some compile functions when they are imported, as collecting the tests does."""
    import numpy as np

    from runtime.pool.loop_parts import compiled_in_background

    vectors = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    with compiled_in_background():  # the pool's loop
        import runtime.serving.network.llama  # noqa: F401
        from gpu import GraphIndex
        from gpu.compiled import compile_c_functions
        from gpu.cuda import backend, resident
        from gpu.index.rows import DTYPES, METRICS

        compile_c_functions(backend, resident)
        for metric in METRICS:
            for dtype in DTYPES:
                index = GraphIndex.build(vectors, metric=metric, dtype=dtype, degree=16, neighbor_codes=False)  # type: ignore[arg-type]
                index.search(vectors[:3], 5)
    from runtime.retrieval.collections import bulk_load
    from runtime.simulator.node import Simulation
    from runtime.testing.pool import InProcessPool, plan_of
    from tests.simulator.nodes import poisson, setup

    with tempfile.TemporaryDirectory() as folder:
        bulk_load.build(vectors, Path(folder) / "docs", metric="l2", degree=16)
        pool = InProcessPool(plan_of(Path(folder) / "docs"))
        pool.close()
        pool.worker.table.close()
        pool.table.close()
    Simulation(setup(), poisson(20, 5.0)).run()  # and the simulator's


if __name__ == "__main__":
    with byte_code():
        compile_functions()
