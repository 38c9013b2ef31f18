"""How much of the truth a search found."""

from typing import Any

from numpy.typing import NDArray


def recall(ids: NDArray[Any], truth: NDArray[Any]) -> float:
    """The mean part of the true k nearest that are among the k found.

    ids: [queries, k]; truth: [queries, k or more], nearest first.
    """
    k = ids.shape[1]
    return sum(int((ids == truth[:, rank, None]).any(axis=1).sum()) for rank in range(k)) / ids.size
