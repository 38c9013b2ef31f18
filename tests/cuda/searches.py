"""A small index for tests of the CUDA engine, queries, and the CPU's answers."""

import numpy as np

from gpu import GraphIndex, SearchParams
from gpu.index.rows import FloatArray
from tests.gpu.datasets import clustered

DIM, PARAMS = 16, SearchParams(k=10, top_m=32, search_width=1)
INDEX = GraphIndex.build(clustered(np.random.default_rng(1), 900, DIM), metric="l2", degree=8, neighbor_codes=False)


def queries(count: int, seed: int = 5) -> FloatArray:
    return clustered(np.random.default_rng(seed), count, DIM)


def searched(query: FloatArray, params: SearchParams = PARAMS) -> list[int]:
    return [int(id) for id in INDEX.search(query[None], params.k, params.top_m, params.search_width)[0][0]]
