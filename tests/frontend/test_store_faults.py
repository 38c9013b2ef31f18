"""Uploads and indexing that are interrupted, refused or out of bounds leave nothing behind, or are resumed."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from runtime.errors import EXIT_BUSY, CollectionBusy, CollectionError, NoRoom
from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.stores import indexing
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.collection import ensure
from runtime.retrieval.stores.file_folder import FileFolder
from runtime.retrieval.stores.records import StoreFile
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.access import Access
from runtime.serving.http.multipart import FORM_BYTES
from runtime.serving.http.service import Settings
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import WAIT
from tests.frontend.store_node import StoreSearch, store_node
from tests.frontend.test_stores import LEAVE, upload, wait_indexed

BOUNDARY = "b0"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with store_node(tmp_path, max_file_bytes=1 << 20) as cluster:
        yield cluster


def post(cluster: Cluster, body: bytes, **headers: str) -> httpx.Response:
    head = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"} | headers
    return httpx.post(
        f"{cluster.url}/v1/files", content=body, headers=head, timeout=WAIT, trust_env=False, verify=False
    )


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    """A form of parts: (what follows the name, content)."""
    one = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name={head}\r\n\r\n".encode() + body for head, body in parts
    ]
    return b"\r\n".join(one) + f"\r\n--{BOUNDARY}".encode() + end


ANCHOR = ('"expires_after[anchor]"', b"created_at")
PURPOSE, FILE = ('"purpose"', b"assistants"), ('"file"; filename="a.txt"', b"abc")


def test_a_second_node_on_the_folder_of_another_is_refused_until_that_one_has_ended(tmp_path: Path) -> None:
    first = Catalogue(tmp_path / "catalogue.sqlite")
    with pytest.raises(CollectionBusy, match=rf"{tmp_path} has a writer already: process {os.getpid()}") as refused:
        Catalogue(tmp_path / "catalogue.sqlite")
    assert refused.value.exit_code == EXIT_BUSY
    first.close()
    Catalogue(tmp_path / "catalogue.sqlite").close()


def test_a_folder_that_cannot_be_created_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CollectionError, match=r"/file cannot be created: File exists"):
        ensure(tmp_path / "file" / "collection", "hashing-64")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (form(PURPOSE), 400, "the form has no file"),
        (form(FILE), 400, "purpose is ''"),
        (
            form(('"purpose"', b"fine-tune"), FILE),
            400,
            "purpose is 'fine-tune', supported are assistants and user_data",
        ),
        (form(PURPOSE, FILE, FILE), 400, "more than one file"),
        (form(PURPOSE, FILE, ('"other"', b"1")), 400, "unknown field 'other'"),
        (form(PURPOSE, FILE, end=b""), 400, "ends before its last boundary"),
        (b"", 400, "ends before its last boundary"),
        (form(PURPOSE, ('"file"; filename="a.txt"', b"x" * ((1 << 20) + 1))), 413, "the limit"),
        (form(('"purpose"', b"x" * (FORM_BYTES + 1)), FILE), 413, "without its file"),
        (form(PURPOSE, ANCHOR, ('"expires_after[seconds]"', b"000003600999999"), FILE), 400, "3600 to 2592000 seconds"),
        (form(PURPOSE, ANCHOR, ('"expires_after[seconds]"', b"9" * 5000), FILE), 400, "3600 to 2592000 seconds"),
        (form((f'"{"n" * 5000}"', b""), FILE), 400, "the head of a part"),
    ],
)
def test_a_bad_form_is_refused_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, body: bytes, status: int, message: str
) -> None:
    answer = post(cluster, body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
    assert not list((tmp_path / "files").iterdir())
    with cluster.client() as client:
        assert not client.files.list().data


def test_a_page_of_another_origin_cannot_upload(cluster: Cluster) -> None:
    refused = post(cluster, form(PURPOSE, FILE), origin="https://evil.example")
    assert refused.status_code == 403
    assert post(cluster, form(PURPOSE, FILE)).status_code == 200


def test_a_files_name_may_have_unicodes_line_separator(cluster: Cluster) -> None:
    made = post(cluster, form(PURPOSE, ('"file"; filename="a\u2028b\x85.txt"', b"abc")))
    assert (made.status_code, made.json()["filename"]) == (200, "ab.txt"), made.text


def test_a_file_of_any_cut_into_chunks_is_stored_as_it_was_sent(cluster: Cluster) -> None:
    content = b"\r\n--b1 \r\n-\r\n--b" + bytes(range(256))
    body = form(PURPOSE, ('"file"; filename="a.bin"', content))
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    for size in (1, 2, 3, 7, 64):
        parts = (body[at : at + size] for at in range(0, len(body), size))
        made = httpx.post(
            f"{cluster.url}/v1/files", content=parts, headers=headers, timeout=WAIT, trust_env=False, verify=False
        )
        assert made.status_code == 200, made.text
        got = httpx.get(
            f"{cluster.url}/v1/files/{made.json()['id']}/content", timeout=WAIT, trust_env=False, verify=False
        ).content
        assert got == content


def test_a_client_that_disconnects_within_its_upload_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.connect() as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
            f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode()
            + form(PURPOSE, FILE)[:-30]
        )
        eventually(lambda: list((tmp_path / "files").iterdir()), 60, "the upload to begin")
    eventually(lambda: not list((tmp_path / "files").iterdir()), 60, "the upload to be removed")


def test_what_a_killed_process_left_of_uploads_is_swept_and_others_uploads_are_not(tmp_path: Path) -> None:
    folder = FileFolder(tmp_path / "files")
    (tmp_path / "files" / "file-half.part").write_bytes(b"half")
    (tmp_path / "files" / "file-unrecorded").write_bytes(b"stored, but not acknowledged")
    with folder.upload("file-running") as running:
        running.write(b"1")
        with store_node(tmp_path) as cluster, cluster.client() as client:
            kept = upload(client)
            eventually(lambda: len(list((tmp_path / "files").iterdir())) == 2, 60, "the sweep")
            assert {path.name for path in (tmp_path / "files").iterdir()} == {kept, "file-running.part"}


def test_indexing_that_was_interrupted_is_continued_by_the_next_process(tmp_path: Path) -> None:
    search = StoreSearch(tmp_path / "collection")
    search.paused = True
    with store_node(tmp_path, search=search) as cluster, cluster.client() as client:
        store = client.vector_stores.create(file_ids=[upload(client)], name="kept").id
        status = client.vector_stores.retrieve(store)
        assert (status.status, status.file_counts.in_progress) == ("in_progress", 1)
    with store_node(tmp_path) as cluster, cluster.client() as client:
        eventually(lambda: client.vector_stores.retrieve(store).status == "completed", 60, "the file to be indexed")
        assert client.vector_stores.retrieve(store).name == "kept"
        assert client.vector_stores.search(store, query="leave").data


def test_what_ends_on_a_full_disk_is_recorded_once_there_is_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"put", "remove"}

    def unless_full(change: str) -> Any:
        done = getattr(Catalogue, change)

        def changed(catalogue: Catalogue, *record: Any) -> None:
            ends = change == "remove" or (isinstance(record[0], StoreFile) and record[0].status == "completed")
            if ends and change in full:
                full.discard(change)
                raise NoRoom("the disk is full")
            done(catalogue, *record)

        return changed

    for change in ("put", "remove"):
        monkeypatch.setattr(Catalogue, change, unless_full(change))
    with cluster.client() as client:
        file, store = upload(client), client.vector_stores.create().id
        client.vector_stores.files.create(store, file_id=file)
        wait_indexed(client, store)
        assert full == {"remove"}
        assert client.vector_stores.retrieve(store).file_counts.completed == 1
        assert client.vector_stores.delete(store).deleted
        assert not full


def test_passages_that_a_full_disk_keeps_are_deleted_once_there_is_room(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_where, full = WriterService.delete_where, [True]

    async def unless_full(*arguments: Any) -> int:
        if full:
            full.pop()
            raise NoRoom("the disk is full")
        return await delete_where(*arguments)

    monkeypatch.setattr(WriterService, "delete_where", unless_full)
    with cluster.client() as client:
        file, store = upload(client), client.vector_stores.create().id
        client.vector_stores.files.create(store, file_id=file)
        wait_indexed(client, store)
        assert client.vector_stores.files.delete(file, vector_store_id=store).deleted
        assert not full
        with CollectionReader(tmp_path / "collection") as reader:
            assert not reader.state.rows_of([f"{store}/{file}/0"])


def test_a_file_whose_content_fills_the_disk_can_be_deleted_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "0" * 20, "1" * 20
    access = {keys[1]: Access({"notes": AttributeBinding("tenant", "acme")})}
    transaction = Catalogue.transaction

    def unless_full(catalogue: Catalogue) -> Any:
        if any((tmp_path / "files").iterdir()):
            raise NoRoom("the disk is full")
        return transaction(catalogue)

    monkeypatch.setattr(Catalogue, "transaction", unless_full)
    settings = Settings("tiny", {"notes": 64}, api_keys=keys, access=access)
    with store_node(tmp_path, settings) as cluster, cluster.client(keys[0]) as owner, cluster.client(keys[1]) as other:
        file = upload(owner)
        with pytest.raises(openai.NotFoundError):
            other.files.delete(file)
        assert owner.files.content(file).read()
        assert owner.files.delete(file).deleted
        assert not owner.files.list().data
        assert not any((tmp_path / "files").iterdir())


def test_a_file_that_is_added_changed_and_removed_while_it_is_indexed_ends_in_the_last_state(cluster: Cluster) -> None:
    with cluster.client() as client:
        file, store = upload(client), client.vector_stores.create().id
        for number in range(10):
            client.vector_stores.files.create(store, file_id=file, attributes={"n": number})
            client.vector_stores.files.update(file, vector_store_id=store, attributes={"n": number, "last": True})
            if number < 9:
                client.vector_stores.files.delete(file, vector_store_id=store)
                assert not client.vector_stores.search(store, query="leave").data
        eventually(
            lambda: client.vector_stores.retrieve(store).file_counts.completed == 1, 60, "the file to be indexed"
        )
        both = [{"type": "eq", "key": "n", "value": 9}, {"type": "eq", "key": "last", "value": True}]
        last: Any = {"type": "and", "filters": both}
        assert client.vector_stores.search(store, query="leave", filters=last).data


def test_files_and_stores_expire_while_the_node_runs_and_are_removed_after_a_restart(tmp_path: Path) -> None:
    now, half_a_day = [1_000_000.0], 43_200
    with store_node(tmp_path, clock=lambda: now[0]) as cluster, cluster.client() as client:
        file = client.files.create(
            file=("a.txt", LEAVE), purpose="assistants", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert file.expires_at == 1_003_600
        store = client.vector_stores.create(
            file_ids=[upload(client)], expires_after={"anchor": "last_active_at", "days": 1}
        )
        for _ in range(3):  # a search prolongs it
            now[0] += half_a_day
            client.vector_stores.search(store.id, query="leave")
        assert client.vector_stores.retrieve(store.id).expires_at == now[0] + 2 * half_a_day
        now[0] += 2 * half_a_day
        assert client.vector_stores.retrieve(store.id).status == "expired"
        with pytest.raises(openai.BadRequestError, match="has expired"):
            client.vector_stores.search(store.id, query="leave")
    with store_node(tmp_path, clock=lambda: now[0]) as cluster, cluster.client() as client:
        assert client.vector_stores.retrieve(store.id).status == "expired"
        with pytest.raises(openai.BadRequestError, match="has expired"):
            client.vector_stores.search(store.id, query="leave")
        eventually(
            lambda: client.vector_stores.retrieve(store.id).file_counts.total == 0, 60, "the store to be emptied"
        )
        assert file.id not in {one.id for one in client.files.list()}


def test_what_follows_the_end_of_a_form_is_bounded(cluster: Cluster) -> None:
    refused = post(cluster, form(PURPOSE, FILE) + b"x" * 4 * FORM_BYTES)
    assert refused.status_code == 413
    assert "without its file" in refused.json()["error"]["message"]
    assert post(cluster, form(PURPOSE, FILE) + b"x" * 100).status_code == 200


def test_a_client_that_sends_its_upload_in_drops_is_ended_before_its_size_allows(tmp_path: Path) -> None:
    settings = Settings("tiny", {}, body_timeout_s=0.3)
    with store_node(tmp_path, settings) as cluster:
        with cluster.connect() as connection:
            connection.sendall(
                f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: {500 << 20}\r\n"
                f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode()
            )
            connection.setblocking(False)
            answer = b""

            def refused() -> bool:
                nonlocal answer
                with contextlib.suppress(BlockingIOError):
                    answer += connection.recv(1 << 16)
                if not answer:
                    with contextlib.suppress(ConnectionError):  # it has been ended since: the answer is there
                        connection.sendall(b"x")
                return bool(answer)

            eventually(refused, 30, "the upload to be ended")
        assert answer.startswith(b"HTTP/1.1 408"), answer


def test_content_that_is_deleted_while_it_is_requested_is_missing(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.client() as client:
        file = upload(client)
        (tmp_path / "files" / file).unlink()  # its record is removed first, but may have been read before
        with pytest.raises(openai.NotFoundError):
            client.files.content(file)


def test_a_file_that_is_removed_while_it_is_read_is_not_written_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "CONCURRENT_FILES", 1)  # the next file is indexed after it
    reading, removed, read = Event(), Event(), IsolatedReader.read

    def read_once_removed(reader: IsolatedReader, *file: Any) -> Any:
        reading.set()
        assert removed.wait(WAIT)
        return read(reader, *file)

    monkeypatch.setattr(IsolatedReader, "read", read_once_removed)
    with store_node(tmp_path) as cluster, cluster.client() as client:
        files, store, file = client.vector_stores.files, client.vector_stores.create().id, upload(client)
        files.create(store, file_id=file)
        assert reading.wait(WAIT)
        files.delete(file, vector_store_id=store)
        removed.set()
        next_file = files.upload_and_poll(vector_store_id=store, file=("next.md", LEAVE), poll_interval_ms=20)
        with CollectionReader(tmp_path / "collection") as reader:
            first_passages = [f"{store}/{id}/0" for id in (file, next_file.id)]
            assert [*reader.state.rows_of(first_passages)] == first_passages[1:]


def test_a_cancelled_file_that_is_added_again_at_once_keeps_its_new_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, added, deleting, written = Event(), Event(), Event(), Event()
    read, delete_where, upsert = IsolatedReader.read, WriterService.delete_where, WriterService.upsert

    def read_once_added_again(reader: IsolatedReader, *file: Any) -> Any:
        reading.set()
        assert added.wait(WAIT)
        return read(reader, *file)

    async def delete_late(*arguments: Any) -> int:
        deleting.set()
        await asyncio.to_thread(written.wait, 1.0)  # which it must not wait for
        return await delete_where(*arguments)

    async def write(*arguments: Any) -> Any:
        stored = await upsert(*arguments)
        written.set()
        return stored

    monkeypatch.setattr(IsolatedReader, "read", read_once_added_again)
    monkeypatch.setattr(WriterService, "delete_where", delete_late)
    monkeypatch.setattr(WriterService, "upsert", write)
    with store_node(tmp_path) as cluster, cluster.client() as client, ThreadPoolExecutor(1) as thread:
        files, store, file = client.vector_stores.files, client.vector_stores.create().id, upload(client)
        batch = client.vector_stores.file_batches.create(store, file_ids=[file])
        assert reading.wait(WAIT)
        cancelled = thread.submit(client.vector_stores.file_batches.cancel, batch.id, vector_store_id=store)
        assert deleting.wait(WAIT)
        files.create(store, file_id=file)
        added.set()
        assert files.poll(file, vector_store_id=store, poll_interval_ms=20).status == "completed"
        cancelled.result()
        with CollectionReader(tmp_path / "collection") as reader:
            assert [*reader.state.rows_of([f"{store}/{file}/0"])]
