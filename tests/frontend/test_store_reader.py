"""Files of clients are read by a process of their own, with limits."""

from pathlib import Path

import pytest

from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.ingestion.sections import ParsedFile, UnreadableFile
from runtime.retrieval.stores import indexing
from tests.frontend.store_node import store_node
from tests.frontend.test_stores import upload, wait_indexed

PAGE = (
    b"<html><title>Leave</title><body><h1>Leave</h1><p>Parental leave is twelve weeks.</p><script>x()</script></body>"
)


def fail_on(word: bytes, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading a file with this word fail."""

    class Reader(IsolatedReader):
        def read(self, name: str, content: bytes) -> ParsedFile:
            if word in content:
                self.close()
                raise error
            return super().read(name, content)

    monkeypatch.setattr(indexing, "IsolatedReader", Reader)


def test_a_page_is_indexed_without_its_markup_and_one_that_kills_its_reader_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(b"fatal", UnreadableFile("its reader ended with SIGSEGV"), monkeypatch)
    with store_node(tmp_path) as cluster, cluster.client() as client:
        store = client.vector_stores.create().id
        fatal, page = upload(client, "fatal.html", b"<p>fatal</p>"), upload(client, "page.HTML", PAGE)
        for file in (fatal, page):
            client.vector_stores.files.create(store, file_id=file)
        wait_indexed(client, store)
        failed = client.vector_stores.files.retrieve(fatal, vector_store_id=store)
        assert failed.last_error is not None
        assert (failed.status, failed.last_error.code) == ("failed", "invalid_file")
        assert failed.last_error.message == "its reader ended with SIGSEGV"
        (found,) = client.vector_stores.search(store, query="leave").data
        assert found.file_id == page
        assert "twelve weeks" in found.content[0].text
        assert "<p>" not in found.content[0].text
        assert "x()" not in found.content[0].text


def test_a_file_whose_reader_cannot_start_fails_with_a_reason_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(b"first", BlockingIOError("no room for another process"), monkeypatch)
    with store_node(tmp_path) as cluster, cluster.client() as client:
        store = client.vector_stores.create().id
        first, second = upload(client, "a.txt", b"the first"), upload(client, "b.md", b"# The second\n\nIt is read.")
        for file in (first, second):
            client.vector_stores.files.create(store, file_id=file)
        wait_indexed(client, store)
        failed = client.vector_stores.files.retrieve(first, vector_store_id=store)
        assert failed.last_error is not None
        assert (failed.status, failed.last_error.code) == ("failed", "server_error")
        assert client.vector_stores.files.retrieve(second, vector_store_id=store).status == "completed"
