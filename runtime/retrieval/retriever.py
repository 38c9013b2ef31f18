"""From a text to the nearest passages: embed it, ask the pool, fetch the documents."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ipc import IpcError, Stage
from runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    TrinityError,
    Unavailable,
    UnknownCollection,
)
from runtime.node.placement import NodePlan
from runtime.retrieval.client import SearchClient
from runtime.retrieval.collection import Collection
from runtime.retrieval.embed_thread import EmbedThread
from runtime.retrieval.embedder import Embedder, load_embedder
from runtime.retrieval.passages import Passage
from runtime.retrieval.results import SearchResult

if TYPE_CHECKING:
    import zmq


@dataclass(frozen=True)
class Found:
    """The answer to a query: its passages, nearest first, or the error that ended it.

    `embedded_ns`: when its vector was there.
    """

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None
    embedded_ns: int = 0


class Library:
    """The collections of a node as its clients see them: documents and embedders, but no search."""

    def __init__(self, plan: NodePlan, threads: int = 1, embedders: Mapping[str, Embedder] | None = None) -> None:
        """`embedders`: those that are loaded already, by name."""
        self._plan, self._threads = plan, threads
        self._collections = {c.name: Collection.open(Path(c.path)) for c in plan.config.collections}
        embedders = dict(embedders or {})
        for collection in self._collections.values():
            name = collection.embedder_name
            if name and name not in embedders:
                embedders[name] = load_embedder(name, threads=threads)
        self._embedders = embedders

    @classmethod
    def warm(cls, plan: NodePlan, threads: int = 1) -> "Library":
        """One whose embedders have all been used once."""
        library = cls(plan, threads)
        library.warm_up()
        return library

    def reopened(self) -> "Library":
        """The collections as they are on the disk by now: they may have been built anew. Close to no time is lost."""
        for collection in self._collections.values():
            collection.close()
        return Library(self._plan, self._threads, self._embedders)

    def embedder(self, collection: str) -> Embedder:
        """The collection's own. Raises `InvalidRequest` if it has none."""
        name = self._named(collection).embedder_name
        if not name:
            raise InvalidRequest(f"collection {collection!r} was built from vectors: ask it with a vector", "query")
        return self._embedders[name]

    def embed(self, collection: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Query vectors [n, d] in the collection's own embedding. Raises `InvalidRequest` if it has none."""
        return self.embedder(collection).embed(list(texts))

    def warm_up(self) -> None:
        """Use every embedder once."""
        for embedder in self._embedders.values():
            embedder.embed(["a first text"])

    @property
    def dims(self) -> dict[str, int]:
        """Vector length by collection."""
        return {name: collection.dim for name, collection in self._collections.items()}

    def passages(self, collection: str, result: SearchResult) -> tuple[Passage, ...]:
        """The documents of a search result; of a collection of bare vectors, passages without title and text."""
        rows = [int(row) for row in result.ids if row >= 0]
        documents = self._named(collection).documents
        if documents is None:
            texts = [(str(row), "", "") for row in rows]
        else:
            texts = [(found.id, found.title, found.text) for found in documents.get(rows)]
        return tuple(
            Passage(id, title, float(distance), text)
            for (id, title, text), distance in zip(texts, result.distances, strict=False)
        )

    def _named(self, collection: str) -> Collection:
        try:
            return self._collections[collection]
        except KeyError:
            known = ", ".join(sorted(self._collections)) or "none"
            raise UnknownCollection(
                f"no collection {collection!r} on this node; known: {known}", "collection"
            ) from None


@dataclass(frozen=True, slots=True)
class _Query:
    ticket: int
    collection: str
    k: int
    stage: Stage
    deadline_ns: int
    embedded_ns: int = 0


class Retriever:
    """Asks the pool for many texts at once without waiting: `ask` returns a ticket, `poll` brings what has come.

    Texts are embedded on a thread of its own; one that is not embedded by its deadline ends then.
    """

    def __init__(self, library: Library, client: SearchClient, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.library = library
        self.client = client
        self._clock = clock
        self._embedding = EmbedThread(clock=clock)
        self._tickets = count(1)
        self._texts: dict[int, _Query] = {}  # being embedded, by ticket
        self._searches: dict[int, _Query] = {}  # in the pool, by the client's ticket

    def warm_up(self, within_s: float = 5.0) -> None:
        """Embed with every embedder and search every collection once, so that first uses (compiled code, files, the
        session) are not a user's.

        Without a pool in time there is no warm-up: it may start later than its clients.
        """
        self.library.warm_up()
        end = self._clock() + int(within_s * 1e9)
        waiting = set()
        for name, dim in self.library.dims.items():
            query = _Query(next(self._tickets), name, 1, "decode", end)
            self._search(query, np.ones(dim, np.float32))
            waiting.add(query.ticket)
        while waiting and self._clock() < end:
            waiting -= {found.ticket for found in self.poll()}
            self.sleep((), 10)
        for ticket in waiting:
            self.cancel(ticket)

    def ask(self, text: str, collection: str, k: int, stage: Stage, deadline_ns: int) -> int:
        """Have a text embedded and the pool asked for it. Raises `Overloaded` when too many wait to be embedded,
        `UnknownCollection`, and `InvalidRequest` for a collection without texts."""
        query = _Query(next(self._tickets), collection, k, stage, deadline_ns)
        self._embedding.put(query.ticket, self.library.embedder(collection), text)
        self._texts[query.ticket] = query
        return query.ticket

    def poll(self) -> list[Found]:
        """What has come back since the last call; every ticket comes exactly once, unless it was cancelled."""
        found = self._take_vectors()
        for result in self.client.poll():
            query = self._searches.pop(result.ticket, None)
            if query is None:
                continue  # cancelled, and answered all the same
            try:
                passages = self.library.passages(query.collection, result.checked())
                found.append(Found(query.ticket, passages, embedded_ns=query.embedded_ns))
            except TrinityError as error:
                found.append(Found(query.ticket, error=error))
        return found

    def _take_vectors(self) -> list[Found]:
        """Pass on to the pool what is embedded; what ended before that."""
        ended = []
        for embedded in self._embedding.poll():
            query = replace(self._texts.pop(embedded.ticket), embedded_ns=embedded.at_ns)
            try:
                if embedded.vector is None:
                    raise embedded.error or ModelError("the embedder said nothing")
                self._search(query, embedded.vector)
            except TrinityError as error:
                ended.append(Found(query.ticket, error=error))
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
            vector, query.k, stage=query.stage, deadline_ns=query.deadline_ns, collection=query.collection
        )
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
