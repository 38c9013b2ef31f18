"""The collections that the frontend searches: the node's own, in its pools, and remote ones, on other nodes."""

from collections.abc import Callable, Mapping, Sequence

from runtime.node.remote_config import RemoteSection
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import Passage
from runtime.retrieval.remote_collections import RemoteCollections
from runtime.retrieval.search.query import PassageQuery
from runtime.serving.http.service import Catalogue, SearchSource


class CollectionRouter:
    """A `SearchSource` and a `Catalogue`: asks the nodes of a remote collection, and `own` for every other."""

    def __init__(self, own: SearchSource, catalogue: Catalogue, sections: Sequence[RemoteSection]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._own, self._catalogue = own, catalogue
        self.remote = RemoteCollections(sections)
        self.dims: Mapping[str, int] = dict.fromkeys(self.remote.by_name, 0)  # a vector's length is the nodes' to check

    async def search(self, asked: PassageQuery, *, on_embedded: Callable[[], None], timeout_s: float) -> list[Passage]:
        """See `SearchSource`. A remote collection's texts are embedded by its nodes; the stage stays here."""
        if asked.collection not in self.dims:
            return await self._own.search(asked, on_embedded=on_embedded, timeout_s=timeout_s)
        on_embedded()
        return await self.remote.search(asked, timeout_s)

    def missing(self) -> list[str]:
        return self._own.missing()

    def unavailable(self) -> dict[str, str]:
        remote = {name: found.unavailable for name, found in self.remote.by_name.items()}
        return self._own.unavailable() | {name: why for name, why in remote.items() if why}

    def summary(self, collection: str) -> CollectionSummary:
        remote = self.remote.by_name.get(collection)
        return self._catalogue.summary(collection) if remote is None else remote.summary

    def embedders(self) -> Mapping[str, Embedder]:
        return self._catalogue.embedders()

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> tuple[Vectors, int]:
        return await self._catalogue.embed(embedder, texts, kind)
