"""Queries, their results, and the statistics of a client.

arguments ── `make_spec` ──▶ `Query`, one per shard, kept until it has ended ──▶ `SearchResult`
"""

import numbers
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from ipc import STAGES, SearchSpec, Stage
from runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TrinityError, WorkerLost
from runtime.node.worker_config import SEARCH_WIDTH
from runtime.retrieval.attributes.evaluation import MAX_COMPARED
from runtime.retrieval.attributes.filters import FilterLike, filter_bytes
from runtime.retrieval.neighbors import merge_neighbors
from runtime.retrieval.search.vectors import Vectors, check_finite, check_length, on_host

# ---- search parameters, validated before a pool is known; a pool has limits of its own

_MAX_PARAMETER = 65_535  # of k, top_m, search_width and patience: 16 bits in a request's header
_LATEST_NS = (1 << 63) - 1
_MAX_DEADLINE_MS = 86_400_000  # a deadline more than a day away is a mistake


def make_spec(
    k: Any,
    collection: Any = "",
    stage: Any = "prefill",
    top_m: Any = None,
    search_width: Any = None,
    patience: Any = None,
    deadline_ns: Any = 0,
    filter: FilterLike = None,
) -> SearchSpec:
    """Validate search parameters; integer-like values become int. Raises `InvalidRequest` with the value and limit."""
    k = _integer("k", k, 1, _MAX_PARAMETER)
    if top_m is not None:
        top_m = _integer("top_m", top_m, 1, _MAX_PARAMETER)
        if k > top_m:
            raise InvalidRequest(f"k is {k}, more than top_m, which is {top_m}: a search keeps no more candidates", "k")
    if type(collection) is not str:
        raise InvalidRequest(f"collection must be a name, not {collection!r}", "collection")
    if stage not in STAGES:
        raise InvalidRequest(f"stage must be one of {STAGES}, not {stage!r}", "stage")
    return SearchSpec(
        collection,
        k,
        stage,
        top_m,
        SEARCH_WIDTH if search_width is None else _integer("search_width", search_width, 1, _MAX_PARAMETER),
        None if patience is None else _integer("patience", patience, 1, _MAX_PARAMETER),
        check_deadline(deadline_ns),
        filter_bytes(filter),
    )


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise InvalidRequest(f"{name} must be an integer, not {value!r}", name) from None
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}, outside {low}..{high}", name)
    return int(value)  # not of a subclass


def check_deadline(deadline_ns: Any) -> int:
    """Return a deadline (monotonic ns) as an int. Raises `InvalidRequest`."""
    return _integer("deadline_ns", deadline_ns, 0, _LATEST_NS)


def deadline_after_ms(deadline_ms: Any) -> int:
    """Return the deadline `deadline_ms` from now (monotonic ns); 0 for None. Raises `InvalidRequest`."""
    if deadline_ms is None:
        return 0
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, numbers.Real):
        raise InvalidRequest(f"deadline_ms must be a number, not {deadline_ms!r}", "deadline_ms")
    number: Any = deadline_ms
    if not 0 < number <= _MAX_DEADLINE_MS:
        raise InvalidRequest(f"deadline_ms is {deadline_ms}, allowed are above 0 to {_MAX_DEADLINE_MS}", "deadline_ms")
    return time.monotonic_ns() + int(float(number) * 1e6)


# ---- results

NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
NO_DISTANCES: npt.NDArray[np.float32] = np.empty(0, np.float32)


class SearchResult(msgspec.Struct, frozen=True, eq=False):
    """The end of a query. `ids` int64 and `distances` float32 [≤ k], nearest first, are empty unless it was answered.

    `extends`: engine steps. `wait_ns`: time until it had a slot; `search_ns`: time in the slot; for a sharded
    collection the maximum over shards. `identity`: the collection's build that the ids refer to.
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
        """Return the result itself. Raises its error, if any."""
        if self.error is not None:
            raise self.error
        return self


def failed_result(ticket: int, error: TrinityError) -> SearchResult:
    """Return the result of a query that was not answered."""
    return SearchResult(ticket, NO_IDS, NO_DISTANCES, error=error)


class SearchBatch:
    """The results of many queries, in order: `batch[i]` is the `SearchResult` of query i.

    `ids` int64 [n, k] and `distances` float32 [n, k] contain them as arrays, padded with -1 and +inf ([n, 0] if no
    query was answered); `errors` maps the index of each query that was not answered to its error.
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
        """Return the batch itself. Raises the first error, if any."""
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
    """A client's statistics of one pool since the client was created.

    `state`: live, slow (avoided, but probed) or lost (no session). `epoch`: of the pool process, 0 before the first
    session. `round_trip_us`: 50th, 90th and 99th percentile of the last 1,024 answers, empty before the first.
    `errors`: queries that were not answered, by the pool's status ('lost': the pool died with the query).
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
    """Statistics of a client: its pools, and the number of queries `waiting` for one."""

    pools: tuple[PoolStatistics, ...]
    waiting: int


# ---- scatter-gather over shards


class ShardGather:
    """Gathers the results of one query from all shards of a collection: the nearest of all, ties by id.

    It ends once, complete or with an error. `whole`: the query that was split. `identity`: the build that is searched.
    """

    def __init__(self, whole: "Query", identity: str, k: int, shards: int) -> None:
        self.whole, self.identity = whole, identity
        self.ended = False
        self._k = k
        self._missing = shards
        self._parts: list[SearchResult] = []

    def add(self, part: SearchResult) -> SearchResult | None:
        """Add a shard's result. Return the query's result if it was the last one missing."""
        if part.identity != self.identity:
            raise InternalError(f"a shard of build {part.identity!r} answered a query to build {self.identity!r}")
        self._parts.append(part)
        self._missing -= 1
        if self._missing:
            return None
        self.ended = True
        ids, distances = merge_neighbors([(part.ids, part.distances) for part in self._parts], self._k)
        return SearchResult(
            self._parts[0].ticket,
            ids,
            distances,
            max(part.extends for part in self._parts),
            max(part.wait_ns for part in self._parts),
            max(part.search_ns for part in self._parts),
            identity=self.identity,
        )


# ---- queries in progress, and their limits


class SearchOptions(TypedDict, total=False):
    """Keyword arguments of a search besides k and deadline; see `SearchClient.submit`."""

    collection: str
    stage: Stage
    top_m: int | None
    search_width: int | None
    patience: int | None
    filter: FilterLike


AcceptBuild = Callable[[str], bool]
"""Predicate on the identity of a collection's build: whether results of that build are acceptable."""


class SubmitOptions(SearchOptions, total=False):
    """Keyword arguments of `SearchClient.submit` besides k."""

    deadline_ns: int
    accept: AcceptBuild | None
    flow: int


class Rerank(msgspec.Struct, frozen=True):
    """Reranking of a query's passages, for at most `timeout_s`, after which they stay in the order of the search.
    `min_score`: passages with a lower score are left out, if they were reranked."""

    timeout_s: float
    min_score: float = -1e30


class Query(msgspec.Struct, eq=False):
    """A query from where it enters to its end, or one shard's part of it (then `gather` is set).

    `spec`: what is wanted, and for whom. `vector` [d]: None until the text is embedded; on a
    GPU the caller's own array, from which a retry copies again. `text`: to be embedded, or what a keyword search is
    for, whose weight in the fused ranks is `hybrid`, 0 for none. `accept`: acceptable builds, None for any. `rerank`:
    what is done with the passages found, None for nothing.

    The rest is a client's, with all that a retry needs. `parked_ns`: since when it has been waiting for a pool; 0: not
    waiting. `in_flight`: sessions that have it and have not answered; more than one if it was hedged. `ended`: later
    answers are ignored. `identity`: the build that answered it.
    """

    spec: SearchSpec
    vector: Vectors | None = None
    text: str = ""
    hybrid: float = 0.0
    accept: AcceptBuild | None = None
    ticket: int = 0
    parked_ns: int = 0
    shard: int = 0
    attempts: int = 0
    in_flight: int = 0
    ended: bool = False
    gather: ShardGather | None = None
    identity: str = ""
    rerank: Rerank | None = None


def status_error(status: str, query: Query) -> TrinityError:
    """Return the error for a query that its pool ended with this status."""
    match status:
        case "overloaded":
            return Overloaded("the pool's queue is full")
        case "deadline_exceeded":
            return DeadlineExceeded("the pool could not answer the query before its deadline")
        case "invalid_request":
            try:
                if query.vector is not None:
                    check_finite(on_host(query.vector))
                    check_length(on_host(query.vector))
            except InvalidRequest as error:
                return error
            if query.spec.filter:
                return InvalidRequest(
                    "the pool refused the query: it exceeds one of the pool's limits, or its filter compares more than "
                    f"{MAX_COMPARED:,} values",
                    "filter",
                )
            return InvalidRequest("the pool refused the query: it exceeds one of the pool's limits")
        case "lost" | "stale_epoch":
            return WorkerLost(f"the pool died with the query, {query.attempts} times")
        case "cancelled":
            return DeadlineExceeded("the query was cancelled")
        case _:
            return InternalError(f"the pool ended the query with status {status!r}")


@dataclass(frozen=True)
class QueueLimits:
    """Limits of a client's waiting. `retry_ns`: interval of reconnects to a lost pool. `wait_ns`: how long a query
    without a deadline waits for a pool while no query of its collection is answered. `parked`: maximum number of
    queries that wait for a pool."""

    retry_ns: int = 500_000_000
    wait_ns: int = 10_000_000_000
    parked: int = 1024
