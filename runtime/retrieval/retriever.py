"""From a text to the nearest passages: embed it, ask the pool, fetch the documents."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ipc import Stage
from runtime.errors import InvalidRequest, TrinityError, UnknownCollection
from runtime.node.placement import NodePlan
from runtime.retrieval.client import SearchClient
from runtime.retrieval.collection import Collection
from runtime.retrieval.embedder import Embedder, load_embedder
from runtime.retrieval.passages import Passage
from runtime.retrieval.results import SearchResult


@dataclass(frozen=True)
class Found:
    """The answer to a query: its passages, nearest first, or the error that ended it."""

    ticket: int
    passages: tuple[Passage, ...] = ()
    error: TrinityError | None = None


class Library:
    """The collections of a node as its clients see them: documents and embedders, but no search."""

    def __init__(self, plan: NodePlan, threads: int = 1) -> None:
        self._collections = {c.name: Collection.open(Path(c.path)) for c in plan.config.collections}
        embedders: dict[str, Embedder] = {}
        for collection in self._collections.values():
            name = collection.embedder_name
            if name and name not in embedders:
                embedders[name] = load_embedder(name, threads=threads)
        self._embedders = embedders

    def embed(self, collection: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Query vectors [n, d] in the collection's own embedding. Raises `InvalidRequest` if it has none."""
        name = self._named(collection).embedder_name
        if not name:
            raise InvalidRequest(f"collection {collection!r} was built from vectors: ask it with a vector", "query")
        return self._embedders[name].embed(list(texts))

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


class Retriever:
    """Asks the pool for many texts at once without waiting: `ask` returns a ticket, `poll` brings what has come."""

    def __init__(self, library: Library, client: SearchClient) -> None:
        self.library = library
        self.client = client
        self._collections: dict[int, str] = {}  # ticket → collection

    def warm_up(self, within_s: float = 5.0) -> None:
        """Search every collection once, so that first uses (compiled code, files, the session) are not a user's.

        Without a pool in time there is no warm-up: it may start later than its clients.
        """
        end = time.monotonic_ns() + int(within_s * 1e9)
        waiting = {
            self.ask(np.ones(dim, np.float32), name, 1, stage="decode", deadline_ns=end)
            for name, dim in self.library.dims.items()
        }
        while waiting and time.monotonic_ns() < end:
            waiting -= {found.ticket for found in self.poll()}
            self.client.sleep((), 10)
        for ticket in waiting:
            self.cancel(ticket)

    def ask(self, vector: npt.NDArray[np.float32], collection: str, k: int, stage: Stage, deadline_ns: int) -> int:
        """Send a query vector to the pool. Raises `Overloaded` when there is no room for it."""
        ticket = self.client.submit(vector, k, stage=stage, deadline_ns=deadline_ns, collection=collection)
        self._collections[ticket] = collection
        return ticket

    def poll(self) -> list[Found]:
        """What has come back since the last call; every ticket comes exactly once, unless it was cancelled."""
        found = []
        for result in self.client.poll():
            collection = self._collections.pop(result.ticket, None)
            if collection is None:
                continue  # cancelled, and answered all the same
            try:
                found.append(Found(result.ticket, self.library.passages(collection, result.checked())))
            except TrinityError as error:
                found.append(Found(result.ticket, error=error))
        return found

    def cancel(self, ticket: int) -> None:
        """Forget a query."""
        if self._collections.pop(ticket, None) is not None:
            self.client.cancel(ticket)
