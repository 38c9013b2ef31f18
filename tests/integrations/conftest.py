"""A frontend with a collection of its own on disk, embedded by hashing, searched without a pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import UnknownCollection
from runtime.integrations.client import CollectionClient
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.keyword_search import KeywordSearch
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, HashingEmbedder, TextKind, Vectors
from runtime.retrieval.neighbors import fuse_ranks
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.query import Query
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.retrieval.test_reranking import ByLength

HASHING = HashingEmbedder(64)
KEY = "a-key"
RARE = {"id": "rare", "text": "E1042", "vector": (-HASHING.embed(["E1042"], "query")[0]).tolist()}
"""A document with the vector opposite to its text's: only keyword search finds it."""


class Notes:
    """The collection `notes`: search, embedder and summary."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def search(
        self, asked: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        text, k = asked.text, asked.spec.k
        wanted = decode_filter(asked.spec.filter) if asked.spec.filter else None
        query = np.asarray(HASHING.embed([text], "query"))
        with CollectionReader(self._directory) as reader:
            rows, distances = (one[0] for one in reader.search(query, k, filter=wanted))
            if asked.hybrid:
                by_words = KeywordSearch(reader.state).search_keywords(text, query[0], k, wanted, 1 << 62)
                rows, distances = fuse_ranks((rows, distances), by_words, k, asked.hybrid)
            found = reader.documents(rows[rows >= 0].tolist())
        return [
            Passage(one.id, one.title, float(distance), one.text, one.attributes)
            for one, distance in zip(found, distances, strict=False)
            if one is not None
        ]

    def summary(self, collection: str) -> CollectionSummary:
        return CollectionSummary(True, metric="cosine")

    def documents(self, collection: str) -> CollectionDocuments:
        raise UnknownCollection(collection)

    def embedders(self) -> dict[str, Embedder]:
        return {}

    async def embed(self, embedder: Embedder, texts: Any, kind: TextKind, flow: int) -> tuple[Vectors, int]:
        return embedder.embed(texts, kind), 0

    def missing(self) -> list[str]:
        return []

    def unavailable(self) -> dict[str, str]:
        return {}


@contextmanager
def notes_node(directory: Path, reranking: Reranking | None = None) -> Iterator[str]:
    """Run a node with an empty collection `notes` that requires `KEY`; its URL."""
    create(directory, 64, degree=8)
    notes = Notes(directory)
    writes = WriterService({"notes": directory}, notes.embed, lambda name: HASHING)
    ranker = Ranker(reranking.name, 30.0) if reranking else Ranker()
    settings = Settings(collections={"notes": 64}, api_keys=(KEY,), ranker=ranker)
    with Cluster(settings=settings, search=notes, catalogue=notes, writes=writes, reranking=reranking) as cluster:
        yield cluster.url
    writes.close()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The URL of a node without reranker."""
    with notes_node(tmp_path / "notes") as url:
        yield url


@pytest.fixture
def animals(url: str) -> None:
    """Two documents of the node."""
    client = CollectionClient(url, "notes", KEY)
    client.upsert([
        {"id": "cats", "text": "cats purr", "title": "Cats", "attributes": {"legs": 4}},
        {"id": "birds", "text": "birds sing", "attributes": {"legs": 2}},
    ])  # fmt: skip
    client.close()


@pytest.fixture
def ranked_url(tmp_path: Path) -> Iterator[str]:
    """The URL of a node whose reranker prefers long texts, with a near and a long document."""
    reranking = Reranking(ByLength(), 64, lambda outcome, pairs, seconds: None)
    with notes_node(tmp_path / "ranked", reranking) as url:
        client = CollectionClient(url, "notes", KEY)
        client.upsert([{"id": "near", "text": "cats purr"}, {"id": "long", "text": "birds sing in the morning"}])
        client.close()
        yield url
    reranking.close()
