"""Nearest neighbors as searches return them: merging of shards, rank fusion, recall."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Neighbors = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ids and distances, nearest first."""
FUSION_DEPTH = 4  # each side of a hybrid search returns this many times the results wanted
_RANK_CONSTANT = 60  # of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)


def merge_neighbors(parts: Sequence[Neighbors], k: int) -> Neighbors:
    """Return the `k` nearest of all parts, whose vectors are disjoint: ids and distances, each [≤ k] or [q, ≤ k].

    Nearest first; ties by id; missing entries (id -1, distance +inf) last.
    """
    ids = np.concatenate([ids for ids, _ in parts], axis=-1)
    distances = np.concatenate([distances for _, distances in parts], axis=-1)
    order = np.lexsort((ids, distances), axis=-1)[..., :k]
    return np.take_along_axis(ids, order, -1), np.take_along_axis(distances, order, -1)


def fuse_ranks(vectors: Neighbors, keywords: Neighbors, k: int, weight: float = 0.5) -> Neighbors:
    """Return the k best of a vector search and a keyword search: int64 ids [≤ k] and float32 distances [≤ k], best
    first.

    Reciprocal rank fusion: an id scores the weight of a side / (60 + rank) on each side, ranks from 1; the weight of
    keywords is `weight`, of vectors 1 - `weight`. Ties by distance.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    distance_of: dict[int, float] = {}
    for (ids, distances), side_weight in ((vectors, 1 - weight), (keywords, weight)):
        for rank, (row, distance) in enumerate(zip(ids.tolist(), distances.tolist(), strict=True), 1):
            if row >= 0:
                scores[row] += side_weight / (_RANK_CONSTANT + rank)
                distance_of.setdefault(row, distance)
    best = sorted(scores, key=lambda row: (-scores[row], distance_of[row], row))[:k]
    return np.array(best, np.int64), np.array([distance_of[row] for row in best], np.float32)


def recall(ids: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return recall@k: the mean share of the true k nearest neighbors among the k found.

    ids: [queries, k]; truth: [queries, k or more], nearest first.
    """
    k = ids.shape[1]
    return sum(int((ids == truth[:, rank, None]).any(axis=1).sum()) for rank in range(k)) / ids.size
