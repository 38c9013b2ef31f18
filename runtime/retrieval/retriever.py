"""Non-blocking retrieval for model workers: embed a text, search the pools, fetch the documents."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ipc import IpcError, SearchSpec, Stage
from runtime.errors import (
    CollectionReplaced,
    DeadlineExceeded,
    InternalError,
    InvalidFilter,
    InvalidRequest,
    ModelError,
    Overloaded,
    TrinityError,
    Unavailable,
)
from runtime.retrieval.collection_registry import CollectionRegistry, KeywordQuery
from runtime.retrieval.embedding.embedder import Embedder, Vectors
from runtime.retrieval.fair_queue import FairQueue
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import MAX_BUILD_ATTEMPTS, NEW_ATTRIBUTE_WAIT_NS, Query

if TYPE_CHECKING:
    import zmq


# ---- embedding threads
# All embedders that compute in this process share one thread, as they share the worker's cores; their libraries release
# the GIL. An embedder that waits for a server has threads of its own, so it delays no other. Keyword searches, whose
# filters may take long, have one, in turn by flow.


MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """A text's vector float32 [dim], or the error that ended it, and the time (monotonic ns); the results of its
    keyword search, if one was requested."""

    ticket: int
    at_ns: int
    vector: Vectors | None = None
    error: TrinityError | None = None
    keyword_results: Neighbors | None = None


@dataclass(slots=True)
class _EmbeddingJob:
    ticket: int
    embedder: Embedder
    text: str
    keywords: KeywordQuery | None
    flow: int
    cancelled: bool = False


class _WorkerGroup:
    """A queue of texts and the threads that serve it."""

    def __init__(self, limit: int, threads: int, run: Callable[["_WorkerGroup"], None]) -> None:
        self.waiting: queue.Queue[_EmbeddingJob | None] = queue.Queue(limit)
        self.threads = [threading.Thread(target=run, args=(self,), name="embed", daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()


class EmbeddingThreads:
    """Threads that embed texts, and then search for their words if requested: `submit` texts, `poll` vectors.

    An error ends only its own text. A text that hangs delays those behind it if the embedder computes in this process.
    `fileno` becomes readable when there is something to poll. At most `limit` texts wait for a thread; `close` waits
    `end_s` for those that are being embedded.
    """

    def __init__(
        self, *, limit: int = MAX_WAITING, clock: Callable[[], int] = time.monotonic_ns, end_s: float = 1.0
    ) -> None:
        self._end_s = end_s
        self._clock = clock
        self._limit = limit
        self._groups: dict[str, _WorkerGroup] = {}
        self._embedded: FairQueue[int, tuple[_EmbeddingJob, EmbeddingResult]] = FairQueue()  # to search for words
        self._changed = threading.Condition()  # of that queue
        self._keyword_thread: threading.Thread | None = None
        self._open: dict[int, _EmbeddingJob] = {}  # used by the submitting thread alone
        self._done: deque[EmbeddingResult] = deque()
        self._closed = False
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._doorbell

    def submit(
        self, ticket: int, embedder: Embedder, text: str, keywords: KeywordQuery | None = None, flow: int = 0
    ) -> None:
        """Queue a text for embedding, followed by its keyword search. Raises `Overloaded` if the queue is full."""
        job = _EmbeddingJob(ticket, embedder, text, keywords, flow)
        if keywords is not None and self._keyword_thread is None:
            self._keyword_thread = threading.Thread(target=self._search_keywords, name="keywords", daemon=True)
            self._keyword_thread.start()
        try:
            self._group(embedder).waiting.put_nowait(job)
        except queue.Full:
            raise Overloaded(f"{self._limit} texts wait to be embedded, the limit; try again later") from None
        self._open[ticket] = job

    def cancel(self, ticket: int) -> None:
        """Drop a text: `poll` does not return it. Unknown tickets are ignored."""
        job = self._open.pop(ticket, None)
        if job is not None:
            job.cancelled = True

    def poll(self) -> list[EmbeddingResult]:
        """Return what has finished since the last call, each ticket once. Never blocks."""
        try:
            os.eventfd_read(self._doorbell)
        except BlockingIOError:
            return []
        finished = []
        while self._done:  # after reading the doorbell: a later result rings again
            result = self._done.popleft()
            if self._open.pop(result.ticket, None) is not None:
                finished.append(result)
        return finished

    def close(self) -> None:
        """Stop the threads; those that hang end with the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        threads = [thread for group in self._groups.values() for thread in group.threads]
        for group in self._groups.values():
            for _ in group.threads:
                with suppress(queue.Full):  # then the thread checks `_closed` after its current text
                    group.waiting.put_nowait(None)
        with self._changed:
            self._changed.notify()
        threads += [self._keyword_thread] if self._keyword_thread is not None else []
        until = time.monotonic() + self._end_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            os.close(self._doorbell)

    def _group(self, embedder: Embedder) -> _WorkerGroup:
        name = embedder.name if embedder.max_concurrency > 1 else ""
        if name not in self._groups:
            self._groups[name] = _WorkerGroup(self._limit, embedder.max_concurrency, self._run)
        return self._groups[name]

    def _run(self, group: _WorkerGroup) -> None:
        while (job := group.waiting.get()) is not None and not self._closed:
            if job.cancelled:
                continue
            try:
                vector = job.embedder.embed([job.text])[0]
            except TrinityError as error:
                self._end(EmbeddingResult(job.ticket, self._clock(), error=error))
            except Exception as error:  # of a library we do not know: the next text may be fine
                failed = ModelError(f"the embedder {job.embedder.name} failed: {error}")
                self._end(EmbeddingResult(job.ticket, self._clock(), error=failed))
            else:
                embedded = EmbeddingResult(job.ticket, self._clock(), vector)
                if job.keywords is None:
                    self._end(embedded)
                    continue
                with self._changed:
                    self._embedded.push(job.flow, (job, embedded))
                    self._changed.notify()

    def _search_keywords(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._embedded))
                found = self._embedded.pop()
            if self._closed or found is None:
                return
            flow, (job, embedded) = found
            if job.cancelled or job.keywords is None or embedded.vector is None:
                continue
            begin_ns = time.monotonic_ns()
            try:
                results = job.keywords.search(embedded.vector)
            except TrinityError as error:
                self._end(EmbeddingResult(job.ticket, embedded.at_ns, error=error))
            except Exception as error:  # the thread serves all others
                failed = InternalError(f"the keyword search failed: {error!r}")
                self._end(EmbeddingResult(job.ticket, embedded.at_ns, error=failed))
            else:
                self._end(replace(embedded, keyword_results=results))
            with self._changed:
                self._embedded.charge(flow, time.monotonic_ns() - begin_ns)

    def _end(self, result: EmbeddingResult) -> None:
        self._done.append(result)
        os.eventfd_write(self._doorbell, 1)


# ---- the retriever


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
