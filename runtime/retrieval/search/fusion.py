"""What two searches have found as one: by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009)."""

from collections import defaultdict

import numpy as np
from msgspec import structs

from runtime.retrieval.nearest import Nearest
from runtime.retrieval.search.query import SearchResult

CONSTANT = 60  # of their formula
DEPTH = 4  # times as many results of each side as are wanted of both


def with_words(result: SearchResult, words: Nearest, k: int, share: float) -> SearchResult:
    """A search's result, `fused` with what words have found."""
    ids, distances = fused((result.ids, result.distances), words, k, share)
    return structs.replace(result, ids=ids, distances=distances)


def fused(vectors: Nearest, words: Nearest, k: int, share: float = 0.5) -> Nearest:
    """The k best of what vectors and words have found: ids int64 [≤ k] and distances float32 [≤ k], the best first.

    Each side gives an id `share` (the words'; 1 - `share` the vectors') / (60 + its rank there, from 1); the sums are
    what is compared, then the distances.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    distance: dict[int, float] = {}
    for (ids, distances), part in ((vectors, 1 - share), (words, share)):
        for rank, (row, far) in enumerate(zip(ids.tolist(), distances.tolist(), strict=True), 1):
            if row >= 0:
                scores[row] += part / (CONSTANT + rank)
                distance.setdefault(row, far)
    best = sorted(scores, key=lambda row: (-scores[row], distance[row], row))[:k]
    return np.array(best, np.int64), np.array([distance[row] for row in best], np.float32)
