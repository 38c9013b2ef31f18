"""Routing of searches to local collections, in this node's pools, or to remote ones, on other nodes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runtime.node.remote_config import RemoteSection
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import OnRead, Passage, check_size, size_of
from runtime.retrieval.remote_collections import RemoteCollections
from runtime.retrieval.search.query import Query
from runtime.serving.http.service import CollectionCatalogue, SearchSource


class LocalCollections(SearchSource, CollectionCatalogue, Protocol):
    """The collections of this node."""


class CollectionRouter:
    """Routes searches of remote collections to their nodes, and all others to `local`."""

    def __init__(self, local: LocalCollections, sections: Sequence[RemoteSection]) -> None:
        """Raises `ConfigError` for an API key file that cannot be read."""
        self._local = local
        self.remote = RemoteCollections(sections)
        self.dims: Mapping[str, int] = dict.fromkeys(self.remote.by_name, 0)  # 0: the remote nodes check the length

    async def search(
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        """See `SearchSource`. Queries of a remote collection are embedded by its nodes; the stage ends at once here."""
        if query.spec.collection not in self.dims:
            return await self._local.search(query, on_embedded=on_embedded, on_read=on_read, timeout_s=timeout_s)
        on_embedded()
        found = await self.remote.search(query, timeout_s, on_read)
        size = sum(size_of(one.id, one.title, one.text, one.attributes) for one in found)
        check_size(size, len(found))
        on_read(size)
        return found

    def missing(self) -> list[str]:
        return self._local.missing()

    def unavailable(self) -> dict[str, str]:
        remote = {name: found.unavailable for name, found in self.remote.by_name.items()}
        return self._local.unavailable() | {name: reason for name, reason in remote.items() if reason}

    def summary(self, collection: str) -> CollectionSummary:
        remote = self.remote.by_name.get(collection)
        return self._local.summary(collection) if remote is None else remote.summary

    def embedders(self) -> Mapping[str, Embedder]:
        return self._local.embedders()

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        return await self._local.embed(embedder, texts, kind, flow)
