"""From a text to the nearest passages: embed it, ask the pool, fetch the documents."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ipc import IpcError, Stage
from runtime.errors import (
    CollectionReplaced,
    DeadlineExceeded,
    ModelError,
    TrinityError,
    Unavailable,
)
from runtime.retrieval.embedding.embed_threads import EmbedThreads
from runtime.retrieval.library import Library
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.client import SearchClient

if TYPE_CHECKING:
    import zmq


@dataclass(frozen=True)
class Found:
    """The answer to a query: its passages, nearest first, or the error that ended it.

    `embedded_ns`: when its vector was there. `build`: the identity of the collection's build that it is from.
    """

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None
    embedded_ns: int = 0
    build: str = ""


_WARM_UP_NS = 5_000_000_000
_MAX_ATTEMPTS = 4  # to find a build that stays until it is asked


@dataclass(frozen=True, slots=True)
class _Query:
    ticket: int
    collection: str
    k: int
    stage: Stage
    deadline_ns: int
    text: str = ""
    build: str = ""
    embedder: str = ""
    wanted: bytes = b""
    attempts: int = 0
    embedded_ns: int = 0


class Retriever:
    """Asks the pool for many texts at once without waiting: `ask` returns a ticket, `poll` brings what has come.

    Texts are embedded on threads of its own; one that is not embedded by its deadline ends then.
    """

    def __init__(self, library: Library, client: SearchClient, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.library = library
        self.client = client
        self._clock = clock
        self._embedding = EmbedThreads(clock=clock)
        self._tickets = count(1)
        self._texts: dict[int, _Query] = {}  # being embedded, by ticket
        self._searches: dict[int, _Query] = {}  # in the pool, by the client's ticket

    def warm_up(self) -> None:
        """Embed with every embedder and search every collection once, so that first uses (compiled code, files, the
        session) are not a user's.

        Without a pool in time there is no warm-up: it may start later than its clients.
        """
        self.library.warm_up()
        end = self._clock() + _WARM_UP_NS
        waiting = set()
        for name, dim in self.library.dims.items():
            query = _Query(next(self._tickets), name, 1, "decode", end)
            with suppress(TrinityError):  # what cannot be searched now may be later
                self._search(query, np.ones(max(dim, 1), np.float32))
                waiting.add(query.ticket)
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
    ) -> int:
        """Have a text embedded and the pool asked for it; an answer from this `build` alone is of use, if one is named,
        and only passages that pass the filter `wanted`.

        Raises `Overloaded` when too many wait to be embedded,
        `UnknownCollection`, `Unavailable`, and `InvalidRequest` for a collection without texts."""
        query = _Query(next(self._tickets), collection, k, stage, deadline_ns, text, build, wanted=wanted)
        self._embed(query)
        return query.ticket

    def _embed(self, query: _Query) -> None:
        """With the embedder of the build that the pools serve now. Raises as `ask` does."""
        self.library.follow(query.collection, self.client.identities(query.collection))
        embedder = self.library.embedder(query.collection)
        self._embedding.put(query.ticket, embedder, query.text)
        self._texts[query.ticket] = replace(query, embedder=embedder.name, attempts=query.attempts + 1)

    def poll(self) -> list[Found]:
        """What has come back since the last call; every ticket comes exactly once, unless it was cancelled."""
        found = self.take_vectors()
        for result in self.client.poll():
            query = self._searches.pop(result.ticket, None)
            if query is None:
                continue  # cancelled, and answered all the same
            try:
                passages = self.library.passages(query.collection, result.checked())
                found.append(Found(query.ticket, passages, embedded_ns=query.embedded_ns, build=result.identity))
            except TrinityError as error:
                found += self._again(query, error)
        return found

    def _again(self, query: _Query, error: TrinityError) -> list[Found]:
        """What ends a query; nothing if it is asked once more, for its collection was replaced meanwhile."""
        if isinstance(error, CollectionReplaced) and query.text and not query.build and query.attempts < _MAX_ATTEMPTS:
            try:
                self._embed(query)
                return []
            except TrinityError as refusal:
                error = refusal
        return [Found(query.ticket, error=error)]

    def take_vectors(self) -> list[Found]:
        """Pass on to the pool what is embedded; what ended before that."""
        ended = []
        for embedded in self._embedding.poll():
            query = replace(self._texts.pop(embedded.ticket), embedded_ns=embedded.at_ns)
            try:
                if embedded.vector is None:
                    raise embedded.error or ModelError("the embedder said nothing")
                self._search(query, embedded.vector)
            except TrinityError as error:
                ended += self._again(query, error)
            except IpcError as error:
                ended.append(Found(query.ticket, error=Unavailable(str(error))))
        now = self._clock()
        for query in [query for query in self._texts.values() if query.deadline_ns <= now]:
            self.cancel(query.ticket)
            ended.append(Found(query.ticket, error=DeadlineExceeded("its text was not embedded in time")))
        return ended

    def _search(self, query: _Query, vector: npt.NDArray[np.float32]) -> None:
        """Send a vector to the pool. Raises `Overloaded` when there is no room for it."""
        ticket = self.client.submit(
            vector, query.k, stage=query.stage, deadline_ns=query.deadline_ns, collection=query.collection,
            filter=query.wanted, accept=self.library.accept(query.collection, query.embedder, query.build),
        )  # fmt: skip
        self._searches[ticket] = query

    def cancel(self, ticket: int) -> None:
        """Forget a query."""
        if self._texts.pop(ticket, None) is not None:
            self._embedding.cancel(ticket)
        for search in [search for search, query in self._searches.items() if query.ticket == ticket]:
            del self._searches[search]
            self.client.cancel(search)

    def sleep(self, sockets: "Sequence[zmq.Socket[bytes]]", timeout_ms: int) -> None:
        """Until there may be something to `poll`, one of `sockets` can be read, or the time is over."""
        self.client.sleep((*sockets, self._embedding.fileno()), timeout_ms)

    def close(self) -> None:
        """End it all. What is outstanding never comes. Idempotent."""
        self._embedding.close()
        self.client.close()
