"""A key that is restricted to collections has files and stores of its own; what belongs to others does not exist."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.stores import service
from runtime.serving.http.access import Access
from runtime.serving.http.service import Settings
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster
from tests.frontend.store_node import store_node
from tests.frontend.test_stores import LEAVE

ALL, ACME, BLUE = "key-of-all", "key-of-acme", "key-of-blue"
SETTINGS = Settings(
    "tiny",
    {"notes": 64},
    api_keys=(ALL, ACME, BLUE),
    access={key: Access({"notes": AttributeBinding("tenant", key)}) for key in (ACME, BLUE)},
)


class Clients(NamedTuple):
    """OpenAI's client with each key."""

    operator: openai.OpenAI
    acme: openai.OpenAI
    blue: openai.OpenAI


@contextmanager
def clients_of(cluster: Cluster) -> Iterator[Clients]:
    with cluster.client(ALL) as operator, cluster.client(ACME) as acme, cluster.client(BLUE) as blue:
        yield Clients(operator, acme, blue)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.setattr(service, "MAX_STORES", 5)
    monkeypatch.setattr(service, "MAX_FILES", 6)
    with store_node(tmp_path, SETTINGS) as cluster, clients_of(cluster) as clients:
        yield clients


def completed(client: openai.OpenAI, store: str) -> Callable[[], bool]:
    return lambda: client.vector_stores.retrieve(store).file_counts.completed == 1


def test_a_tenant_sees_nothing_of_another(clients: Clients) -> None:
    operator, acme, blue = clients
    file = acme.files.create(file=("leave.md", LEAVE), purpose="assistants").id
    store = acme.vector_stores.create(file_ids=[file]).id
    batch = acme.vector_stores.file_batches.create(store, file_ids=[file]).id
    own = blue.vector_stores.create().id
    eventually(completed(acme, store), 60, "the file to be indexed")
    hidden: list[Callable[[], object]] = [
        lambda: blue.files.retrieve(file),
        lambda: blue.files.content(file),
        lambda: blue.files.delete(file),
        lambda: blue.vector_stores.retrieve(store),
        lambda: blue.vector_stores.update(store, name="mine"),
        lambda: blue.vector_stores.delete(store),
        lambda: blue.vector_stores.search(store, query="leave"),
        lambda: blue.vector_stores.files.list(store),
        lambda: blue.vector_stores.files.retrieve(file, vector_store_id=store),
        lambda: blue.vector_stores.files.content(file, vector_store_id=store),
        lambda: blue.vector_stores.files.update(file, vector_store_id=store, attributes={"a": 1}),
        lambda: blue.vector_stores.files.delete(file, vector_store_id=store),
        lambda: blue.vector_stores.files.create(own, file_id=file),
        lambda: blue.vector_stores.create(file_ids=[file]),
        lambda: blue.vector_stores.file_batches.retrieve(batch, vector_store_id=store),
        lambda: blue.vector_stores.file_batches.cancel(batch, vector_store_id=store),
        lambda: blue.vector_stores.file_batches.list_files(batch, vector_store_id=store),
        lambda: blue.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"retrieval": {"collection": store}}
        ),
        lambda: blue.vector_stores.list(after=store),
        lambda: blue.files.list(after=file),
    ]
    for call in hidden:
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as found:
            call()
        missing = str(found.value).replace(store, "ID").replace(file, "ID").replace(batch, "ID")
        assert "vs_" not in missing
        assert "ID" in missing
    assert [one.id for one in blue.vector_stores.list()] == [own, "notes"]
    assert not blue.files.list().data
    assert {one.id for one in operator.vector_stores.list()} == {own, store, "notes"}
    assert acme.vector_stores.search(store, query="leave").data


def test_an_unknown_id_and_one_of_another_tenant_cannot_be_told_apart(clients: Clients) -> None:
    _, acme, blue = clients
    store = acme.vector_stores.create().id
    answers = []
    for id in (store, "vs_" + "0" * 32):
        with pytest.raises(openai.NotFoundError) as found:
            blue.vector_stores.retrieve(id)
        answers.append(str(found.value).replace(id, "ID"))
    assert answers[0] == answers[1]


def test_a_tenant_leaves_the_others_half_of_each_limit(clients: Clients) -> None:
    operator, acme, blue = clients
    for _ in range(2):
        acme.vector_stores.create()
    with pytest.raises(openai.ConflictError, match="3 vector stores would exceed the limit of 2: delete some first"):
        acme.vector_stores.create()
    blue.vector_stores.create()
    for _ in range(2):
        operator.vector_stores.create()
    with pytest.raises(openai.ConflictError, match="limit of 2"):
        operator.vector_stores.create()
    files = [acme.files.create(file=("a.txt", b"a"), purpose="assistants") for _ in range(3)]
    store = acme.vector_stores.list().data[0].id
    with pytest.raises(openai.ConflictError, match="4 files"):
        acme.vector_stores.files.create(store, file_id=files[0].id)
    assert not acme.vector_stores.files.list(store).data
