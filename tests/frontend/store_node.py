"""A frontend whose clients create vector stores in a real collection with hashing embeddings, without a pool."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import Unavailable
from runtime.node.stores_config import STORES, StoresSection
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.collection import ensure
from runtime.retrieval.stores.configured import ConfiguredCollections
from runtime.retrieval.stores.service import MAX_FILE_BYTES, Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.collection_search import HASHING, CollectionSearch


class StoreSearch(CollectionSearch):
    """Searches the collection of the stores; embeds nothing while `paused`."""

    paused = False

    async def search(  # type: ignore[override]
        self, asked: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        assert (asked.spec.collection, asked.vector) == (STORES, None)
        assert asked.spec.filter, "a tenant finds its own"
        return await super().search(asked, on_embedded=on_embedded, on_read=on_read, timeout_s=timeout_s)

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        if self.paused:
            raise Unavailable("the embedder is paused")
        return await super().embed(embedder, texts, kind, flow)


@contextlib.contextmanager
def store_node(
    home: Path,
    settings: Settings | None = None,
    clock: Callable[[], float] = time.time,
    search: StoreSearch | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    **limits: Any,
) -> Iterator[Cluster]:
    """Run a frontend whose stores are in a directory, and the collections of its settings below it, by name."""
    section = StoresSection(path=str(home), **limits)
    ensure(home / "collection", "hashing-64")
    search = search or StoreSearch(home / "collection")
    catalogue = Catalogue(home / "catalogue.sqlite")
    settings = settings or Settings("tiny", {})
    directories = {STORES: home / "collection"} | {name: home / name for name in settings.collections}
    writes = WriterService(directories, search.embed, lambda _: HASHING)
    configured = ConfiguredCollections(settings.collections, search.documents)
    stores = Stores(section, catalogue, writes, lambda _: HASHING, configured, clock, max_file_bytes)
    try:
        with Cluster(settings=settings, search=search, writes=writes, stores=stores) as cluster:
            yield cluster
    finally:
        writes.close()
        catalogue.close()
