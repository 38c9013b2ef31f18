"""OpenAI's unmodified client uploads files, and makes, fills, searches and deletes vector stores."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.retrieval.stores.service import Stores
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster
from tests.frontend.request_errors import assert_error
from tests.frontend.store_node import store_node

LEAVE = b"# Leave\n\nParental leave is twelve weeks long.\n\n# Pay\n\nSalaries are paid on the last Friday."
TRAVEL = b"Trains are booked in the second class. Flights need the approval of a manager."


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with store_node(tmp_path) as cluster:
        yield cluster


def upload(client: openai.OpenAI, name: str = "leave.md", content: bytes = LEAVE) -> str:
    return client.files.create(file=(name, content), purpose="assistants").id


def wait_indexed(client: openai.OpenAI, store: str) -> None:
    eventually(lambda: client.vector_stores.retrieve(store).status == "completed", 60, "the files to be indexed")


def test_a_file_is_uploaded_listed_read_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    made = client.files.create(file=('Lëave "1".md', LEAVE), purpose="user_data")
    assert (made.filename, made.bytes, made.purpose, made.object) == ('Lëave "1".md', len(LEAVE), "user_data", "file")
    other = upload(client)
    assert [file.id for file in client.files.list()] == [other, made.id]
    assert [file.id for file in client.files.list(limit=1, order="asc")] == [made.id, other]
    assert [file.id for file in client.files.list(purpose="user_data")] == [made.id]
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == LEAVE
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [other]


def test_an_unknown_end_of_a_page_is_refused_by_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no file has the id 'file-none'") as refused:
        client.files.list(after="file-none")
    assert refused.value.param == "after"


def test_a_store_is_made_updated_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.vector_stores.create(
        name="HR", metadata={"team": "hr"}, expires_after={"anchor": "last_active_at", "days": 7}
    )
    assert (made.name, made.metadata, made.status, made.file_counts.total) == ("HR", {"team": "hr"}, "completed", 0)
    assert made.expires_at == made.created_at + 7 * 86_400
    changed = client.vector_stores.update(made.id, name="People", expires_after=None)
    assert (changed.name, changed.metadata, changed.expires_at) == ("People", {"team": "hr"}, None)
    other = client.vector_stores.create()
    assert [store.id for store in client.vector_stores.list()] == [other.id, made.id]
    assert [store.id for store in client.vector_stores.list(order="asc", limit=1)] == [made.id, other.id]
    assert client.vector_stores.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(other.id)
    assert client.vector_stores.retrieve(made.id) == changed


def test_a_store_that_is_deleted_while_stores_are_listed_is_left_out(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store_ids = client.vector_stores.create(), Stores.store_ids

    async def with_a_deleted_one(stores: Stores, tenant: str) -> list[str]:
        return ["vs_deleted", *await store_ids(stores, tenant)]

    monkeypatch.setattr(Stores, "store_ids", with_a_deleted_one)
    assert client.vector_stores.list(limit=2).data == [made]


def test_a_name_that_is_too_long_is_refused_with_its_length(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="name should have at most 256 characters, not 257"):
        client.vector_stores.create(name="x" * 257)


def test_too_many_or_wrong_metadata_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="metadata has 17 keys, the limit is 16"):
        client.vector_stores.create(metadata={str(number): "" for number in range(17)})
    with pytest.raises(openai.BadRequestError, match="metadata: 'a' must be a string, not a number"):
        client.vector_stores.create(metadata={"a": 1})  # type: ignore[dict-item]


def test_numbers_that_are_none_and_batches_that_are_too_long_are_refused_with_the_value(http: httpx.Client) -> None:
    store, json_type = http.post("/v1/vector_stores", json={}).json()["id"], {"Content-Type": "application/json"}
    body = '{"file_id": "file-1", "attributes": {"year": NaN}}'
    refused = http.post(f"/v1/vector_stores/{store}/files", content=body, headers=json_type)
    message = "attributes: 'year' is nan, which is not a number of 64 bits"
    assert_error(refused, 400, "invalid_request", "attributes", message)
    refused = http.post(f"/v1/vector_stores/{store}/file_batches", json={"file_ids": ["file-1"] * 2001})
    assert_error(refused, 400, "invalid_request", "file_ids", "file_ids should have at most 2000 items, not 2001")
    assert refused.json()["error"]["message"].endswith("not 2001")


def test_a_file_in_a_store_is_found_by_its_text_and_its_attributes(client: openai.OpenAI) -> None:
    store = client.vector_stores.create(file_ids=[upload(client)])
    travel = client.vector_stores.files.create_and_poll(
        upload(client, "travel.txt", TRAVEL), vector_store_id=store.id, attributes={"year": 2024, "public": True},
        poll_interval_ms=20,
    )  # fmt: skip
    assert (travel.status, travel.attributes, travel.last_error) == ("completed", {"year": 2024, "public": True}, None)
    wait_indexed(client, store.id)
    found = client.vector_stores.search(store.id, query="how long is parental leave").data
    assert found[0].filename == "leave.md"
    assert "twelve weeks" in found[0].content[0].text
    assert found[0].score >= found[1].score
    newer: Any = {"type": "gt", "key": "year", "value": 2023}
    assert {one.file_id for one in client.vector_stores.search(store.id, query="leave", filters=newer)} == {travel.id}
    older: Any = {"type": "lte", "key": "year", "value": 2023}
    assert not client.vector_stores.search(store.id, query="leave", filters=older).data
    with pytest.raises(openai.BadRequestError, match="'public' is compared with a boolean, which has no order"):
        client.vector_stores.search(store.id, query="leave", filters={"type": "gt", "key": "public", "value": True})
    text = client.vector_stores.files.content(travel.id, vector_store_id=store.id).data
    assert "".join(part.text or "" for part in text) == TRAVEL.decode()
    client.vector_stores.files.update(travel.id, vector_store_id=store.id, attributes={"year": "old"})
    wait_indexed(client, store.id)
    old: Any = {"type": "eq", "key": "year", "value": "old"}
    assert {one.file_id for one in client.vector_stores.search(store.id, query="leave", filters=old)} == {travel.id}
    assert client.vector_stores.files.update(travel.id, vector_store_id=store.id, attributes=None).attributes == {}
    wait_indexed(client, store.id)
    assert not client.vector_stores.search(store.id, query="leave", filters=old).data
    with pytest.raises(openai.BadRequestError, match="attributes is missing"):
        client.post(f"/vector_stores/{store.id}/files/{travel.id}", cast_to=object, body={})
    assert client.vector_stores.files.delete(travel.id, vector_store_id=store.id).deleted
    assert {one.filename for one in client.vector_stores.search(store.id, query="trains")} == {"leave.md"}
    assert [file.id for file in client.vector_stores.files.list(store.id)] == [
        one.id for one in client.files.list() if one.filename == "leave.md"
    ]


def test_the_kinds_of_text_that_openai_lists_are_read_in_its_encodings(client: openai.OpenAI) -> None:
    kinds = "c cpp cs css go java js json md php py rb sh tex ts txt html"
    texts = {f"a.{kind}": f"leave = 'twelve wëeks' in {kind}" for kind in kinds.split()}
    encodings = itertools.cycle(("utf-8", "utf-8-sig", "utf-16"))
    files = {upload(client, name, text.encode(next(encodings))): text for name, text in texts.items()}
    files[upload(client, "b.txt", b"\xfe\xff" + "wëeks".encode("utf-16-be"))] = "wëeks"
    files[upload(client, "c.txt", "wëeks".encode("utf-16-le"))] = "wëeks"
    store = client.vector_stores.create(file_ids=list(files)).id
    wait_indexed(client, store)
    read = {id: client.vector_stores.files.content(id, vector_store_id=store).data[0].text for id in files}
    assert read == files
    latin = upload(client, "d.txt", "wëeks".encode("latin-1"))
    failed = client.vector_stores.files.create_and_poll(latin, vector_store_id=store, poll_interval_ms=20)
    assert failed.last_error is not None
    assert (failed.status, failed.last_error.code) == ("failed", "invalid_file")


def test_a_search_finds_nothing_of_another_store(client: openai.OpenAI) -> None:
    one = client.vector_stores.create(file_ids=[upload(client)])
    other = client.vector_stores.create(file_ids=[upload(client, "travel.txt", TRAVEL)])
    for store in (one, other):
        wait_indexed(client, store.id)
    assert {found.filename for found in client.vector_stores.search(one.id, query="trains")} == {"leave.md"}
    assert {found.filename for found in client.vector_stores.search(other.id, query="leave")} == {"travel.txt"}
    client.vector_stores.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.search(one.id, query="leave")


def test_deleting_a_file_removes_it_from_every_store(client: openai.OpenAI) -> None:
    file = upload(client)
    stores = [client.vector_stores.create(file_ids=[file]) for _ in range(2)]
    for store in stores:
        wait_indexed(client, store.id)
    client.files.delete(file)
    for store in stores:
        assert not client.vector_stores.search(store.id, query="leave").data
        assert client.vector_stores.retrieve(store.id).file_counts.total == 0


def test_static_chunks_have_at_most_so_many_tokens_and_overlap(client: openai.OpenAI) -> None:
    words = " ".join(f"word{number}" for number in range(400))
    store = client.vector_stores.create()
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("long.txt", words.encode()), poll_interval_ms=20,
        chunking_strategy={"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 20}},
    )  # fmt: skip
    chunks = [part.text or "" for part in client.vector_stores.files.content(file.id, vector_store_id=store.id)]
    assert len(chunks) > 4
    assert all(len(chunk.split()) <= 100 for chunk in chunks)
    for before, after in itertools.pairwise(chunks):
        assert after.split()[0] in before.split()[-20:]
    assert file.chunking_strategy is not None
    assert file.chunking_strategy.type == "static"


def test_a_file_that_is_added_again_in_larger_chunks_has_no_passages_of_the_smaller_ones(client: openai.OpenAI) -> None:
    store = client.vector_stores.create(name="s")
    text = " ".join(f"Sentence number {number} of a long text." for number in range(2000))
    file = client.files.create(file=("long.txt", text.encode()), purpose="user_data")
    for tokens in (100, 4096):
        client.vector_stores.files.create_and_poll(
            file.id,
            vector_store_id=store.id,
            chunking_strategy={
                "type": "static",
                "static": {"max_chunk_size_tokens": tokens, "chunk_overlap_tokens": 0},
            },
        )
    found = client.vector_stores.search(store.id, query="Sentence number 1999", max_num_results=50).data
    count = len(client.vector_stores.files.content(file.id, vector_store_id=store.id).data)
    assert len({(result.model_extra or {})["id"] for result in found}) == count < 50


@pytest.mark.parametrize("name", ["cost centre", "ü\u2028/", "n" * 64])
def test_a_files_attribute_may_have_any_name_that_openai_allows(client: openai.OpenAI, name: str) -> None:
    store, file = client.vector_stores.create().id, upload(client)
    client.vector_stores.files.create(store, file_id=file, attributes={name: "v"})
    wait_indexed(client, store)
    for value, found in (("v", 1), ("w", 0)):
        equal: Any = {"type": "eq", "key": name, "value": value}
        files = {one.file_id for one in client.vector_stores.search(store, query="leave", filters=equal)}
        assert len(files) == found
    long: Any = {"type": "eq", "key": "n" * 65, "value": "v"}
    with pytest.raises(openai.BadRequestError, match="the name of an attribute, up to 64 characters"):
        client.vector_stores.search(store, query="leave", filters=long)


def test_a_file_without_an_attribute_passes_only_filters_that_exclude_values(client: openai.OpenAI) -> None:
    with_years, without = client.vector_stores.create().id, client.vector_stores.create(file_ids=[upload(client)]).id
    values: tuple[str | float | bool, ...] = (2024, "old", True)
    for number, value in enumerate(values):
        client.vector_stores.files.create(
            with_years, file_id=upload(client, f"{number}.md"), attributes={"year": value}
        )
    for store in (with_years, without):
        wait_indexed(client, store)

    def found(store: str, operator: str, value: Any, key: str = "year") -> set[str]:
        filters: Any = {"type": operator, "key": key, "value": value}
        return {one.filename for one in client.vector_stores.search(store, query="leave", filters=filters)}

    assert found(without, "eq", 2024) == found(without, "in", ["a"], "category") == set()
    assert found(without, "ne", 2024) == found(without, "nin", ["old"]) == {"leave.md"}
    assert found(with_years, "eq", 2024) == {"0.md"}
    assert found(with_years, "in", [2024, "old"]) == {"0.md", "1.md"}
    assert found(with_years, "nin", [2024, True]) == {"1.md"}
    assert found(with_years, "ne", "new") == {"0.md", "1.md", "2.md"}


def test_a_chat_retrieves_from_a_store_with_its_files_and_attributes(client: openai.OpenAI) -> None:
    store, other = client.vector_stores.create().id, client.vector_stores.create(file_ids=[upload(client)]).id
    file = upload(client)
    client.vector_stores.files.create(store, file_id=file, attributes={"year": 2024, "team": "hr"})
    client.vector_stores.files.create(store, file_id=upload(client, "old.md"), attributes={"year": 2020})
    for one in (store, other):
        wait_indexed(client, one)
    retrieval = {"collection": store, "filter": {"type": "gt", "key": "year", "value": 2023}}
    for stream in (False, True):
        chat: Any = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "leave say=1"}], stream=stream,
            extra_body={"retrieval": retrieval},
        )  # fmt: skip
        found = (next(iter(chat)) if stream else chat).retrieval
        assert found["collection"] == store
        assert {one["file_id"] for one in found["passages"]} == {file}
        assert found["passages"][0]["attributes"] == {"year": 2024, "team": "hr"}
    with pytest.raises(openai.NotFoundError, match="no vector store has the id"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "leave"}],
            extra_body={"retrieval": {"collection": "vs_none"}},
        )  # fmt: skip
