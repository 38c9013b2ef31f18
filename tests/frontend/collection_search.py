"""A search in the files of a collection, as a pool answers it, for the frontend."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search_keywords
from runtime.retrieval.embedding.embedder import Embedder, HashingEmbedder, TextKind, Vectors
from runtime.retrieval.neighbors import fuse_ranks
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.serving.http.service import NoCollections

HASHING = HashingEmbedder(64)


class CollectionSearch(NoCollections):
    """Searches one collection by texts, embedded by `HASHING`, and has them embedded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[Query] = []

    async def search(  # type: ignore[override]
        self, asked: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        self.calls.append(asked)
        text, k = asked.text, asked.spec.k
        wanted = decode_filter(asked.spec.filter) if asked.spec.filter else None
        query = np.asarray(HASHING.embed([text], "query"))
        with CollectionReader(self.directory) as reader:
            rows, distances = (one[0] for one in reader.search(query, k, filter=wanted))
            if asked.hybrid:
                by_words = search_keywords(reader.state, text, query[0], k, wanted, 1 << 62)
                rows, distances = fuse_ranks((rows, distances), by_words, k, asked.hybrid)
            found = reader.documents(rows[rows >= 0].tolist())
        return [
            Passage(one.id, one.title, float(distance), one.text, one.attributes)
            for one, distance in zip(found, distances, strict=False)
            if one is not None
        ]

    def summary(self, collection: str) -> CollectionSummary:
        return CollectionSummary(True, dim=64, metric="cosine", embedder="hashing-64")

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        return embedder.embed(texts, kind), 0
