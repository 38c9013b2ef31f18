"""One retrieval as steps: embed the text, search the pools and for its words, fuse both, read the passages.

A generator yields what it waits for and is sent the outcome, so nothing here waits or knows a loop:

```
Future     of a thread: an embedded text, the results of a keyword search
Until      the same, until a time
Query      → the `SearchResult` of the pools
Read       a function that reads files, to be called where that delays nobody
PAUSE      until the pools have been polled again
```
`Retriever` runs the steps in the loop of a model worker, `AsyncRetriever` in an event loop.
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from runtime.errors import (
    CollectionError,
    CollectionReplaced,
    InternalError,
    InvalidFilter,
    InvalidRequest,
    TrinityError,
)
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RetrievingMetrics
from runtime.node.worker_config import SEARCH_WIDTH
from runtime.retrieval.collection_registry import CollectionRegistry, KeywordQuery
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.embedding.embedder import Vectors
from runtime.retrieval.embedding.stage import Embedded, EmbeddingStage
from runtime.retrieval.fair_threads import FairThreads
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import NO_TIMES, OnRead, Passage, SearchTimes, ignore_size
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import Query, SearchResult

MAX_BUILD_ATTEMPTS = 4
"""Maximum attempts of a retrieval whose collection is replaced by another build meanwhile."""
NEW_ATTRIBUTE_WAIT_NS = 2_000_000_000
"""How long a query waits for the pools to learn an attribute that its filter uses and that was stored just now."""
NO_DEADLINE = 1 << 62
PAUSE_MS = 10
PAUSE: Literal["pause"] = "pause"


@dataclass(frozen=True, slots=True)
class Read:
    """A function that reads files."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Until:
    """A future that is waited for until a time (monotonic ns): then it is cancelled, and `DeadlineExceeded` raised."""

    future: Future[Any]
    until_ns: int


Step = Future[Any] | Until | Query | Read | Literal["pause"]


class RetrievalResult(msgspec.Struct, frozen=True, eq=False):
    """The end of a retrieval: its passages, nearest first, or the error that ended it.

    `embedded_ns`: when its vector was ready. `build`: identity of the collection's build that the passages come from.
    `ranking` and `times`: see `FoundPassages`.
    """

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None
    embedded_ns: int = 0
    build: str = ""
    ranking: str = ""
    times: SearchTimes = NO_TIMES


Steps = Generator[Step, Any, RetrievalResult]


def ignore_embedded() -> None:
    """An `on_embedded` for a retrieval of which nobody wants that time."""


class RetrievalSteps:
    """The steps of all retrievals of a process, and the threads that they share in turns by API key.

    `embedding` has `threads` threads, and refuses a query that would wait for longer than `max_wait_ns` (0: any time).
    Keyword searches, whose filters may take long, have one thread.
    """

    def __init__(
        self,
        registry: CollectionRegistry,
        client: SearchClient,
        clock: Callable[[], int] = time.monotonic_ns,
        threads: int = 1,
        max_wait_ns: int = 0,
    ) -> None:
        self._registry, self._client, self._clock = registry, client, clock
        self.embedding = EmbeddingStage(threads, max_wait_ns=max_wait_ns, clock=clock)
        self._keywords = FairThreads(1, "keyword search")

    def report(self, table: WorkerTable) -> None:
        """Set the metrics of embedding."""
        now = self.embedding.statistics()
        table.total(RetrievingMetrics.TEXTS_EMBEDDED, now.embedded)
        table.total(RetrievingMetrics.TEXTS_REUSED, now.reused)
        table.total(RetrievingMetrics.EMBEDDING_BATCHES, now.batches)
        table.total(RetrievingMetrics.EMBEDDING_SECONDS, now.busy_s)
        table.total(RetrievingMetrics.EMBEDDING_WAIT_SECONDS, now.waited_s)
        table.set(RetrievingMetrics.TEXTS_WAITING, now.waiting)
        table.set(RetrievingMetrics.EMBEDDING_CACHE_BYTES, now.cache_bytes)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads; return whether all have ended. Idempotent."""
        return all([threads.close(timeout_s) for threads in (self._keywords, self.embedding)])

    def retrieve(
        self,
        query: Query,
        build: str = "",
        on_embedded: Callable[[], None] = ignore_embedded,
        on_read: OnRead = ignore_size,
    ) -> Steps:
        """Return the steps of a retrieval by text or vector, whose queries to the pools have the ticket of this one.

        `build`: accept results of this build only. `on_embedded` is called once, when the query's vector is ready, and
        `on_read` with the size of the passages. Raises `TrinityError`.
        """
        if query.hybrid and query.vector is not None:
            raise InvalidRequest("hybrid requires a text: use query instead of vector", "hybrid")
        attempts = 0
        while True:
            attempts += 1
            try:
                return (yield from self._retrieve(query, build, on_embedded, on_read))
            except CollectionReplaced:
                if build or attempts == MAX_BUILD_ATTEMPTS:
                    raise
            on_embedded = ignore_embedded

    def _retrieve(self, query: Query, build: str, on_embedded: Callable[[], None], on_read: OnRead) -> Steps:
        registry, collection, k, flow = self._registry, query.spec.collection, query.spec.k, query.spec.flow
        began_ns = self._clock()
        spec = query.spec
        if spec.search_width != SEARCH_WIDTH:
            spec = replace(spec, search_width=SEARCH_WIDTH)
        registry.follow(collection, self._client.identities(collection))
        while (opening := registry.opening(collection)) is not None:
            yield Read(opening.join)
            registry.follow(collection, self._client.identities(collection))
        embedder, vector, batched_ns, embedded_ns = "", query.vector, 0, began_ns
        ranking: Future[Neighbors] | None = None
        if vector is None:
            model, keywords = registry.embedder(collection), None
            if query.hybrid:
                until_ns = spec.deadline_ns or NO_DEADLINE
                keywords = registry.keyword_query(collection, query.text, k, spec.filter, until_ns, build)
                spec, build = replace(spec, k=keywords.depth), keywords.identity
            embedded: Embedded = yield self.embedding.submit(
                model, [query.text], flow=flow, part=spec.stage, deadline_ns=spec.deadline_ns
            )
            embedder, vector = model.name, embedded.vectors[0]
            batched_ns, embedded_ns = embedded.begin_ns, embedded.end_ns
            if keywords is not None:
                ranking = self._keywords.submit(flow, partial(_rank, keywords, vector))
        on_embedded()
        try:
            accept = registry.accept(collection, embedder, build)
            result = yield from self._search(Query(spec, vector, accept=accept, ticket=query.ticket), embedded_ns)
            if ranking is not None:
                by_words: Neighbors = yield ranking
                fuse = partial(registry.fuse, collection, result, by_words, k, query.hybrid)
                result = yield Read(fuse)  # the log of a collection
        finally:
            if ranking is not None:
                ranking.cancel()
        found_ns = self._clock()
        lookup = registry.lookup(collection, result)
        documents: Sequence[Document | None] | CollectionError | None = lookup.known(on_read, began_ns, found_ns)
        if documents is None:
            documents = yield Read(partial(lookup.read, on_read))
        passages = registry.found(collection, result, lookup, documents)
        times = SearchTimes(batched_ns, found_ns)
        return RetrievalResult(query.ticket, passages, None, embedded_ns, result.identity, times=times)

    def _search(self, query: Query, embedded_ns: int) -> Generator[Step, Any, SearchResult]:
        """Search the pools, once they know an attribute that a document stored a moment ago has."""
        spec = query.spec
        until_ns = min(spec.deadline_ns or NO_DEADLINE, embedded_ns + NEW_ATTRIBUTE_WAIT_NS)
        while True:
            try:
                result: SearchResult = yield query
                return result
            except InvalidFilter:
                known: bool = yield Read(partial(self._registry.has_attributes, spec.collection, spec.filter))
                if self._clock() >= until_ns or not known:
                    raise
            yield PAUSE


def _rank(keywords: KeywordQuery, vector: Vectors) -> Neighbors:
    try:
        return keywords.search(vector)
    except TrinityError:
        raise
    except Exception as error:
        raise InternalError(f"the keyword search failed: {error!r}") from error
