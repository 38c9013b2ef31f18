"""OpenAI's client lists, shows, reads and deletes the files of a collection that `trinity index build` has built."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.ingestion.ingest import ingest
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.access import Access
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster, FakeSearch

HASHING = HashingEmbedder(64)
LEAVE = "hr/leave of all.md"
WEEKS, RETURN = (
    "Parental leave is twelve weeks long for all who work.",
    "They return in part time for as long as they like.",
)
ALL, ACME = "key-of-all", "key-of-acme"
SETTINGS = Settings(
    "tiny", {"docs": 64}, api_keys=(ALL, ACME), access={ACME: Access({"docs": AttributeBinding("tenant", "acme")})}
)


ABOUT = CollectionSummary(True, created_at=1_700_000_000, dim=64, metric="cosine")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("built")
    (home / "handbook" / "hr").mkdir(parents=True)
    (home / "handbook" / "hr" / "leave of all.md").write_text(f"# Leave\n\n{WEEKS}\n\n# Return\n\n{RETURN}")
    for number in range(4):
        (home / "handbook" / f"{number}.txt").write_text(f"Text {number}.")
    ingest([home / "handbook"], home / "docs", "hashing-64", HASHING, degree=2, passage_tokens=16)
    return home / "docs"


@pytest.fixture
def writes(built: Path, tmp_path: Path) -> Iterator[WriterService]:
    shutil.copytree(built, tmp_path / "docs")
    made = WriterService({"docs": tmp_path / "docs"}, FakeSearch().embed, lambda _: HASHING)
    yield made
    made.close()


@pytest.fixture
def cluster(writes: WriterService, tmp_path: Path) -> Iterator[Cluster]:
    with (
        closing(CollectionDocuments(tmp_path / "docs")) as opened,
        Cluster(settings=SETTINGS, search=FakeSearch(about=ABOUT, opened=opened), writes=writes) as made,
    ):
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client(ALL) as client:
        yield client


def counted(client: openai.OpenAI) -> int:
    return client.vector_stores.retrieve("docs").file_counts.total


def listed(client: openai.OpenAI, **options: Any) -> list[str]:
    return [file.id for file in client.vector_stores.files.list("docs", **options)]


def test_files_are_listed_shown_read_and_deleted(client: openai.OpenAI) -> None:
    files = client.vector_stores.files
    assert listed(client) == [LEAVE, "3.txt", "2.txt", "1.txt", "0.txt"]
    assert listed(client, limit=2, order="asc") == ["0.txt", "1.txt", "2.txt", "3.txt", LEAVE]
    assert listed(client, filter="completed") == listed(client)
    assert listed(client, filter="failed") == []
    assert counted(client) == 5
    leave = files.retrieve(LEAVE, vector_store_id="docs")
    assert (leave.id, leave.vector_store_id, leave.status, leave.created_at) == (LEAVE, "docs", "completed", 1.7e9)
    assert leave.attributes == {"source": LEAVE}
    texts = [part.text for part in files.content(LEAVE, vector_store_id="docs")]
    assert texts == [WEEKS, RETURN]
    assert files.delete(LEAVE, vector_store_id="docs").deleted
    assert listed(client) == ["3.txt", "2.txt", "1.txt", "0.txt"]
    assert counted(client) == 4
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError, match=r"no file of .* the id 'hr/leave of all\.md'"):
            call(LEAVE, vector_store_id="docs")
    with pytest.raises(openai.BadRequestError, match="no file 'x'"):
        listed(client, after="x")


def test_files_of_a_collection_that_every_pool_found_damaged_are_not_shown(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    cluster.search.unavailable_collections["docs"] = "documents.sqlite is damaged"
    files = client.with_options(max_retries=0).vector_stores.files
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.InternalServerError, match=r"'docs' is unavailable: documents\.sqlite is damaged"):
            call(LEAVE, vector_store_id="docs")
    with pytest.raises(openai.InternalServerError, match="is unavailable"):
        files.list("docs")
    cluster.search.unavailable_collections.clear()
    assert len(listed(client)) == 5


def test_a_key_for_a_part_of_the_collection_sees_no_list_of_all_files(cluster: Cluster) -> None:
    with cluster.client(ACME) as acme:
        for call in (
            lambda: acme.vector_stores.files.list("docs"),
            lambda: acme.vector_stores.files.retrieve(LEAVE, vector_store_id="docs"),
            lambda: acme.vector_stores.files.content(LEAVE, vector_store_id="docs"),
            lambda: acme.vector_stores.files.delete(LEAVE, vector_store_id="docs"),
        ):
            with pytest.raises(openai.PermissionDeniedError):
                call()
