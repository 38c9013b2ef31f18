"""Test data whose distances are exact in float32, so that the ids of two searches can be compared."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.index.data import IndexData
from gpu.index.rows import Dtype, FloatArray, Metric, checked_vectors, encode

METRICS: tuple[Metric, ...] = ("cosine", "l2", "ip")
DTYPES: tuple[Dtype, ...] = ("float32", "float16")
KINDS: tuple[tuple[Metric, Dtype], ...] = (("cosine", "float32"), ("l2", "float16"), ("ip", "float32"))
"""Each metric and each type once; all of both are in `tests/cuda/test_kernels.py`, and drawn in `test_reference.py`."""


def exact_vectors(random: np.random.Generator, count: int, dim: int = 20) -> FloatArray:
    """Return vectors with 0, 1, 4 or 16 entries of ±1: their norms are powers of two, so normalisation is exact."""
    vectors = random.choice(np.array([-1, 1], np.float32), size=(count, dim))
    ranks = random.permuted(np.tile(np.arange(dim), (count, 1)), axis=1)
    vectors[ranks >= random.choice([0, 1, 4, 16], size=(count, 1))] = 0
    return vectors


def random_index(
    random: np.random.Generator, count: int, metric: Metric, dtype: Dtype, degree: int, seeds: int, dim: int = 20
) -> IndexData:
    """Return exact vectors under a random graph with loops and duplicates: no search may rely on a good graph."""
    vectors = checked_vectors(exact_vectors(random, count, dim), metric)
    graph = random.integers(count, size=(count, degree), dtype=np.uint32)
    first = random.permutation(count)[:seeds].astype(np.uint32)
    return IndexData(encode(vectors, metric, dtype), graph, first, None)


def exact_neighbors(
    vectors: npt.NDArray[np.floating[Any]], queries: npt.NDArray[np.floating[Any]], metric: Metric, k: int
) -> npt.NDArray[np.int64]:
    """Return the true k nearest rows of each query."""
    if metric == "cosine":
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    distances = -(queries @ vectors.T)
    if metric == "l2":
        distances = np.square(vectors).sum(axis=1) + 2 * distances
    return np.argsort(distances, axis=1, kind="stable")[:, :k]


def recall(found: npt.NDArray[np.int64], truth: npt.NDArray[np.int64]) -> float:
    """Return the recall: the fraction of the true neighbours that was found."""
    return float(np.mean([len(np.intersect1d(a, b)) / truth.shape[1] for a, b in zip(found, truth, strict=True)]))


def clustered(random: np.random.Generator, count: int, dim: int, clusters: int = 30) -> FloatArray:
    """Return Gaussian clusters of low intrinsic dimension, like embeddings: graph search works on them."""
    basis = random.standard_normal((12, dim))
    centres = random.standard_normal((clusters, 12)) * 2
    points = centres[random.integers(clusters, size=count)] + random.standard_normal((count, 12))
    return (points @ basis + 0.3 * random.standard_normal((count, dim))).astype(np.float32)
