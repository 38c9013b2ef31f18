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

from ipc import SearchSpec
from runtime.errors import (
    CollectionError,
    CollectionReplaced,
    InternalError,
    InvalidFilter,
    InvalidRequest,
    TrinityError,
    Unavailable,
)
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RetrievingMetrics
from runtime.node.worker_config import SEARCH_WIDTH
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Vectors
from runtime.retrieval.embedding.stage import Embedded, EmbeddingStage
from runtime.retrieval.fair_threads import FairThreads
from runtime.retrieval.neighbors import Neighbors, fuse_ranks
from runtime.retrieval.passages import NO_TIMES, OnRead, Passage, SearchTimes, check_size, ignore_size, size_of
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
            model, indexed = registry.embedder(collection), None
            if query.hybrid:
                indexed = registry.build_of(collection, build) if build else registry.current(collection)
                spec, build = replace(spec, k=registry.depth(k)), indexed.identity
            embedded: Embedded = yield self.embedding.submit(
                model, [query.text], flow=flow, part=spec.stage, deadline_ns=spec.deadline_ns
            )
            embedder, vector = model.name, embedded.vectors[0]
            batched_ns, embedded_ns = embedded.begin_ns, embedded.end_ns
            if indexed is not None:
                ranking = self._keywords.submit(flow, partial(search_keywords, indexed, query.text, vector, spec))
        on_embedded()
        try:
            accept = registry.accept(collection, embedder, build)
            result = yield from self._search(Query(spec, vector, accept=accept, ticket=query.ticket), embedded_ns)
            if ranking is not None:
                by_words: Neighbors = yield ranking
                fuse = partial(_fuse, registry.build_of(collection, result.identity), result, by_words, query)
                result = yield Read(fuse)  # the log of a collection
        finally:
            if ranking is not None:
                ranking.cancel()
        found_ns = self._clock()
        passages = yield from read_passages(registry, collection, result, on_read, began_ns, found_ns)
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


def search_keywords(build: CollectionDocuments, text: str, vector: Vectors, spec: SearchSpec) -> Neighbors:
    """Return what the words of a text find in a build, at most as many as the search of the pools. Raises
    `TrinityError`."""
    try:
        parsed = decode_filter(spec.filter) if spec.filter else None
        return build.search_keywords(text, vector, spec.k, parsed, spec.deadline_ns or NO_DEADLINE)
    except CollectionError as error:
        raise Unavailable(
            f"collection {spec.collection!r}: its keyword index cannot be searched: {error.message}"
        ) from error
    except TrinityError:
        raise
    except Exception as error:
        raise InternalError(f"the keyword search failed: {error!r}") from error


def _fuse(build: CollectionDocuments, result: SearchResult, by_words: Neighbors, query: Query) -> SearchResult:
    """Fuse a result of the pools with one of a keyword search in the same build. Raises `Unavailable`."""
    try:
        by_vector, by_words = build.align((result.ids, result.distances), by_words)
    except CollectionError as error:
        raise Unavailable(f"collection {query.spec.collection!r} is unavailable: {error.message}") from error
    ids, distances = fuse_ranks(by_vector, by_words, query.spec.k, query.hybrid)
    return replace(result, ids=ids, distances=distances)


def read_passages(
    registry: CollectionRegistry, collection: str, result: SearchResult, on_read: OnRead, since_ns: int, now_ns: int
) -> Generator[Read, Any, tuple[Passage, ...]]:
    """Return the steps to the passages of a search result, without those deleted since, and without title and text for
    a collection of bare vectors. Nothing is read if all are in memory: see `CollectionDocuments.get_known`.

    Raises `CollectionReplaced` if the result's build is closed, `Unavailable` if it cannot be read, `ResponseTooLarge`,
    and the errors of `on_read`.
    """
    build, rows = registry.build_of(collection, result.identity), [row for row in result.ids.tolist() if row >= 0]
    documents: Sequence[Document | None]
    try:
        if (known := build.get_known(rows, since_ns, now_ns)) is not None:
            documents, size = known
            check_size(size, len(rows))
            on_read(size)
        else:
            documents = yield Read(partial(build.get, rows, _counting(on_read, len(rows))))
    except CollectionError as error:
        raise registry.unreadable(collection, build, error) from error
    return tuple([
        Passage(document.id, document.title, distance, document.text, document.attributes)
        for document, distance in zip(documents, result.distances.tolist(), strict=False)
        if document is not None
    ])  # fmt: skip


def _counting(on_read: OnRead, wanted: int) -> Callable[[Document], None]:
    """Return a function that counts the size of the documents that it was called with. It raises `ResponseTooLarge` at
    the first too many."""
    size = 0

    def count(document: Document) -> None:
        nonlocal size
        size += size_of(document.id, document.title, document.text, document.attributes)
        check_size(size, wanted)
        on_read(size)

    return count
