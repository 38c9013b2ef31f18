"""A query and its result.

arguments ── `make_spec` ──▶ `Query`, one for each shard, kept until it has ended ──▶ `SearchResult`
"""

import numbers
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from ipc import STAGES, SearchSpec, Stage
from runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TrinityError, WorkerLost
from runtime.retrieval.attributes.filters import FilterLike, filter_bytes
from runtime.retrieval.neighbors import Neighbors, fuse_ranks, merge_neighbors
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.vectors import Vectors, check_finite, on_host

# ---- what a caller asks beside the vector, checked before any pool is known; a pool has limits of its own

_MOST = 65_535  # of k, top_m, search_width and patience: what a request's header holds
_LATEST_NS = (1 << 63) - 1
_LONGEST_MS = 86_400_000  # a deadline further away than a day is a mistake
MAX_BUILD_ATTEMPTS = 4
"""So often a search is made, as long as its collection is replaced by another build meanwhile."""
NEW_ATTRIBUTE_WAIT_NS = 2_000_000_000
"""So long it is waited for pools to tell of attributes that documents have which were stored a moment ago."""


def make_spec(
    k: Any,
    collection: Any,
    stage: Any,
    top_m: Any,
    search_width: Any,
    patience: Any,
    deadline_ns: Any = 0,
    wanted: FilterLike = None,
) -> SearchSpec:
    """Checked, integers of any kind as Python's own. Raises `InvalidRequest` that names the value and its limit."""
    k = _integer("k", k, 1, _MOST)
    if top_m is not None:
        top_m = _integer("top_m", top_m, 1, _MOST)
        if k > top_m:
            raise InvalidRequest(f"k is {k}, more than top_m, which is {top_m}: no more than those are kept", "k")
    if type(collection) is not str:
        raise InvalidRequest(f"collection must be a name, not {collection!r}", "collection")
    if stage not in STAGES:
        raise InvalidRequest(f"stage must be one of {STAGES}, not {stage!r}", "stage")
    return SearchSpec(
        collection,
        k,
        stage,
        top_m,
        _integer("search_width", search_width, 1, _MOST),
        None if patience is None else _integer("patience", patience, 1, _MOST),
        check_deadline(deadline_ns),
        filter_bytes(wanted),
    )


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise InvalidRequest(f"{name} must be an integer, not {value!r}", name) from None
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}, outside {least}..{most}", name)
    return int(value)  # not of a subclass


def check_deadline(deadline_ns: Any) -> int:
    """A deadline on the monotonic clock, checked. Raises `InvalidRequest`."""
    return _integer("deadline_ns", deadline_ns, 0, _LATEST_NS)


def deadline_after_ms(deadline_ms: Any) -> int:
    """`deadline_ms` from now on, on the monotonic clock in ns; 0 for none. Raises `InvalidRequest`."""
    if deadline_ms is None:
        return 0
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, numbers.Real):
        raise InvalidRequest(f"deadline_ms must be a number, not {deadline_ms!r}", "deadline_ms")
    number: Any = deadline_ms
    if not 0 < number <= _LONGEST_MS:
        raise InvalidRequest(f"deadline_ms is {deadline_ms}, outside 0..{_LONGEST_MS}", "deadline_ms")
    return time.monotonic_ns() + int(float(number) * 1e6)


@dataclass(frozen=True, slots=True)
class PassageQuery:
    """What passages are looked for: the `k` nearest to a text (`query`) or to a `vector`, of which one is set.

    Only passages that pass `wanted` are found. `hybrid`: the share of what a text's words find in the ranks, 0 for
    none.
    """

    collection: str
    k: int
    query: str | None = None
    vector: Sequence[float] | None = None
    stage: Stage = "prefill"
    wanted: FilterLike = None
    hybrid: float = 0.0


# ---- results, and batches of them

NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
NO_DISTANCES: npt.NDArray[np.float32] = np.empty(0, np.float32)


class SearchResult(msgspec.Struct, frozen=True, eq=False):
    """How a query ended. `ids` int64 and `distances` float32 [≤ k], nearest first, are empty unless it was answered.

    `extends` is the number of engine steps; `wait_ns` the time until it had a slot, `search_ns` the time in it; of a
    split collection, those of the slowest shard. `identity` names the build of the collection that the ids are of.

    A collection on other nodes has no rows here: its ids are -1, and `passages` name the documents; `partial` without
    those of nodes that are missing.
    """

    ticket: int
    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    extends: int = 0
    wait_ns: int = 0
    search_ns: int = 0
    error: TrinityError | None = None
    identity: str = ""
    passages: tuple[Passage, ...] = ()
    partial: bool = False

    def checked(self) -> "SearchResult":
        """Itself. Raises its error if it ended with one."""
        if self.error is not None:
            raise self.error
        return self


def failed_result(ticket: int, error: TrinityError) -> SearchResult:
    """The end of a query that was not answered."""
    return SearchResult(ticket, NO_IDS, NO_DISTANCES, error=error)


def fuse_keywords(result: SearchResult, words: Neighbors, k: int, share: float) -> SearchResult:
    """A search's result, `fuse_ranks` with what words have found."""
    ids, distances = fuse_ranks((result.ids, result.distances), words, k, share)
    return msgspec.structs.replace(result, ids=ids, distances=distances)


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


class ShardGather:
    """The parts of one query that were sent to all shards of a collection. It ends once: whole, or with an error.

    `whole` is the query that was split, `identity` that of the build whose shards are asked.
    """

    def __init__(self, whole: "Query", identity: str, k: int, shards: int) -> None:
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


# ---- a query as its client keeps it until it has ended, and how long it does


class SearchOptions(TypedDict, total=False):
    """What may be said of a search, beside its vector, k and deadline; see `SearchClient.submit`."""

    collection: str
    stage: Stage
    top_m: int | None
    search_width: int | None
    patience: int | None
    filter: FilterLike


AcceptBuild = Callable[[str], bool]
"""Whether an answer from a collection's build of this identity is of use."""


class Query(msgspec.Struct, eq=False):
    """One query, or one shard's part of it (`gather` has the whole then): all that is needed to ask once more.

    `at`: how many sessions have it and have not answered; more than one if it was asked again of another pool while the
    first is silent. `identity` is that of the build that answered it. `accept`: None for any. `text`: in the place of a
    vector, for other nodes.
    """

    ticket: int
    vector: Vectors  # one on a GPU as its caller has it: it can be asked again from there
    spec: SearchSpec
    parked_ns: int = 0  # since when it waits for a pool; 0: it does not
    shard: int = 0
    attempts: int = 0
    at: int = 0
    ended: bool = False  # what comes after that is of no use
    gather: ShardGather | None = None
    accept: AcceptBuild | None = None
    identity: str = ""
    text: str = ""


def status_error(status: str, query: Query) -> TrinityError:
    """What ends a question that its pool ended with this status."""
    match status:
        case "overloaded":
            return Overloaded("the pool's queue is full")
        case "deadline_exceeded":
            return DeadlineExceeded("the pool could not answer the query before its deadline")
        case "invalid_request":
            try:
                check_finite(on_host(query.vector))
            except InvalidRequest as error:
                return error
            return InvalidRequest("the pool refused the query: a limit of its own is passed")
        case "lost" | "stale_epoch":
            return WorkerLost(f"the pool died with the query, {query.attempts} times")
        case "cancelled":
            return DeadlineExceeded("the query was cancelled")
        case _:
            return InternalError(f"the pool ended the query with status {status!r}")


@dataclass(frozen=True)
class QueueLimits:
    """How long, and how many, a client of the pools has wait. `retry_ns`: a lost pool is tried again this often.
    `wait_ns`: a query without a deadline waits so long for one, while none of its collection is answered. `parked`: so
    many queries wait for a pool at once."""

    retry_ns: int = 500_000_000
    wait_ns: int = 10_000_000_000
    parked: int = 1024
