"""A frontend whose clients create vector stores in a real collection with hashing embeddings, without a pool."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import Unavailable
from runtime.node.stores_config import STORES, StoresSection
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import Embedder, HashingEmbedder, TextKind, Vectors
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.collection import ensure
from runtime.retrieval.stores.service import MAX_FILE_BYTES, Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.service import NoCollections, Settings
from tests.frontend.cluster import Cluster

HASHING = HashingEmbedder(64)


class StoreSearch(NoCollections):
    """Searches the collection of the stores as a pool does; embeds nothing while `paused`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[Query] = []
        self.paused = False

    async def search(  # type: ignore[override]
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        self.calls.append(query)
        assert query.spec.collection == STORES
        assert query.vector is None
        vector = HASHING.embed([query.text], "query")[0]
        with CollectionReader(self.directory) as reader:
            wanted = decode_filter(query.spec.filter)
            rows, distances = reader.search(np.array([vector], np.float32), query.spec.k, filter=wanted)
            found = reader.documents(rows[0][rows[0] >= 0].tolist())
        return [
            Passage(one.id, one.title, float(distance), one.text, one.attributes)
            for one, distance in zip(found, distances[0], strict=False)
            if one is not None
        ]

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        if self.paused:
            raise Unavailable("the embedder is paused")
        return embedder.embed(texts, kind), 0

    def summary(self, collection: str) -> CollectionSummary:
        return CollectionSummary(True, dim=64, metric="cosine", embedder="hashing-64")


@contextlib.contextmanager
def store_node(
    home: Path,
    settings: Settings | None = None,
    clock: Callable[[], float] = time.time,
    search: StoreSearch | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    **limits: Any,
) -> Iterator[Cluster]:
    """Run a frontend whose stores are in a directory."""
    section = StoresSection(path=str(home), **limits)
    ensure(home / "collection", "hashing-64")
    search = search or StoreSearch(home / "collection")
    catalogue = Catalogue(home / "catalogue.sqlite")
    writes = WriterService({STORES: home / "collection"}, search.embed, lambda _: HASHING)
    stores = Stores(section, catalogue, writes, lambda: HASHING, clock, max_file_bytes)
    try:
        settings = settings or Settings("tiny", {})
        with Cluster(settings=settings, search=search, catalogue=search, writes=writes, stores=stores) as cluster:
            yield cluster
    finally:
        writes.close()
        catalogue.close()
