"""What a search client hands out: results, batches of them, one of several shards', and its statistics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import InternalError, TrinityError

NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
NO_DISTANCES: npt.NDArray[np.float32] = np.empty(0, np.float32)


class SearchResult(msgspec.Struct, frozen=True, eq=False):
    """How a query ended. `ids` int64 and `distances` float32 [≤ k], nearest first, are empty unless it was answered.

    `extends` is the number of engine steps; `wait_ns` the time until it had a slot, `search_ns` the time in it; of a
    split collection, those of the slowest shard. `identity` names the build of the collection that the ids are of.
    """

    ticket: int
    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    extends: int = 0
    wait_ns: int = 0
    search_ns: int = 0
    error: TrinityError | None = None
    identity: str = ""

    def checked(self) -> "SearchResult":
        """Itself. Raises its error if it ended with one."""
        if self.error is not None:
            raise self.error
        return self


def failed(ticket: int, error: TrinityError) -> SearchResult:
    """The end of a query that was not answered."""
    return SearchResult(ticket, NO_IDS, NO_DISTANCES, error=error)


class SearchBatch:
    """The results of many queries, in their order: `batch[i]` is the `SearchResult` of query i.

    `ids` int64 [n, k] and `distances` float32 [n, k] hold them as arrays, -1 and +inf where there is none (if no query
    was answered, they are [n, 0]); `errors` maps the number of each query that was not answered to what ended it.
    """

    def __init__(self, results: list[SearchResult], k: int) -> None:
        self.results = tuple(results)
        width = k if not results or any(result.error is None for result in results) else 0
        self.ids = np.full((len(results), width), -1, np.int64)
        self.distances = np.full((len(results), width), np.inf, np.float32)
        self.errors: dict[int, TrinityError] = {}
        for row, result in enumerate(results):
            self.ids[row, : len(result.ids)] = result.ids
            self.distances[row, : len(result.ids)] = result.distances
            if result.error is not None:
                self.errors[row] = result.error

    def checked(self) -> "SearchBatch":
        """Itself. Raises the first error if a query was not answered."""
        for error in self.errors.values():
            raise error
        return self

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, number: int) -> SearchResult:
        return self.results[number]

    def __iter__(self) -> Iterator[SearchResult]:
        return iter(self.results)


PoolState = Literal["live", "slow", "lost"]


@dataclass(frozen=True)
class PoolStatistics:
    """A client's view of one pool since the client was made.

    `state`: live, slow (passed over, but probed) or lost (no session). `epoch` of the pool's life, 0 before the first.
    `round_trip_us` has the 50th, 90th and 99th percentile of the last 1,024 answers, nothing before the first; `errors`
    counts how queries ended that were not answered, by the status the pool gave ('lost': the pool died with it).
    """

    endpoint: str
    state: PoolState
    epoch: int
    outstanding: int
    sent: int
    answered: int
    errors: Mapping[str, int]
    round_trip_us: Mapping[int, float]


@dataclass(frozen=True)
class SearchStatistics:
    """All pools of a client; `waiting` queries have none at present."""

    pools: tuple[PoolStatistics, ...]
    waiting: int


# ---- one answer from several shards: the nearest of all, ties by id


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
