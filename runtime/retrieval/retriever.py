"""Non-blocking retrieval for model workers: embed a text, search the pools, fetch the documents."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ipc import IpcError, SearchSpec, Stage
from runtime.errors import (
    CollectionReplaced,
    DeadlineExceeded,
    InvalidFilter,
    InvalidRequest,
    ModelError,
    TrinityError,
    Unavailable,
)
from runtime.retrieval.collection_registry import CollectionRegistry, KeywordQuery
from runtime.retrieval.embedding.embedder import Vectors
from runtime.retrieval.embedding_threads import EmbeddingThreads
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import MAX_BUILD_ATTEMPTS, NEW_ATTRIBUTE_WAIT_NS, Query

if TYPE_CHECKING:
    import zmq


@dataclass(frozen=True)
class RetrievalResult:
    """The end of a retrieval: its passages, nearest first, or the error that ended it.

    `embedded_ns`: when its vector was ready. `build`: identity of the collection's build that the passages come from;
    "" for a collection on other nodes, whose result is `partial` if some of these did not answer.
    """

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None
    embedded_ns: int = 0
    build: str = ""
    partial: bool = False


_WARM_UP_NS = 5_000_000_000
_ATTRIBUTE_POLL_MS = 10  # how often pools are checked for an attribute that they do not know yet


@dataclass(slots=True)
class _Retrieval:
    """A retrieval in progress: the request, then what is known of it so far."""

    ticket: int
    collection: str
    k: int
    stage: Stage
    deadline_ns: int
    text: str = ""
    build: str = ""
    filter: bytes = b""
    hybrid: float = 0.0
    flow: int = 0
    embedder: str = ""
    attempts: int = 0
    embedded_ns: int = 0
    keywords: KeywordQuery | None = None
    keyword_results: Neighbors | None = None


class Retriever:
    """Runs many retrievals at once without blocking: `submit` returns a ticket, `poll` returns what has ended.

    Texts are embedded on threads; a text that is not embedded by its deadline ends then. Tickets are the client's: a
    retrieval and its query have the same.
    """

    def __init__(
        self, registry: CollectionRegistry, client: SearchClient, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.registry = registry
        self.client = client
        self._clock = clock
        self._embedding = EmbeddingThreads(clock=clock)
        self._texts: dict[int, _Retrieval] = {}  # being embedded, by ticket
        self._awaiting_attributes: list[tuple[_Retrieval, Vectors]] = []  # the pools do not know their attributes yet
        self._searches: dict[int, _Retrieval] = {}  # in the pools, by ticket

    def warm_up(self) -> None:
        """Use every embedder and search every collection once, so that no user's request pays for first uses (compiled
        code, files, the session).

        Ends without warm-up if no pool is attached in time: a pool may start later than its clients.
        """
        self.registry.warm_up()
        end = self._clock() + _WARM_UP_NS
        waiting = set()
        for name, dim in self.registry.dims.items():
            retrieval = _Retrieval(next(self.client.dispatcher.tickets), name, 1, "decode", end)
            with suppress(TrinityError):  # it may become searchable later
                self._search(retrieval, np.ones(max(dim, 1), np.float32))
                waiting.add(retrieval.ticket)
        for name in self.client.remote:
            waiting.add(self.submit("a first text", name, 1, "decode", end))
        while waiting and self._clock() < end:
            waiting -= {found.ticket for found in self.poll()}
            self.sleep((), 10)
        for ticket in waiting:
            self.cancel(ticket)

    def submit(
        self,
        text: str,
        collection: str,
        k: int,
        stage: Stage,
        deadline_ns: int,
        build: str = "",
        filter: bytes = b"",
        hybrid: float = 0.0,
        flow: int = 0,
    ) -> int:
        """Start a retrieval of the `k` passages nearest to a text; return its ticket.

        `build`: accept results of this build only. `filter`: passages must pass it (`filter_bytes`). `hybrid`: weight
        of the keyword search, 0 for none. `flow`: of the API key, see `SearchSpec`. Raises `Overloaded` if too many
        texts wait to be embedded, `UnknownCollection`, `Unavailable`, and `InvalidRequest` for a collection without
        texts.
        """
        if collection not in self.client.remote:
            ticket = next(self.client.dispatcher.tickets)
            self._embed(_Retrieval(ticket, collection, k, stage, deadline_ns, text, build, filter, hybrid, flow))
        elif hybrid:  # ranks of different nodes are not comparable
            raise InvalidRequest(f"collection {collection!r} is on other nodes, without hybrid search", "hybrid")
        else:
            ticket = self.client.submit(
                text, k, collection=collection, stage=stage, deadline_ns=deadline_ns, filter=filter
            )
            retrieval = _Retrieval(ticket, collection, k, stage, deadline_ns, embedded_ns=self._clock())
            self._searches[ticket] = retrieval
        return ticket

    def _embed(self, retrieval: _Retrieval) -> None:
        """Submit the text to the embedder of the build that the pools serve now. Raises as `submit`."""
        collection, keywords = retrieval.collection, None
        self.registry.follow(collection, self.client.identities(collection))
        embedder = self.registry.embedder(collection)
        if retrieval.hybrid:
            keywords = self.registry.keyword_query(
                collection, retrieval.text, retrieval.k, retrieval.filter, retrieval.deadline_ns, retrieval.build
            )
        self._embedding.submit(retrieval.ticket, embedder, retrieval.text, keywords, retrieval.flow)
        retrieval.embedder, retrieval.keywords = embedder.name, keywords
        retrieval.attempts += 1
        self._texts[retrieval.ticket] = retrieval

    def poll(self) -> list[RetrievalResult]:
        """Return what has ended since the last call; every ticket exactly once, unless it was cancelled."""
        ended = self.forward_embeddings()
        for result in self.client.poll():
            retrieval = self._searches.pop(result.ticket, None)
            if retrieval is None:
                continue  # cancelled, and answered nevertheless
            if result.error is not None:
                ended += self._retry(retrieval, result.error)
                continue
            try:
                if retrieval.keyword_results is not None:
                    result = self.registry.fuse(
                        retrieval.collection, result, retrieval.keyword_results, retrieval.k, retrieval.hybrid
                    )
                remote = retrieval.collection in self.client.remote
                passages = result.passages if remote else self.registry.passages(retrieval.collection, result)
            except TrinityError as error:
                ended += self._retry(retrieval, error)
                continue
            ended.append(
                RetrievalResult(
                    retrieval.ticket, passages, None, retrieval.embedded_ns, result.identity, partial=result.partial
                )
            )
        return ended

    def _retry(self, retrieval: _Retrieval, error: TrinityError) -> list[RetrievalResult]:
        """Start again if the collection was replaced meanwhile; otherwise end with the error."""
        if (
            isinstance(error, CollectionReplaced)
            and retrieval.text
            and not retrieval.build
            and retrieval.attempts < MAX_BUILD_ATTEMPTS
        ):
            try:
                self._embed(retrieval)
                return []
            except TrinityError as refusal:
                error = refusal
        return [RetrievalResult(retrieval.ticket, error=error)]

    def forward_embeddings(self) -> list[RetrievalResult]:
        """Send finished embeddings to the pools; return the retrievals that ended before that."""
        ended, (waiting, self._awaiting_attributes), now = [], (self._awaiting_attributes, []), self._clock()
        for retrieval, vector in waiting:
            ended += self._try_search(retrieval, vector, now)
        for embedded in self._embedding.poll():
            retrieval = self._texts.pop(embedded.ticket)
            retrieval.embedded_ns, retrieval.keyword_results = embedded.at_ns, embedded.keyword_results
            if embedded.vector is None:
                ended += self._retry(retrieval, embedded.error or ModelError("the embedder returned nothing"))
            else:
                ended += self._try_search(retrieval, embedded.vector, now)
        for retrieval in [retrieval for retrieval in self._texts.values() if retrieval.deadline_ns <= now]:
            self.cancel(retrieval.ticket)
            ended.append(RetrievalResult(retrieval.ticket, error=DeadlineExceeded("its text was not embedded in time")))
        return ended

    def _try_search(self, retrieval: _Retrieval, vector: Vectors, now: int) -> list[RetrievalResult]:
        """Search, now or once the pools know an attribute that a document stored a moment ago has. Return the end of
        the retrieval if it failed."""
        try:
            self._search(retrieval, vector)
        except InvalidFilter as error:
            until = min(retrieval.deadline_ns, retrieval.embedded_ns + NEW_ATTRIBUTE_WAIT_NS)
            try:
                if now >= until or not self.registry.has_attributes(retrieval.collection, retrieval.filter):
                    return [RetrievalResult(retrieval.ticket, error=error)]
            except InvalidFilter as present:  # the pools' schema is older than the documents
                return [RetrievalResult(retrieval.ticket, error=present)]
            self._awaiting_attributes.append((retrieval, vector))
        except TrinityError as error:
            return self._retry(retrieval, error)
        except IpcError as error:
            return [RetrievalResult(retrieval.ticket, error=Unavailable(str(error)))]
        return []

    def _search(self, retrieval: _Retrieval, vector: Vectors) -> None:
        """Send a vector to the pools. Raises `Overloaded` if the rings are full."""
        k, build = retrieval.k, retrieval.build
        if retrieval.keywords is not None:
            k, build = retrieval.keywords.depth, retrieval.keywords.identity
        pools = self.client.dispatcher
        spec = SearchSpec(
            retrieval.collection, k, retrieval.stage, None, pools.settings.search_width, None, retrieval.deadline_ns,
            retrieval.filter, retrieval.flow,
        )  # fmt: skip
        accept = self.registry.accept(retrieval.collection, retrieval.embedder, build)
        pools.submit(Query(retrieval.ticket, vector, spec, accept=accept))
        self._searches[retrieval.ticket] = retrieval

    def cancel(self, ticket: int) -> None:
        """Drop a retrieval: `poll` does not return it."""
        if self._texts.pop(ticket, None) is not None:
            self._embedding.cancel(ticket)
        self._awaiting_attributes = [waiting for waiting in self._awaiting_attributes if waiting[0].ticket != ticket]
        if self._searches.pop(ticket, None) is not None:
            self.client.cancel(ticket)

    def sleep(self, sockets: "Sequence[zmq.Socket[bytes]]", timeout_ms: int) -> None:
        """Wait until there may be something to `poll`, one of `sockets` is readable, or the timeout is over."""
        if self._awaiting_attributes:
            timeout_ms = min(timeout_ms, _ATTRIBUTE_POLL_MS)
        self.client.sleep((*sockets, self._embedding.fileno()), timeout_ms)

    def close(self) -> None:
        """Stop the threads and close the client; outstanding retrievals never end. Idempotent."""
        self._embedding.close()
        self.client.close()
