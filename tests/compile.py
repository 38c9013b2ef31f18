"""Compile what the tests need, once, before several processes would each do it: `python -m tests.compile`.

Machine code is kept on disk beside its sources (`gpu.compiled`, `ipc.memory.compiled`): a second run takes seconds.
"""

import numpy as np

import gpu.cuda.backend  # each of these compiles as it is imported
import runtime.pool.process
import runtime.serving.model.row_attention
from gpu import GraphIndex
from gpu.rows import DTYPES, METRICS

__all__ = ["gpu", "runtime"]


def main() -> None:
    vectors = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    for metric in METRICS:
        for dtype in DTYPES:
            index = GraphIndex.build(vectors, metric=metric, dtype=dtype, degree=16)  # type: ignore[arg-type]
            index.search(vectors[:3], 5)


if __name__ == "__main__":
    main()
