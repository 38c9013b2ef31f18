"""Writes to collections over HTTP: idempotent upserts and deletes, typed errors, durability over a restart."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.errors import CollectionError, InvalidRequest, NoRoom, Unavailable
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.embedder import Embedder, HashingEmbedder, ServerSpec, TextKind, Vectors
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.request_errors import assert_error

DIM = 16
HASHING = HashingEmbedder(DIM)


class Embeds:
    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        assert kind == "passage"
        return embedder.embed(texts, kind), 0


def embedder_of(name: str) -> Embedder:
    if name == "bare":
        raise InvalidRequest("built from vectors")
    return HASHING


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create(tmp_path / "notes", DIM, metric="l2", degree=8)
    create(tmp_path / "bare", DIM, metric="l2", degree=8)
    bulk_load.build(np.eye(DIM, dtype=np.float32), tmp_path / "sealed", degree=2)
    return tmp_path


@pytest.fixture
def writes(directory: Path) -> Iterator[WriterService]:
    made = WriterService({name: directory / name for name in ("notes", "bare", "sealed")}, Embeds().embed, embedder_of)
    yield made
    made.close()


@pytest.fixture
def http(writes: WriterService) -> Iterator[httpx.Client]:
    settings = Settings(collections={"notes": DIM, "bare": DIM, "sealed": DIM})
    with Cluster(settings=settings, writes=writes) as cluster, cluster.http() as http:
        yield http


def put(http: httpx.Client, *documents: dict[str, Any], name: str = "notes") -> httpx.Response:
    return http.put(f"/v1/collections/{name}/documents", json={"documents": documents})


def delete(http: httpx.Client, **asked: Any) -> httpx.Response:
    return http.request("DELETE", "/v1/collections/notes/documents", json=asked)


def held(path: Path) -> dict[str, str]:
    with CollectionReader(path) as reader:
        state = reader.state
        rows = [row for row in range(1000) if not state.deleted([row])[0]]
        return {document.id: document.text for document in state.documents(rows) if document is not None}


def test_documents_are_stored_replaced_and_deleted_by_id_or_by_filter(http: httpx.Client, directory: Path) -> None:
    first = {"id": "a", "text": "old", "attributes": {"tenant": "acme"}}
    assert put(http, first, {"id": "b", "text": "two", "attributes": {"tenant": "blue"}}).json() == {
        "object": "documents.stored", "collection": "notes", "count": 2, "visible": True,
    }  # fmt: skip
    for _ in range(2):  # once more is the same
        assert put(http, first | {"text": "new"}).json()["count"] == 1
    assert held(directory / "notes") == {"a": "new", "b": "two"}
    assert delete(http, ids=["a", "nobody"]).json() == {
        "object": "documents.deleted", "collection": "notes", "count": 1,
    }  # fmt: skip
    assert delete(http, ids=["a"]).json()["count"] == 0
    assert delete(http, filter={"type": "eq", "key": "tenant", "value": "blue"}).json()["count"] == 1
    assert held(directory / "notes") == {}


def test_a_document_without_a_vector_is_embedded_and_one_with_a_vector_is_not(
    http: httpx.Client, directory: Path
) -> None:
    vector = [1.0] + [0.0] * (DIM - 1)
    put(http, {"id": "a", "text": "some words"}, {"id": "b", "text": "some words", "vector": vector})
    with CollectionReader(directory / "notes") as reader:
        (text,) = HASHING.embed(["some words"], "passage")
        for query, row in ((text, 0), (vector, 1)):
            rows, _ = reader.search([query], k=1)  # type: ignore[arg-type]
            assert rows.tolist() == [[row]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": []}, "at least one element"),
        ({"documents": [{"id": "a"}] * 4097}, "documents has 4097 elements, the limit is 4096 per request"),
        ({"documents": [None]}, "documents[0] must be an object, not null"),
        ({"documents": [{"id": None}]}, "documents[0].id is missing"),
        ({"documents": [{"id": "a", "attributes": []}]}, "documents[0].attributes must be an object, not an array"),
        ({"documents": [{"id": "a", "attributes": {"x": None}}]}, "attribute 'x' is null"),
        ({"documents": [{"text": "no id"}]}, "documents[0].id is missing"),
        ({"documents": [{"id": "a", "texts": "?"}]}, "texts"),
        ({"documents": [{"id": "a"}, {"id": "a"}]}, "contains the id 'a' twice"),
        ({"documents": [{"id": "a", "vector": [1, 2]}]}, "have 16 dimensions"),
        ({"documents": [{"id": "a", "attributes": {"x": {}}}]}, "attribute 'x' is {}"),
        (
            {"documents": [{"id": "ok"}, {"id": "a", "attributes": {"n": "text"}}]},
            "document 'a': attribute 'n' is a string, 'text'; it was an integer before",
        ),
    ],
)
def test_invalid_documents_are_refused_by_name_and_none_of_their_batch_is_stored(
    http: httpx.Client, directory: Path, body: dict[str, Any], message: str
) -> None:
    put(http, {"id": "first", "text": "t", "attributes": {"n": 1}})
    refused = http.put("/v1/collections/notes/documents", json=body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert held(directory / "notes") == {"first": "t"}


def test_a_bulk_load_is_written_to_and_what_cannot_be_written_is_refused_with_the_reason(
    http: httpx.Client, directory: Path
) -> None:
    assert put(http, {"id": "a"}, name="none").status_code == 404
    assert put(http, {"id": "a", "text": "a"}, name="sealed").status_code == 200
    assert held(directory / "sealed")["a"] == "a"
    (directory / "notes").rename(directory / "moved")
    moved = put(http, {"id": "a"})
    assert (moved.status_code, moved.json()["error"]["code"]) == (503, "unavailable")
    assert "notes does not exist" in moved.json()["error"]["message"]
    (directory / "moved").rename(directory / "notes")
    assert "has no embedder" in put(http, {"id": "a"}, name="bare").json()["error"]["message"]
    with CollectionWriter(directory / "notes", background=False):
        busy = put(http, {"id": "a"})
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "collection_busy")
    assert put(http, {"id": "a"}).status_code == 200  # it is free again


@pytest.mark.parametrize("damaged", ["collection.json", "MANIFEST", "log"])
def test_a_damaged_collection_is_unavailable_to_writes_as_to_searches(
    http: httpx.Client, directory: Path, damaged: str
) -> None:
    with CollectionWriter(directory / "notes", embedder=HASHING, background=False) as writer:
        writer.upsert([UpsertDocument("b", "stored before")])
    path = directory / "notes" / damaged
    if path.is_dir():
        (path,) = path.iterdir()
    path.write_bytes(b"\0" * 30 + path.read_bytes()[30:])
    for refused in (
        put(http, {"id": "a", "text": "t"}),
        delete(http, ids=["a"]),
        http.post("/v1/collections/notes/flush"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]


def test_deleting_needs_ids_or_a_filter(http: httpx.Client) -> None:
    for asked in ({}, {"ids": ["a"], "filter": {"type": "eq", "key": "n", "value": 1}}):
        assert delete(http, **asked).json()["error"]["message"] == "set either ids or filter"
    assert delete(http, filter={"type": "eq", "key": "n", "value": 1}).json()["error"]["code"] == "invalid_filter"


def test_a_build_that_is_not_served_yet_gets_no_documents_with_the_vectors_of_another_embedder(
    http: httpx.Client, directory: Path
) -> None:
    shutil.rmtree(directory / "notes")
    create(directory / "notes", DIM, embedder=ServerSpec(name="words", dim=DIM, url="http://127.0.0.1:9/v1"))
    refused = put(http, {"id": "a", "text": "a text"})
    assert_error(refused, 503, "unavailable", None, "'notes' was built anew with the embedder words@")
    assert "and is served with hashing-16: reload it" in refused.text
    assert put(http, {"id": "a", "text": "a text", "vector": [1.0] * DIM}).status_code == 200


@pytest.mark.parametrize(("error", "kept"), [(NoRoom("full"), True), (CollectionError("the disk failed"), False)])
async def test_a_writer_reopens_after_a_failed_sync_and_continues_after_a_full_disk(
    writes: WriterService, monkeypatch: pytest.MonkeyPatch, error: CollectionError, kept: bool
) -> None:
    def fails(self: CollectionWriter, documents: object, owner: object) -> int:
        raise error

    await writes.upsert("notes", [UpsertDocument("a", "t")])
    with monkeypatch.context() as patch:
        patch.setattr(CollectionWriter, "upsert", fails)
        with pytest.raises(NoRoom if kept else Unavailable, match=error.message):
            await writes.upsert("notes", [UpsertDocument("b", "t")])
    assert ("notes" in await writes.states()) == kept
    assert (await writes.upsert("notes", [UpsertDocument("b", "t")])).count == 1


def test_a_delete_whose_filter_takes_long_delays_neither_writes_nor_the_state(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(http, *({"id": str(number), "attributes": {"n": number}} for number in range(8)))
    evaluating, released, real = threading.Event(), threading.Event(), Columns.matching

    def matching(self: Columns, *arguments: Any) -> Any:
        if not released.is_set():
            evaluating.set()
            assert released.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(Columns, "matching", matching)
    answers: list[httpx.Response] = []
    wanted = {"type": "lt", "key": "n", "value": 3}
    deletion = threading.Thread(target=lambda: answers.append(delete(http, filter=wanted)))
    deletion.start()
    try:
        assert evaluating.wait(60)
        assert put(http, {"id": "new", "attributes": {"n": 1}}).status_code == 200
        assert http.get("/v1/collections/notes").json()["documents"] == 9
        assert not answers
    finally:
        released.set()
        deletion.join(60)
    assert answers[0].json()["count"] == 4, "the documents at the time of the delete, the new one too"
