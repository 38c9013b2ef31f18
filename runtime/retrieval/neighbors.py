"""The nearest vectors, as searches give them: ids and distances; merged, fused, and compared with the truth."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Neighbors = tuple[NDArray[np.int64], NDArray[np.float32]]
FUSION_DEPTH = 4  # times as many results of each side as are wanted of two that are fused
_RANK_CONSTANT = 60  # of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)


def merge_neighbors(parts: Sequence[Neighbors], k: int) -> Neighbors:
    """The `k` nearest of all parts: ids and distances, each [≤ k] or [q, ≤ k], of different vectors, -1 for none.

    Nearest first; among equally near ones the smaller id; what is missing (id -1, distance +inf) comes last.
    """
    ids = np.concatenate([ids for ids, _ in parts], axis=-1)
    distances = np.concatenate([distances for _, distances in parts], axis=-1)
    order = np.lexsort((ids, distances), axis=-1)[..., :k]
    return np.take_along_axis(ids, order, -1), np.take_along_axis(distances, order, -1)


def fuse_ranks(vectors: Neighbors, words: Neighbors, k: int, share: float = 0.5) -> Neighbors:
    """The k best of what vectors and words have found: ids int64 [≤ k] and distances float32 [≤ k], the best first.

    By reciprocal rank: each side gives an id `share` (the words'; 1 - `share` the vectors') / (60 + its rank there,
    from 1); the sums are what is compared, then the distances.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    distance: dict[int, float] = {}
    for (ids, distances), part in ((vectors, 1 - share), (words, share)):
        for rank, (row, far) in enumerate(zip(ids.tolist(), distances.tolist(), strict=True), 1):
            if row >= 0:
                scores[row] += part / (_RANK_CONSTANT + rank)
                distance.setdefault(row, far)
    best = sorted(scores, key=lambda row: (-scores[row], distance[row], row))[:k]
    return np.array(best, np.int64), np.array([distance[row] for row in best], np.float32)


def recall(ids: NDArray[Any], truth: NDArray[Any]) -> float:
    """The mean part of the true k nearest that are among the k found.

    ids: [queries, k]; truth: [queries, k or more], nearest first.
    """
    k = ids.shape[1]
    return sum(int((ids == truth[:, rank, None]).any(axis=1).sum()) for rank in range(k)) / ids.size
