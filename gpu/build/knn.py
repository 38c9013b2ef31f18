"""Lists of nearest neighbours, exact: one matrix product a block, and a selection."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_BLOCK = 1024


def exact_neighbors(space: Array, k: int, progress: Callable[[float], None]) -> npt.NDArray[np.uint32]:
    """The k nearest other rows of each row of `space` (float32 [N, d], squared L2), nearest first: uint32 [N, k].

    k must be below N. Ties are broken by row number.
    """
    count = len(space)
    norms = np.einsum("ij,ij->i", space, space)
    neighbors = np.empty((count, k), np.uint32)
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        distances = norms - 2 * (space[begin:end] @ space.T)
        rows = np.arange(end - begin)
        distances[rows, rows + begin] = np.inf
        nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
        nearest.sort(axis=1)
        order = np.argsort(np.take_along_axis(distances, nearest, axis=1), axis=1, kind="stable")
        neighbors[begin:end] = np.take_along_axis(nearest, order, axis=1)
        progress(end / count)
    return neighbors
