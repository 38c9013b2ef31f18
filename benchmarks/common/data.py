"""Data sets with exact nearest neighbours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DataSet:
    """base float32 [N, d] and queries float32 [q, d] (normalised for cosine); truth int64 [q, ≥ 10], nearest first."""

    name: str
    metric: str
    base: Array
    queries: Array
    truth: Array

    def recall(self, ids: Array, k: int = 10) -> float:
        """Recall@k of ids [q, k]."""
        hits = (ids[:, :k, None] == self.truth[:, None, :k]).any(axis=2)
        return float(hits.mean())


def data_sets(directory: Path) -> list[str]:
    """Return the names of the data sets in a directory: NAME.base.npy, NAME.query.npy, NAME.truth.npy; NAME ends with
    the metric."""
    return sorted(path.name.removesuffix(".base.npy") for path in directory.glob("*.base.npy"))


def load(directory: Path, name: str, rows: int | None = None, queries: int | None = None) -> DataSet:
    """Load a data set. With `rows`, use only the first ones and recompute their exact neighbours."""
    metric = name.rsplit("-", 1)[1]
    base = np.load(directory / f"{name}.base.npy", mmap_mode="r")[:rows].astype(np.float32)
    vectors = np.load(directory / f"{name}.query.npy", mmap_mode="r")[:queries].astype(np.float32)
    if metric == "cosine":
        base, vectors = _normalised(base), _normalised(vectors)
    truth = np.load(directory / f"{name}.truth.npy", mmap_mode="r")[:queries].astype(np.int64)
    if rows is not None:
        truth = nearest(base, vectors, 10)
    return DataSet(name, metric, base, vectors, truth)


def _normalised(vectors: Array) -> Array:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30))


def nearest(base: Array, queries: Array, k: int) -> Array:
    """Return the exact k nearest by squared L2 (for normalised vectors also by cosine), int64 [q, k]."""
    norms = np.einsum("ij,ij->i", base, base)
    blocks = [
        np.argsort(norms - 2 * (part @ base.T), axis=1, kind="stable")[:, :k] for part in np.array_split(queries, 8)
    ]
    return np.concatenate(blocks)
