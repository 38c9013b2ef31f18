"""OpenAI's client uploads files into a collection of the node's configuration, beside those that a build has read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.ingestion.ingest import ingest
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.serving.http.access import Access
from runtime.serving.http.service import Settings
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster
from tests.frontend.collection_search import HASHING, CollectionSearch
from tests.frontend.store_node import StoreSearch, store_node
from tests.frontend.test_stores import LEAVE, TRAVEL, upload

ALL, WHOLE, OTHER, ACME = "key-of-all", "key-of-docs", "key-of-docs-and-more", "key-of-acme"
ACCESS = {
    WHOLE: Access({"docs": None}),
    OTHER: Access({"docs": None, "more": None}),
    ACME: Access({"docs": AttributeBinding("tenant", "acme")}),
}
SETTINGS = Settings("tiny", {"docs": 64}, api_keys=(ALL, *ACCESS), access=ACCESS)
BUILT = ["0.txt", "1.txt"]


class Docs(StoreSearch):
    """Searches the stores, and the collection `docs` beside them."""

    def __init__(self, home: Path, docs: CollectionDocuments) -> None:
        super().__init__(home / "collection")
        self._docs, self._search = docs, CollectionSearch(home / "docs")

    def documents(self, collection: str) -> CollectionDocuments:
        assert collection == "docs"
        return self._docs

    async def search(  # type: ignore[override]
        self, asked: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        search = self._search.search if asked.spec.collection == "docs" else super().search
        return await search(asked, on_embedded=on_embedded, on_read=on_read, timeout_s=timeout_s)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The directory of a node with the collection `docs` of the files `BUILT`."""
    (tmp_path / "handbook").mkdir()
    for name in BUILT:
        (tmp_path / "handbook" / name).write_text(f"The text of {name}.")
    ingest([tmp_path / "handbook"], tmp_path / "docs", "hashing-64", HASHING)
    return tmp_path


@pytest.fixture
def docs(home: Path) -> Iterator[Docs]:
    with closing(CollectionDocuments(home / "docs")) as opened:
        yield Docs(home, opened)


@pytest.fixture
def cluster(home: Path, docs: Docs) -> Iterator[Cluster]:
    with store_node(home, SETTINGS, search=docs) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client(ALL) as client:
        yield client


def listed(client: openai.OpenAI, **options: Any) -> list[str]:
    return [file.id for file in client.vector_stores.files.list("docs", **options)]


def found(client: openai.OpenAI, query: str, **options: Any) -> set[tuple[str, str]]:
    return {(one.file_id, one.filename) for one in client.vector_stores.search("docs", query=query, **options)}


def wait_indexed(client: openai.OpenAI) -> None:
    eventually(lambda: client.vector_stores.retrieve("docs").status == "completed", 60, "the files to be indexed")


def test_an_uploaded_file_is_one_of_the_collections_files(client: openai.OpenAI) -> None:
    files = client.vector_stores.files
    made = files.upload_and_poll(vector_store_id="docs", file=("leave.md", LEAVE), poll_interval_ms=20)
    assert (made.status, made.vector_store_id, made.last_error) == ("completed", "docs", None)
    assert made.usage_bytes > len(LEAVE)
    assert found(client, "parental leave", max_num_results=1) == {(made.id, "leave.md")}
    assert listed(client) == [made.id, *reversed(BUILT)]
    assert client.vector_stores.retrieve("docs").file_counts.to_dict() == {
        "in_progress": 0, "completed": 3, "failed": 0, "cancelled": 0, "total": 3,
    }  # fmt: skip
    assert files.retrieve(made.id, vector_store_id="docs") == made
    assert next(iter(files.list("docs"))) == made
    texts = [part.text or "" for part in files.content(made.id, vector_store_id="docs")]
    assert any("twelve weeks" in text for text in texts)
    assert files.delete(made.id, vector_store_id="docs").deleted
    assert found(client, "parental leave") == {(name, name) for name in BUILT}
    assert listed(client) == [*reversed(BUILT)]
    with pytest.raises(openai.NotFoundError, match="no file of the vector store"):
        files.retrieve(made.id, vector_store_id="docs")
    assert client.files.retrieve(made.id).filename == "leave.md"


def test_a_document_that_looks_like_a_passage_of_a_store_is_one_of_the_collection(client: openai.OpenAI) -> None:
    store = client.vector_stores.create().id
    made = client.vector_stores.files.upload_and_poll(vector_store_id=store, file=("secret.md", LEAVE))
    attributes = [{"store": "x"}, {"store": store, "file": made.id}]
    written = [{"id": f"vs_{at}", "text": "lantern", "attributes": had} for at, had in enumerate(attributes)]
    client.put("/collections/docs/documents", cast_to=object, body={"documents": written})
    results = client.vector_stores.search("docs", query="lantern", max_num_results=2)
    assert {one.file_id: (one.filename, one.attributes) for one in results} == {
        f"vs_{at}": (f"vs_{at}", had) for at, had in enumerate(attributes)
    }


def test_attributes_filter_a_search_of_the_collection_and_can_be_changed(client: openai.OpenAI) -> None:
    file = upload(client)
    client.vector_stores.files.create_and_poll(
        file, vector_store_id="docs", attributes={"year": 2024}, poll_interval_ms=20
    )
    year: dict[str, Any] = {"type": "eq", "key": "year", "value": 2024}
    assert found(client, "leave", filters=year) == {(file, "leave.md")}
    assert found(client, "leave", filters={"type": "eq", "key": "filename", "value": "leave.md"}) == {
        (file, "leave.md")
    }
    changed = client.vector_stores.files.update(file, vector_store_id="docs", attributes={"year": 2025})
    assert (changed.status, changed.attributes) == ("in_progress", {"year": 2025})
    wait_indexed(client)
    assert found(client, "leave", filters=year) == set()
    assert found(client, "leave", filters=year | {"value": 2025}) == {(file, "leave.md")}
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.update("0.txt", vector_store_id="docs", attributes={"year": 2024})


def test_a_batch_is_indexed_into_the_collection(client: openai.OpenAI) -> None:
    files = [upload(client), upload(client, "travel.txt", TRAVEL), upload(client, "bad.pdf", b"no document")]
    batches = client.vector_stores.file_batches
    batch = batches.create_and_poll("docs", file_ids=files, poll_interval_ms=20)
    assert (batch.file_counts.completed, batch.file_counts.failed, batch.file_counts.total) == (2, 1, 3)
    assert [one.id for one in batches.list_files(batch.id, vector_store_id="docs", order="asc")] == files
    failed = client.vector_stores.files.retrieve(files[2], vector_store_id="docs")
    assert failed.last_error is not None
    assert (failed.status, failed.last_error.code) == ("failed", "invalid_file")
    counts = client.vector_stores.retrieve("docs").file_counts
    assert (counts.completed, counts.failed, counts.total) == (4, 1, 5)
    assert found(client, "trains", max_num_results=1) == {(files[1], "travel.txt")}


def test_the_list_has_each_file_once_whatever_its_status_and_is_cut_into_pages(
    client: openai.OpenAI, docs: Docs
) -> None:
    done = client.vector_stores.files.upload_and_poll(vector_store_id="docs", file=("a.md", LEAVE), poll_interval_ms=20)
    bad = client.vector_stores.files.upload_and_poll(
        vector_store_id="docs", file=("bad.pdf", b"x"), poll_interval_ms=20
    )
    docs.paused = True
    client.vector_stores.files.update(done.id, vector_store_id="docs", attributes={"a": 1})  # its passages are there
    new = upload(client)
    batch = client.vector_stores.file_batches.create("docs", file_ids=[new])
    in_order = [*BUILT, done.id, bad.id, new]
    for limit in (1, 2, 3, 5):
        assert listed(client, limit=limit, order="asc") == in_order
        assert listed(client, limit=limit) == in_order[::-1]
    assert listed(client, filter="completed") == BUILT[::-1]
    assert listed(client, filter="failed") == [bad.id]
    assert listed(client, filter="in_progress") == [new, done.id]
    before = client.vector_stores.files.list("docs", before=new, limit=2, order="asc").data
    assert [file.id for file in before] == [done.id, bad.id]
    store = client.vector_stores.retrieve("docs")
    assert (store.status, store.file_counts.in_progress, store.file_counts.completed) == ("in_progress", 2, 2)
    content = client.vector_stores.files.content(new, vector_store_id="docs")
    assert any("twelve weeks" in (part.text or "") for part in content)
    assert client.vector_stores.file_batches.cancel(batch.id, vector_store_id="docs").status == "cancelled"
    assert listed(client, filter="cancelled") == [new]
    docs.paused = False
    wait_indexed(client)
    assert sorted(listed(client, filter="completed")) == sorted([*BUILT, done.id])
    assert not found(client, "weeks", filters={"type": "eq", "key": "source", "value": new})


def test_deleting_the_uploaded_file_removes_it_from_the_collection(client: openai.OpenAI) -> None:
    made = client.vector_stores.files.upload_and_poll(
        vector_store_id="docs", file=("leave.md", LEAVE), poll_interval_ms=20
    )
    client.files.delete(made.id)
    assert found(client, "parental leave") == {(name, name) for name in BUILT}
    assert listed(client) == BUILT[::-1]


def test_indexing_and_removal_that_were_interrupted_are_continued_by_the_next_process(home: Path, docs: Docs) -> None:
    with store_node(home, SETTINGS, search=docs) as cluster, cluster.client(ALL) as client:
        kept, gone = upload(client), upload(client, "gone.txt", TRAVEL)
        docs.paused = True
        client.vector_stores.files.create("docs", file_id=kept)
        client.vector_stores.files.create("docs", file_id=gone)
        client.files.delete(gone)
    docs.paused = False
    with store_node(home, SETTINGS, search=docs) as cluster, cluster.client(ALL) as client:
        wait_indexed(client)
        assert found(client, "parental leave", max_num_results=1) == {(kept, "leave.md")}
        assert listed(client) == [kept, *reversed(BUILT)]


def test_files_of_a_collection_that_is_not_configured_any_more_wait_until_it_is_again(home: Path, docs: Docs) -> None:
    without = Settings("tiny", {}, api_keys=(ALL,))
    with store_node(home, SETTINGS, search=docs) as cluster, cluster.client(ALL) as client:
        gone, kept = upload(client, "gone.txt", TRAVEL), upload(client)
        client.vector_stores.file_batches.create_and_poll("docs", file_ids=[gone], poll_interval_ms=20)
        docs.paused = True
        client.vector_stores.files.create("docs", file_id=kept)
    docs.paused = False
    with store_node(home, without, search=docs) as cluster, cluster.client(ALL) as client:
        client.files.delete(gone)
        with pytest.raises(openai.NotFoundError):
            client.vector_stores.files.create("docs", file_id=kept)
    with store_node(home, SETTINGS, search=docs) as cluster, cluster.client(ALL) as client:
        wait_indexed(client)
        eventually(lambda: listed(client) == [kept, *reversed(BUILT)], 60, "the passages to be deleted")
        eventually(
            lambda: not found(client, "trains", filters={"type": "eq", "key": "source", "value": gone}),
            60,
            "no passage to be found",
        )


def test_all_keys_of_the_whole_collection_share_its_files_but_not_the_uploads(cluster: Cluster) -> None:
    with cluster.client(WHOLE) as one, cluster.client(OTHER) as other, cluster.client(ACME) as acme:
        files = other.vector_stores.files
        made = one.vector_stores.files.upload_and_poll(
            vector_store_id="docs", file=("leave.md", LEAVE), poll_interval_ms=20
        )
        assert files.retrieve(made.id, vector_store_id="docs") == made
        assert files.update(made.id, vector_store_id="docs", attributes={"a": 1}).attributes == {"a": 1}
        wait_indexed(other)
        with pytest.raises(openai.NotFoundError, match="no file has the id"):
            files.create("docs", file_id=made.id)
        own = upload(acme)
        refused: Sequence[Callable[[], object]] = (
            lambda: acme.vector_stores.files.create("docs", file_id=own),
            lambda: acme.vector_stores.files.update(made.id, vector_store_id="docs", attributes={}),
            lambda: acme.vector_stores.files.delete(made.id, vector_store_id="docs"),
            lambda: acme.vector_stores.file_batches.create("docs", file_ids=[own]),
            lambda: acme.vector_stores.file_batches.retrieve("vsfb_0", vector_store_id="docs"),
        )
        for call in refused:
            with pytest.raises(openai.PermissionDeniedError):
                call()
        assert files.delete(made.id, vector_store_id="docs").deleted
        assert one.files.retrieve(made.id).filename == "leave.md"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"source": "x"}, "attribute 'source' of a file of collection 'docs' is set by the node"),
        ({"not a name": 1}, "'not a name' is not a valid name"),
    ],
)
def test_attributes_that_the_collection_cannot_have_are_refused(
    client: openai.OpenAI, attributes: dict[str, Any], message: str
) -> None:
    file = upload(client)
    with pytest.raises(openai.BadRequestError, match=message):
        client.vector_stores.files.create("docs", file_id=file, attributes=attributes)
    assert listed(client) == BUILT[::-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no embedder: files cannot be added to it"),
        ({"embedder": "hashing-64", "demanded": "tenant"}, "demands the attribute 'tenant' of every search"),
    ],
)
def test_a_collection_that_cannot_take_a_files_passages_refuses_it(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    bulk_load.ensure(tmp_path / "docs", 64, **options)
    with closing(CollectionDocuments(tmp_path / "docs")) as opened:
        settings = Settings("tiny", {"docs": 64})
        with store_node(tmp_path, settings, search=Docs(tmp_path, opened)) as cluster, cluster.client() as client:
            file = upload(client)
            with pytest.raises(openai.BadRequestError, match=message):
                client.vector_stores.files.create("docs", file_id=file)
