"""One answer from several shards: the nearest of all, ties by id."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.errors import InternalError
from runtime.retrieval.search.results import SearchResult

Q = TypeVar("Q")

Nearest = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def merge_nearest(parts: Sequence[Nearest], k: int) -> Nearest:
    """The `k` nearest of all parts: ids and distances, each [≤ k] or [q, ≤ k], of different vectors, -1 for none.

    Nearest first; among equally near ones the smaller id; what is missing (id -1, distance +inf) comes last.
    """
    ids = np.concatenate([ids for ids, _ in parts], axis=-1)
    distances = np.concatenate([distances for _, distances in parts], axis=-1)
    order = np.lexsort((ids, distances), axis=-1)[..., :k]
    return np.take_along_axis(ids, order, -1), np.take_along_axis(distances, order, -1)


class Gather(Generic[Q]):
    """The parts of one query that were sent to all shards of a collection. It ends once: whole, or with an error.

    `whole` is the query that was split, `identity` that of the build whose shards are asked.
    """

    def __init__(self, whole: Q, identity: str, k: int, shards: int) -> None:
        self.whole, self.identity = whole, identity
        self.ended = False
        self._k = k
        self._missing = shards
        self._parts: list[SearchResult] = []

    def add(self, part: SearchResult) -> SearchResult | None:
        """A shard's answer. The query's, if it was the last one missing."""
        if part.identity != self.identity:
            raise InternalError(f"a shard of build {part.identity!r} answered a query to build {self.identity!r}")
        self._parts.append(part)
        self._missing -= 1
        if self._missing:
            return None
        self.ended = True
        ids, distances = merge_nearest([(part.ids, part.distances) for part in self._parts], self._k)
        return SearchResult(
            self._parts[0].ticket,
            ids,
            distances,
            max(part.extends for part in self._parts),
            max(part.wait_ns for part in self._parts),
            max(part.search_ns for part in self._parts),
            identity=self.identity,
        )
