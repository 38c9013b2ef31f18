"""A collection in a node: written to, searched, sealed and merged while its processes are killed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtime import SearchClient
from runtime.integrations.client import CollectionClient
from runtime.testing.waiting import eventually
from runtime.testing.writable_node import DIM, DOCUMENTS, FLUSH, WritableNode
from tests.e2e.load import WAIT_S
from tests.e2e.write_kills import KILLS, kill


def is_visible(http: httpx.Client, document: dict[str, Any]) -> bool:
    """Store a document; return what the response says: whether every pool has it. A pool that a busy machine has not
    run for a quarter of a second has not."""
    stored = http.put(DOCUMENTS, json={"documents": [document]}).json()
    visible = bool(stored.pop("visible"))
    assert stored == {"object": "documents.stored", "collection": "notes", "count": 1}
    return visible


@pytest.fixture(scope="module")
def writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritableNode]:
    with WritableNode(tmp_path_factory.mktemp("writable")) as writable:
        yield writable


def test_no_acknowledged_write_is_lost_and_no_deleted_document_returns_over_kills(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    kills: int = pytestconfig.getoption("--kills")
    told = kill(tmp_path, kills, say=print)
    assert told.wrong == []
    # The first four: the writer in a seal, the supervisor in a merge, the pool, the merge.
    assert list(told.kills)[: min(kills, len(KILLS))] == list(KILLS[:kills])
    assert told.acknowledged >= 30 * kills


def test_a_search_client_finds_written_documents_and_no_deleted_ones(writable: WritableNode) -> None:
    vectors = np.eye(DIM, dtype=np.float32)
    writer = CollectionClient(writable.url, "notes")
    with SearchClient.connect(writable.node.run_dir) as client:
        documents = [
            {"id": str(n), "text": "t", "vector": vectors[n].tolist(), "attributes": {"n": n}} for n in range(8)
        ]
        assert writer.upsert(documents) == 8
        eventually(lambda: len(client.search(vectors[0], 8).ids) == 8, WAIT_S, "a pool that is late to apply the write")
        first = int(client.search(vectors[0], 1).ids[0])
        assert client.search(vectors[3], 1).ids.tolist() == [first + 3]
        assert writer.delete(["3"]) == 1
        assert first + 3 not in client.search(vectors[3], 8).ids
        with httpx.Client(base_url=writable.url, timeout=60, trust_env=False) as http:
            below = {"filter": {"type": "lt", "key": "n", "value": 3}}
            assert http.request("DELETE", DOCUMENTS, json=below).json()["count"] == 3
        left = client.search(vectors[3], 8, filter={"type": "gte", "key": "n", "value": 0})
        assert sorted(row - first for row in left.ids) == [4, 5, 6, 7]


def test_a_search_after_the_response_to_a_visible_write_finds_the_new_version(writable: WritableNode) -> None:
    searches: list[tuple[str, dict[str, Any]]] = [
        ("/v1/retrieval", {"query": "lunch", "k": 1}),
        ("/v1/retrieval", {"query": "lunch", "k": 1, "filter": {"type": "gte", "key": "version", "value": 0}}),
        ("/v1/retrieval", {"query": "lunch", "k": 1, "hybrid": True}),
        ("/v1/vector_stores/notes/search", {"query": "lunch", "max_num_results": 1}),
    ]
    with httpx.Client(base_url=writable.url, timeout=60, trust_env=False) as http:
        for version in range(24):
            document = {"id": "menu", "text": "lunch", "attributes": {"version": version}}
            eventually(partial(is_visible, http, document), WAIT_S, "a pool that applies a write in time")
            path, body = searches[version % len(searches)]
            found = http.post(path, json=body).json()
            (passage,) = found["data"] if "data" in found else found["passages"]
            assert passage["attributes"] == {"version": version}
            if version % 10 == 5:
                http.post(FLUSH).raise_for_status()
