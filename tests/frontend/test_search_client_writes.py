"""`SearchClient.upsert` and `delete`: over the node's HTTP, with the errors that it answers with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidDocument, InvalidFilter, InvalidRequest, TrinityError, Unauthorized, Unavailable
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.write_client import WriteClient
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.test_documents import DIM, Embeds


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    create(tmp_path / "notes", DIM, metric="l2", degree=8)
    return tmp_path / "notes"


@pytest.fixture
def url(notes: Path) -> Iterator[str]:
    writes = WriterService({"notes": notes}, Embeds().embed, lambda _: HashingEmbedder(DIM))
    settings = Settings(collections={"notes": DIM}, api_keys=("key",))
    with Cluster(settings=settings, writes=writes) as cluster:
        yield cluster.url
    writes.close()


def test_documents_are_stored_with_numpys_vectors_and_deleted_by_id_or_filter(url: str, notes: Path) -> None:
    writes = WriteClient(lambda: url, "key")
    vector = np.ones(DIM, np.float32)
    documents: list[dict[str, Any]] = [
        {"id": "a", "text": "one", "vector": vector, "attributes": {"year": np.int64(2024)}},
        {"id": "b", "text": "two", "attributes": {"year": 2025}},
        {"id": "c"},
    ]
    assert writes.upsert("notes", documents) == 3
    with CollectionReader(notes) as reader:
        assert reader.search(vector[None], 1)[0].tolist() == [[0]]
    assert writes.delete("notes", ["a", "nobody"], None) == 1
    assert writes.delete("notes", None, {"type": "eq", "key": "year", "value": 2025}) == 1


@pytest.mark.parametrize(
    ("key", "write", "error"),
    [
        ("key", lambda writes: writes.upsert("notes", [{"id": "a"}, {"id": "a"}]), InvalidDocument),
        ("key", lambda writes: writes.upsert("notes", {"id": "a"}), InvalidRequest),
        ("key", lambda writes: writes.upsert("notes", [{"id": "a", "vector": [float("nan")]}]), InvalidRequest),
        ("key", lambda writes: writes.upsert("notes", [{"id": "a", "attributes": {"x": object()}}]), InvalidRequest),
        ("key", lambda writes: writes.upsert("a/../b", [{"id": "a"}]), TrinityError),
        ("key", lambda writes: writes.delete("notes", "a", None), InvalidRequest),
        ("key", lambda writes: writes.delete("notes", None, {"type": "eq", "key": "x", "value": 1}), InvalidFilter),
        ("wrong", lambda writes: writes.delete("notes", ["a"], None), Unauthorized),
    ],
)
def test_errors_are_the_nodes_errors(
    url: str, key: str, write: Callable[[WriteClient], int], error: type[TrinityError]
) -> None:
    with pytest.raises(error):
        write(WriteClient(lambda: url, key))


def test_an_unreachable_node_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no response from the node"):
        WriteClient(lambda: "http://127.0.0.1:9").upsert("notes", [{"id": "a"}])


def test_a_client_without_a_node_url_raises_an_error() -> None:
    with (
        SearchClient([], "test") as client,
        pytest.raises(Unavailable, match=r"require a client from SearchClient\.connect"),
    ):
        client.upsert([{"id": "a"}], collection="notes")
