"""From a text to the nearest passages: embed it, ask the pool, fetch the documents."""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from ipc import IpcError, SearchSpec, Stage
from runtime.errors import (
    CollectionReplaced,
    DeadlineExceeded,
    InvalidFilter,
    InvalidRequest,
    ModelError,
    Overloaded,
    TrinityError,
    Unavailable,
)
from runtime.retrieval.collection_registry import CollectionRegistry, KeywordSearch
from runtime.retrieval.embedding.embedder import Embedder, Vectors
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import MAX_BUILD_ATTEMPTS, NEW_ATTRIBUTE_WAIT_NS, Query, fuse_keywords

if TYPE_CHECKING:
    import zmq


# ---- embeds texts on threads of its own: a worker's loop goes on meanwhile
# Embedders that compute here share one thread, as they share the worker's cores; their libraries let go of the
# interpreter's lock. One that waits for a server has threads of its own, so that it holds up nobody else.


MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """A text's vector float32 [dim], or the error that ended it, and when (monotonic ns); what its words have found,
    if they were asked for."""

    ticket: int
    at_ns: int
    vector: Vectors | None = None
    error: TrinityError | None = None
    words: Neighbors | None = None


@dataclass(slots=True)
class _EmbeddingJob:
    ticket: int
    embedder: Embedder
    text: str
    by_words: KeywordSearch | None
    cancelled: bool = False


class _WorkerGroup:
    """Texts that wait for some threads, and these."""

    def __init__(self, limit: int, threads: int, run: Callable[["_WorkerGroup"], None]) -> None:
        self.waiting: queue.Queue[_EmbeddingJob | None] = queue.Queue(limit)
        self.threads = [threading.Thread(target=run, args=(self,), name="embed", daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()


class EmbeddingThreads:
    """`put` texts, `poll` vectors. An error ends its text and no other; a text that hangs holds up those behind it,
    where the embedder computes here.

    `fileno` becomes readable when there is something to poll. At most `limit` texts wait for a thread; the end waits
    `end_s` for those that are being embedded.
    """

    def __init__(
        self, *, limit: int = MAX_WAITING, clock: Callable[[], int] = time.monotonic_ns, end_s: float = 1.0
    ) -> None:
        self._end_s = end_s
        self._clock = clock
        self._limit = limit
        self._lanes: dict[str, _WorkerGroup] = {}
        self._open: dict[int, _EmbeddingJob] = {}  # the asking thread's
        self._done: deque[EmbeddingResult] = deque()
        self._ended = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._bell

    def put(self, ticket: int, embedder: Embedder, text: str, by_words: KeywordSearch | None = None) -> None:
        """Have a text embedded, then its words searched for. Raises `Overloaded` when as many wait as may."""
        asked = _EmbeddingJob(ticket, embedder, text, by_words)
        try:
            self._lane(embedder).waiting.put_nowait(asked)
        except queue.Full:
            raise Overloaded(f"{self._limit} texts wait to be embedded, the limit; try again later") from None
        self._open[ticket] = asked

    def cancel(self, ticket: int) -> None:
        """It is not wanted any more, and does not come from `poll`. Unknown tickets are ignored."""
        asked = self._open.pop(ticket, None)
        if asked is not None:
            asked.cancelled = True

    def poll(self) -> list[EmbeddingResult]:
        """What has come since the last call, each ticket once. Never waits."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        found = []
        while self._done:  # the bell was read first: what comes behind it rings again
            embedded = self._done.popleft()
            if self._open.pop(embedded.ticket, None) is not None:
                found.append(embedded)
        return found

    def close(self) -> None:
        """End the threads, or leave those that hang to the process's end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        threads = [thread for lane in self._lanes.values() for thread in lane.threads]
        for lane in self._lanes.values():
            for _ in lane.threads:
                with contextlib.suppress(queue.Full):  # then they look at `_ended`, after the text that they have
                    lane.waiting.put_nowait(None)
        until = time.monotonic() + self._end_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            os.close(self._bell)

    def _lane(self, embedder: Embedder) -> _WorkerGroup:
        name = embedder.name if embedder.at_once > 1 else ""
        if name not in self._lanes:
            self._lanes[name] = _WorkerGroup(self._limit, embedder.at_once, self._run)
        return self._lanes[name]

    def _run(self, lane: _WorkerGroup) -> None:
        while (asked := lane.waiting.get()) is not None and not self._ended:
            if asked.cancelled:
                continue
            try:
                vector = asked.embedder.embed([asked.text])[0]
                at_ns = self._clock()
                words = None if asked.by_words is None else asked.by_words.search(vector)
                self._done.append(EmbeddingResult(asked.ticket, at_ns, vector, words=words))
            except TrinityError as error:
                self._done.append(EmbeddingResult(asked.ticket, self._clock(), error=error))
            except Exception as error:  # of a library we do not know: the next text may be fine
                failed = ModelError(f"the embedder {asked.embedder.name} failed: {error}")
                self._done.append(EmbeddingResult(asked.ticket, self._clock(), error=failed))
            os.eventfd_write(self._bell, 1)


@dataclass(frozen=True)
class RetrievalResult:
    """The answer to a query: its passages, nearest first, or the error that ended it.

    `embedded_ns`: when its vector was there. `build`: the identity of the collection's build that it is from; "" of one
    on other nodes, whose answer is `partial` without those of some.
    """

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None
    embedded_ns: int = 0
    build: str = ""
    partial: bool = False


_WARM_UP_NS = 5_000_000_000
_LOOK_MS = 10  # how often it is looked whether a pool tells of an attribute by now


@dataclass(frozen=True, slots=True)
class _Pending:
    ticket: int
    collection: str
    k: int
    stage: Stage
    deadline_ns: int
    text: str = ""
    build: str = ""
    embedder: str = ""
    wanted: bytes = b""
    hybrid: float = 0.0
    by_words: KeywordSearch | None = None
    words: Neighbors | None = None
    attempts: int = 0
    embedded_ns: int = 0


class Retriever:
    """Asks the pool for many texts at once without waiting: `ask` returns a ticket, `poll` brings what has come.

    Texts are embedded on threads of its own; one that is not embedded by its deadline ends then.
    """

    def __init__(
        self, library: CollectionRegistry, client: SearchClient, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.library = library
        self.client = client
        self._clock = clock
        self._embedding = EmbeddingThreads(clock=clock)
        self._tickets = count(1)
        self._texts: dict[int, _Pending] = {}  # being embedded, by ticket
        self._early: list[tuple[_Pending, Vectors]] = []  # with attributes that no pool has told of yet
        self._searches: dict[int, _Pending] = {}  # in the pool, by the client's ticket

    def warm_up(self) -> None:
        """Embed with every embedder and search every collection once, so that first uses (compiled code, files, the
        session) are not a user's.

        Without a pool in time there is no warm-up: it may start later than its clients.
        """
        self.library.warm_up()
        end = self._clock() + _WARM_UP_NS
        waiting = set()
        for name, dim in self.library.dims.items():
            query = _Pending(next(self._tickets), name, 1, "decode", end)
            with suppress(TrinityError):  # what cannot be searched now may be later
                self._search(query, np.ones(max(dim, 1), np.float32))
                waiting.add(query.ticket)
        for name in self.client.remote:
            waiting.add(self.ask("a first text", name, 1, "decode", end))
        while waiting and self._clock() < end:
            waiting -= {found.ticket for found in self.poll()}
            self.sleep((), 10)
        for ticket in waiting:
            self.cancel(ticket)

    def ask(
        self,
        text: str,
        collection: str,
        k: int,
        stage: Stage,
        deadline_ns: int,
        build: str = "",
        wanted: bytes = b"",
        hybrid: float = 0.0,
    ) -> int:
        """Have a text embedded and the pool asked for it; an answer from this `build` alone is of use, if one is named,
        and only passages that pass the filter `wanted`. `hybrid`: the share of what its words find, 0 for none.

        Raises `Overloaded` when too many wait to be embedded,
        `UnknownCollection`, `Unavailable`, and `InvalidRequest` for a collection without texts."""
        query = _Pending(
            next(self._tickets), collection, k, stage, deadline_ns, text, build, wanted=wanted, hybrid=hybrid
        )
        if collection not in self.client.remote:
            self._embed(query)
        elif hybrid:  # ranks of different nodes say nothing of each other
            raise InvalidRequest(f"collection {collection!r} is on other nodes: they are asked without it", "hybrid")
        else:
            asked = self.client.submit(
                text, k, collection=collection, stage=stage, deadline_ns=deadline_ns, filter=wanted
            )
            self._searches[asked] = replace(query, embedded_ns=self._clock())
        return query.ticket

    def _embed(self, query: _Pending) -> None:
        """With the embedder of the build that the pools serve now. Raises as `ask` does."""
        self.library.follow(query.collection, self.client.identities(query.collection))
        embedder = self.library.embedder(query.collection)
        by_words = None
        if query.hybrid:
            by_words = self.library.by_words(
                query.collection, query.text, query.k, query.wanted, query.deadline_ns, query.build
            )
        self._embedding.put(query.ticket, embedder, query.text, by_words)
        self._texts[query.ticket] = replace(
            query, embedder=embedder.name, by_words=by_words, attempts=query.attempts + 1
        )

    def poll(self) -> list[RetrievalResult]:
        """What has come back since the last call; every ticket comes exactly once, unless it was cancelled."""
        found = self.take_vectors()
        for result in self.client.poll():
            query = self._searches.pop(result.ticket, None)
            if query is None:
                continue  # cancelled, and answered all the same
            if result.error is not None:
                found += self._again(query, result.error)
                continue
            try:
                if query.words is not None:
                    result = fuse_keywords(result, query.words, query.k, query.hybrid)
                remote = query.collection in self.client.remote
                passages = result.passages if remote else self.library.passages(query.collection, result)
                found.append(
                    RetrievalResult(
                        query.ticket, passages, None, query.embedded_ns, result.identity, partial=result.partial
                    )
                )
            except TrinityError as error:
                found += self._again(query, error)
        return found

    def _again(self, query: _Pending, error: TrinityError) -> list[RetrievalResult]:
        """What ends a query; nothing if it is asked once more, for its collection was replaced meanwhile."""
        if (
            isinstance(error, CollectionReplaced)
            and query.text
            and not query.build
            and query.attempts < MAX_BUILD_ATTEMPTS
        ):
            try:
                self._embed(query)
                return []
            except TrinityError as refusal:
                error = refusal
        return [RetrievalResult(query.ticket, error=error)]

    def take_vectors(self) -> list[RetrievalResult]:
        """Pass on to the pool what is embedded; what ended before that."""
        ended, (early, self._early), now = [], (self._early, []), self._clock()
        for query, vector in early:
            ended += self._pass_on(query, vector, now)
        for embedded in self._embedding.poll():
            query = replace(self._texts.pop(embedded.ticket), embedded_ns=embedded.at_ns, words=embedded.words)
            if embedded.vector is None:
                ended += self._again(query, embedded.error or ModelError("the embedder said nothing"))
            else:
                ended += self._pass_on(query, embedded.vector, now)
        for query in [query for query in self._texts.values() if query.deadline_ns <= now]:
            self.cancel(query.ticket)
            ended.append(RetrievalResult(query.ticket, error=DeadlineExceeded("its text was not embedded in time")))
        return ended

    def _pass_on(self, query: _Pending, vector: Vectors, now: int) -> list[RetrievalResult]:
        """Search, now or once pools tell of the attributes that a document has which was stored a moment ago. What ends
        the query."""
        try:
            self._search(query, vector)
        except InvalidFilter as error:
            until = min(query.deadline_ns, query.embedded_ns + NEW_ATTRIBUTE_WAIT_NS)
            if now >= until or not self.library.fits(query.collection, query.wanted):
                return [RetrievalResult(query.ticket, error=error)]
            self._early.append((query, vector))
        except TrinityError as error:
            return self._again(query, error)
        except IpcError as error:
            return [RetrievalResult(query.ticket, error=Unavailable(str(error)))]
        return []

    def _search(self, query: _Pending, vector: Vectors) -> None:
        """Send a vector to the pool. Raises `Overloaded` when there is no room for it."""
        k, build = query.k, query.build
        if query.by_words is not None:
            k, build = query.by_words.depth, query.by_words.identity
        pools = self.client.dispatcher
        spec = SearchSpec(
            query.collection, k, query.stage, None, pools.settings.search_width, None, query.deadline_ns, query.wanted
        )
        accept = self.library.accept(query.collection, query.embedder, build)
        question = Query(next(pools.tickets), vector, spec, accept=accept)
        pools.ask(question)
        self._searches[question.ticket] = query

    def cancel(self, ticket: int) -> None:
        """Forget a query."""
        if self._texts.pop(ticket, None) is not None:
            self._embedding.cancel(ticket)
        self._early = [early for early in self._early if early[0].ticket != ticket]
        for search in [search for search, query in self._searches.items() if query.ticket == ticket]:
            del self._searches[search]
            self.client.cancel(search)

    def sleep(self, sockets: "Sequence[zmq.Socket[bytes]]", timeout_ms: int) -> None:
        """Until there may be something to `poll`, one of `sockets` can be read, or the time is over."""
        self.client.sleep(
            (*sockets, self._embedding.fileno()), min(timeout_ms, _LOOK_MS) if self._early else timeout_ms
        )

    def close(self) -> None:
        """End it all. What is outstanding never comes. Idempotent."""
        self._embedding.close()
        self.client.close()


def without_text(passages: Iterable[Passage]) -> tuple[Passage, ...]:
    """Without their texts: what a client is told of the passages that its answer uses."""
    return tuple(structs.replace(passage, text="") for passage in passages)
