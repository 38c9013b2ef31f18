"""Building the graph of an index on a CPU."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpu.build.knn import exact_neighbors
from gpu.build.optimize import optimize
from gpu.rows import FloatArray

_SEEDS = 64


def build_graph(
    vectors: FloatArray, metric: str, degree: int, seed: int, threads: int, progress: Callable[[str, float], None]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The search graph uint32 [N, degree] of checked vectors float32 [N, d], and the rows where searches begin."""
    count = len(vectors)
    seeds = np.random.default_rng(seed).permutation(count)[:_SEEDS].astype(np.uint32)
    if count == 1:
        return np.zeros((1, degree), np.uint32), seeds
    space = neighbor_space(vectors, metric)
    width = min(2 * degree, count - 1)
    neighbors = exact_neighbors(space, width, lambda fraction: progress("neighbors", fraction))
    progress("graph", 0.0)
    graph = optimize(neighbors, degree, int(seeds[0]))
    progress("graph", 1.0)
    return graph, seeds


def neighbor_space(vectors: FloatArray, metric: str) -> FloatArray:
    """Vectors whose squared L2 distances order neighbours as the metric does.

    For ip a dimension is added that gives all vectors the same norm (Bachrach et al., RecSys 2014, section 3.1); vectors for
    cosine have that already.
    """
    if metric != "ip":
        return vectors
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    return np.hstack([vectors, np.sqrt(squares.max() - squares)[:, None].astype(np.float32)])
