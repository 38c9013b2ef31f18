"""A frontend with a collection of its own on disk, embedded by hashing, searched without a pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.integrations.client import CollectionClient
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.collection_search import HASHING, CollectionSearch
from tests.retrieval.test_reranking import ByLength

KEY = "a-key"
RARE = {"id": "rare", "text": "E1042", "vector": (-HASHING.embed(["E1042"], "query")[0]).tolist()}
"""A document with the vector opposite to its text's: only keyword search finds it."""


@contextmanager
def notes_node(directory: Path, reranking: Reranking | None = None) -> Iterator[str]:
    """Run a node with an empty collection `notes` that requires `KEY`; its URL."""
    create(directory, 64, degree=8)
    notes = CollectionSearch(directory)
    writes = WriterService({"notes": directory}, notes.embed, lambda name: HASHING)
    ranker = Ranker(reranking.name, 30.0) if reranking else Ranker()
    settings = Settings(collections={"notes": 64}, api_keys=(KEY,), ranker=ranker)
    with Cluster(settings=settings, search=notes, writes=writes, reranking=reranking) as cluster:
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
