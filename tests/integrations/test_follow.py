"""A collection follows a collection of another database: the fake, local Qdrant and Milvus Lite."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CollectionError, ConfigError, Unavailable
from runtime.integrations.follow.document_mapper import FieldMapping
from runtime.integrations.follow.follower import Follower, SyncResult
from runtime.integrations.follow.source import call_with_retries
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.search import search
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.embedder import HashingEmbedder
from tests.collections.small_collections import contents
from tests.integrations.databases import (
    DIM,
    EVERY_DATABASE,
    Database,
    FakeDatabase,
    MilvusDatabase,
    QdrantDatabase,
    needs_milvus,
    needs_qdrant,
)

UP, RIGHT, BACK = (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)


@pytest.fixture(params=EVERY_DATABASE)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    opened: Any = request.param(tmp_path)
    yield opened
    if not isinstance(opened, FakeDatabase):
        opened.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CollectionWriter]:
    create(tmp_path / "live", DIM, degree=8)
    with CollectionWriter(tmp_path / "live", background=False) as opened:
        yield opened


def _nearest(writer: CollectionWriter, vector: Any, **options: Any) -> list[str]:
    rows, _ = search(writer.state, np.array([vector], np.float32), 2, **options)
    return [one.id for one in writer.state.documents(rows[0][rows[0] >= 0].tolist()) if one is not None]


def test_only_new_changed_and_deleted_documents_are_written(database: Database, writer: CollectionWriter) -> None:
    for key in range(5):
        database.put(key, UP if key else RIGHT, text=f"text {key}", n=key)
    follower = Follower(database.source(), writer, FieldMapping(), batch=2)
    assert follower.sync() == SyncResult(first=True, stored=5, complete=True)
    assert contents(writer) == {str(key): f"text {key}" for key in range(5)}
    assert _nearest(writer, RIGHT)[0] == "0"

    before = writer.state.sequence
    assert follower.sync() == SyncResult(unchanged=5, complete=True)
    assert writer.state.sequence == before

    database.put(1, UP, text="another text", n=1)
    database.put(2, UP, text="text 2", n=22)
    database.put(9, BACK, text="text 9", n=9)
    database.remove(3)
    assert follower.sync() == SyncResult(stored=3, deleted=1, unchanged=2, complete=True)
    assert contents(writer) == {"0": "text 0", "1": "another text", "2": "text 2", "4": "text 4", "9": "text 9"}
    assert _nearest(writer, UP, filter=parse_filter({"type": "eq", "key": "n", "value": 22})) == ["2"]


def test_a_changed_vector_is_detected_in_the_log_and_in_a_segment(database: Database, writer: CollectionWriter) -> None:
    for key in range(40):
        database.put(key, UP, text="text", n=key)
    follower = Follower(database.source(), writer, FieldMapping())
    follower.sync()
    writer.flush()
    database.put(7, RIGHT, text="text", n=7)
    database.put(40, UP, text="text", n=40)
    assert follower.sync() == SyncResult(stored=2, unchanged=39, complete=True)
    assert _nearest(writer, RIGHT)[0] == "7"
    database.put(40, BACK, text="text", n=40)
    assert follower.sync() == SyncResult(stored=1, unchanged=40, complete=True)
    assert _nearest(writer, BACK)[0] == "40"


def test_with_a_version_field_only_changed_points_are_read(database: Database, writer: CollectionWriter) -> None:
    for key in range(4):
        database.put(key, UP, text=f"text {key}", n=1, other="x")
    follower = Follower(database.source(), writer, FieldMapping(attributes=("other",)), version="n", batch=3)
    assert follower.sync().stored == 4
    if isinstance(database, FakeDatabase):
        database.read.clear()
    database.put(2, RIGHT, text="new", n=2, other="x")
    database.remove(0)
    assert follower.sync() == SyncResult(stored=1, deleted=1, unchanged=2, complete=True)
    assert contents(writer) == {"1": "text 1", "2": "new", "3": "text 3"}
    assert _nearest(writer, RIGHT)[0] == "2"
    if isinstance(database, FakeDatabase):
        assert database.read == [1, 1, 1, 3]


def test_objects_are_flattened_and_unsupported_attributes_are_dropped_and_reported(
    database: Database, writer: CollectionWriter
) -> None:
    told: list[str] = []
    fields = FieldMapping(text="meta.body", title="meta.head")
    meta = {"body": "the text", "head": "the title", "year": 2024, "deep": {"er": ["a", "b"]}}
    database.put(1, UP, text="-", meta=meta, mixed=[1, "a"], n=1)
    database.put(2, UP, text="-", meta={"body": "two", "year": "unknown"}, n=2)
    follower = Follower(database.source(), writer, fields, report=told.append)
    assert follower.sync().stored == 2
    rows = writer.state.rows_of(["1", "2"])
    one, two = (writer.state.documents([rows[name]])[0] for name in ("1", "2"))
    assert one is not None
    assert two is not None
    assert (one.text, one.title) == ("the text", "the title")
    assert one.attributes == {"text": "-", "meta.year": 2024, "meta.deep.er": ["a", "b"], "n": 1}
    assert two.attributes == {"text": "-", "n": 2}
    assert [("mixed" in words, "meta.year" in words) for words in told] == [(True, False), (False, True)]
    follower.sync()
    assert len(told) == 2


def test_texts_are_embedded_on_request(database: Database, tmp_path: Path) -> None:
    hashing = HashingEmbedder(64)
    create(tmp_path / "made", 64, degree=8, embedder="hashing-64")
    with CollectionWriter(tmp_path / "made", background=False, embedder=hashing) as writer:
        database.put(1, UP, text="cats purr", n=1)
        database.put(2, UP, text="dogs bark", n=2)
        follower = Follower(database.source(), writer, FieldMapping(), embeds=True)
        assert follower.sync().stored == 2
        assert follower.sync().unchanged == 2
        assert _nearest(writer, hashing.embed(["dogs bark"], "query")[0])[0] == "2"


# --- what goes wrong


def test_a_failed_pass_deletes_nothing_and_the_next_one_continues(writer: CollectionWriter) -> None:
    fake, told, result = FakeDatabase(), list[str](), list[SyncResult]()
    for key in range(6):
        fake.put(key, UP, text=f"text {key}")
    follower = Follower(fake.source(), writer, FieldMapping(), batch=2, report=told.append)
    looks = iter([True, True, False])

    def look() -> bool:
        if len(result) == 1 and not told:
            fake.put(0, UP, text="new")
            fake.remove(5)
            fake.failures = [Unavailable("gone for now")]
        return next(looks)

    follower.follow(look, result.append)
    assert told == ["gone for now; retrying in the next pass"]
    assert result == [
        SyncResult(first=True, stored=6, complete=True),
        SyncResult(stored=1, deleted=1, unchanged=4, complete=True),
    ]


def test_a_failed_first_pass_is_an_error_and_its_documents_are_not_written_again(writer: CollectionWriter) -> None:
    fake = FakeDatabase()
    for key in range(4):
        fake.put(key, UP, text="text")
    follower = Follower(fake.source(), writer, FieldMapping(), batch=2)
    pages = fake.pages

    def broken(*shape: Any) -> Iterator[Any]:
        yield next(pages(*shape))
        raise Unavailable("gone")

    fake.pages = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(Unavailable, match="gone"):
        follower.follow(lambda: False, lambda result: None)
    fake.pages = pages  # type: ignore[method-assign]
    assert follower.sync() == SyncResult(stored=2, unchanged=2, complete=True)


def test_a_stopped_pass_ends_after_its_batch_and_deletes_nothing(writer: CollectionWriter) -> None:
    fake = FakeDatabase()
    for key in range(6):
        fake.put(key, UP, text="text")
    stops = iter([False, False, False, True])
    follower = Follower(fake.source(), writer, FieldMapping(), batch=2, stopped=lambda: next(stops))
    follower.sync()
    fake.remove(5)
    assert follower.sync() == SyncResult(unchanged=2)
    assert len(contents(writer)) == 6


def test_an_invalid_document_is_reported_and_blocks_no_other(writer: CollectionWriter) -> None:
    fake, told = FakeDatabase(), list[str]()
    fake.put(1, UP, text="fine")
    fake.put(2, (1.0, 2.0), text="two numbers")
    fake.put(3, (1.0, float("nan"), 0.0), text="no number")
    fake.put(4, UP, text=["no text"])
    fake.put(5, RIGHT, text="fine too")
    result = Follower(fake.source(), writer, FieldMapping(), report=told.append).sync()
    assert (result.stored, result.refused) == (2, 3)
    assert sorted(contents(writer)) == ["1", "5"]
    assert len(told) == 3


def test_a_client_is_retried_on_failures_but_not_on_refusals() -> None:
    slept: list[float] = []
    answers: list[Any] = ["fine", OSError("reset"), OSError("reset")]

    def call() -> str:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert call_with_retries("it", call, sleep=slept.append) == "fine"
    assert slept == [0.5, 1.0]

    refusal = ValueError("bad filter")
    refusal.status_code = 400  # type: ignore[attr-defined]
    answers[:] = [refusal] * 9
    with pytest.raises(Unavailable, match="it: ValueError: bad filter"):
        call_with_retries("it", call, sleep=slept.append)
    answers[:] = [OSError("reset")] * 9
    with pytest.raises(Unavailable, match="it: OSError: reset"):
        call_with_retries("it", call, sleep=slept.append)
    assert slept == [0.5, 1.0, 0.5, 1.0, 2.0, 4.0]


# --- each database's own


@needs_qdrant
def test_one_of_several_qdrant_vectors_must_be_named(tmp_path: Path, writer: CollectionWriter) -> None:
    from qdrant_client.models import Distance, PointStruct, VectorParams

    from runtime.integrations.follow.qdrant import Qdrant

    database = QdrantDatabase(tmp_path)
    two = {name: VectorParams(size=size, distance=Distance.DOT) for name, size in (("small", DIM), ("large", 9))}
    database.client.create_collection("b", vectors_config=two)
    vectors = {"small": list(RIGHT), "large": [1.0] * 9}
    database.client.upsert("b", [PointStruct(id=1, vector=vectors, payload={"text": "one"})])
    with pytest.raises(ConfigError, match="give one of large, small"):
        Qdrant(database.client, "b")
    with pytest.raises(ConfigError, match="not a valid Qdrant filter"):
        Qdrant(database.client, "a", '{"mast": 1}')
    source = Qdrant(database.client, "b", vector="small")
    assert (source.dim, source.metric) == (DIM, "ip")
    assert Follower(source, writer, FieldMapping()).sync().stored == 1
    assert _nearest(writer, RIGHT) == ["1"]
    database.close()


@needs_milvus
def test_an_unknown_or_non_vector_milvus_field_is_refused(tmp_path: Path) -> None:
    from runtime.integrations.follow.milvus import Milvus

    database = MilvusDatabase(tmp_path)
    with pytest.raises(ConfigError, match="no field 'text' of float vectors: give one of vector"):
        Milvus(database.client, "a", vector="text")
    database.close()


# --- the command


@pytest.fixture
def trinity(tmp_path: Path) -> Callable[..., Any]:
    from typer.testing import CliRunner

    from launchers.main import command_line

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(command_line(), [str(one) for one in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


@needs_qdrant
def test_the_command_follows_and_takes_over_a_collection_with_other_documents_only_if_told(
    tmp_path: Path, trinity: Callable[..., str]
) -> None:
    database = QdrantDatabase(tmp_path)
    database.put(1, UP, text="one")
    database.put(2, UP, text="two")
    database.close()
    follow = ("index", "follow", "qdrant", tmp_path / "docs", "--url", database.path, "--once", "--collection")
    assert trinity(*follow, "a") == "2 stored, 0 deleted, 0 unchanged; 2 in the collection\n"
    assert trinity(*follow, "a") == "0 stored, 0 deleted, 2 unchanged; 2 in the collection\n"
    trinity("index", "verify", tmp_path / "docs")
    with pytest.raises(ConfigError, match="has no embedder"):
        trinity(*follow, "a", "--embed")

    loaded = [Document("1", "", "one"), Document("mine", "", "text")]
    bulk_load.build(loaded, tmp_path / "notes", vectors=np.array([UP, UP], np.float32))
    notes = ("index", "follow", "qdrant", tmp_path / "notes", *follow[4:], "a")
    with pytest.raises(ConfigError, match=r"2 documents that are not from a source.*--take-over"):
        trinity(*notes)
    assert trinity(*notes, "--take-over") == "1 stored, 1 deleted, 1 unchanged; 2 in the collection\n"
    assert trinity(*notes) == "0 stored, 0 deleted, 2 unchanged; 2 in the collection\n"

    (tmp_path / "docs" / "followed.json").write_text("{}")
    with pytest.raises(CollectionError, match="damaged"):
        trinity(*follow, "a")
    (tmp_path / "docs" / "followed.json").write_text(
        '{"database": "qdrant", "url": "http://elsewhere", "collection": "a", "embeds": false}'
    )
    with pytest.raises(ConfigError, match="follows 'a' of qdrant at http://elsewhere, not"):
        trinity(*follow, "a")


def test_a_missing_database_package_is_named_with_its_install_command(
    tmp_path: Path, trinity: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"missing: pymilvus\. Install with: python -m pip install pymilvus"):
        trinity("index", "follow", "milvus", tmp_path / "docs", "--url", "x", "--collection", "a")
    assert not (tmp_path / "docs").exists()
