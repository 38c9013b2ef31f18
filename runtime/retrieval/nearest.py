"""The nearest vectors, as searches give them: ids and distances; merged, and compared with the truth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Nearest = tuple[NDArray[np.int64], NDArray[np.float32]]


def merge_nearest(parts: Sequence[Nearest], k: int) -> Nearest:
    """The `k` nearest of all parts: ids and distances, each [≤ k] or [q, ≤ k], of different vectors, -1 for none.

    Nearest first; among equally near ones the smaller id; what is missing (id -1, distance +inf) comes last.
    """
    ids = np.concatenate([ids for ids, _ in parts], axis=-1)
    distances = np.concatenate([distances for _, distances in parts], axis=-1)
    order = np.lexsort((ids, distances), axis=-1)[..., :k]
    return np.take_along_axis(ids, order, -1), np.take_along_axis(distances, order, -1)


def recall(ids: NDArray[Any], truth: NDArray[Any]) -> float:
    """The mean part of the true k nearest that are among the k found.

    ids: [queries, k]; truth: [queries, k or more], nearest first.
    """
    k = ids.shape[1]
    return sum(int((ids == truth[:, rank, None]).any(axis=1).sum()) for rank in range(k)) / ids.size
