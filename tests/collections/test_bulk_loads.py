"""Collections that begin with a bulk load are written to like those that begin empty; old directories are converted."""

import os
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.errors import CollectionBusy, CollectionError, OutputRefused
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import (
    DESCRIPTION,
    DOCUMENTS,
    KEYWORDS,
    encode_with_checksum,
    read_description,
)
from runtime.retrieval.collections.disk import Disk, acquire_lock
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.collections.upgrade import upgrade
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.small_collections import contents, open_writer, vector_of

DIM = 16
ROWS = 20
OF_TENANT = parse_filter({"type": "eq", "key": "tenant", "value": "t"})


def given(name: str, seed: int) -> UpsertDocument:
    return UpsertDocument(name, f"text {seed}", f"title {seed}", {"year": seed}, vector_of(seed, DIM))


def bulk(directory: Path, shards: int = 1, rows: int = ROWS) -> Path:
    documents = [Document(f"d{n}", f"title {n}", f"text {n}", {"year": 2000 + n}) for n in range(rows)]
    vectors = np.array([vector_of(n, DIM) for n in range(rows)])
    bulk_load.build(documents, directory, metric="l2", degree=4, vectors=vectors, shards=shards)
    return directory


def nearest(reader: CollectionReader, seed: int, k: int = 1, **options: object) -> list[str]:
    rows, _ = reader.search(vector_of(seed, DIM)[None], k, **options)  # type: ignore[arg-type]
    return [one.id for one in reader.documents(rows[0][rows[0] >= 0].tolist()) if one is not None]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories that version 1.2 made: `built`, `sharded` and `bare` by bulk loads, `live` by writes."""
    found = tmp_path_factory.mktemp("golden")
    with tarfile.open(Path(__file__).with_name("golden.tar.gz")) as archive:
        archive.extractall(found, filter="data")
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_seals_and_merges_replace_a_bulk_load_and_remove_its_files(tmp_path: Path, shards: int) -> None:
    directory = bulk(tmp_path / "docs", shards)
    with CollectionReader(directory) as reader, open_writer(directory) as writer:
        writer.upsert([given(f"n{n}", 100 + n) for n in range(10)])
        writer.delete([f"d{n}" for n in range(0, ROWS, 2)])
        writer.flush()
        expected = contents(writer)
        writer.compact()
        assert contents(writer) == expected
        reader.poll()
        assert contents(reader) == expected
        assert len(writer.state.segments) == shards
        assert nearest(reader, 105, filter=parse_filter({"type": "eq", "key": "year", "value": 105})) == ["n5"]
    assert {int(path.name) for path in (directory / "segments").iterdir()}.isdisjoint(range(shards))
    assert CollectionReader.verify(directory) == ""
    with CollectionReader(directory) as found:
        assert found.state.count == len(expected)


def test_a_bulk_load_that_is_only_read_does_not_change(tmp_path: Path) -> None:
    directory = bulk(tmp_path / "docs")
    before = sorted(path for path in directory.rglob("*"))
    with CollectionReader(directory) as reader:
        reader.poll()
        assert len(nearest(reader, 3, k=5)) == 5
    assert sorted(path for path in directory.rglob("*")) == before


class _Stop(Exception):
    pass


class _StoppingDisk(Disk):
    """Stops at the nth operation, as a process that is killed: within a write, or before its files are on disk, which
    changes nothing that others find."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Stop

    def write(self, fd: int, content: bytes) -> None:
        half = len(content) // 2
        super().write(fd, content[:half])
        self._count()
        super().write(fd, content[half:])

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def sync_directory(self, directory: Path) -> None:
        self._count()
        super().sync_directory(directory)


@pytest.mark.parametrize("kind", ["sharded", "bare"])
def test_an_upgrade_that_is_killed_at_any_operation_leaves_the_old_or_the_new_collection(
    tmp_path: Path, golden: Path, kind: str
) -> None:
    for operations in range(200):
        directory = Path(shutil.copytree(golden / kind, tmp_path / str(operations)))
        try:
            CollectionWriter(directory, background=False, disk=_StoppingDisk(operations)).close()
        except _Stop:
            with CollectionReader(directory) as reader:
                assert len(contents(reader)) == ROWS
            assert CollectionReader.verify(directory) == ""
            if operations % 8 == 0:
                with open_writer(directory) as writer:
                    writer.upsert([given("new", 100)])
                    assert len(contents(writer)) == ROWS + 1
            shutil.rmtree(directory)
        else:
            break
    assert 20 < operations < 199, "the upgrade was not stopped everywhere"


def test_a_collection_that_several_processes_ensure_is_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = bulk_load.create, list[Path]()

    def contended(directory: Path, dim: int, **options: Any) -> None:
        calls.append(directory)
        if len(calls) == 1:
            raise CollectionBusy("another process creates it")
        create(directory, dim, **options)

    monkeypatch.setattr(bulk_load, "create", contended)
    (tmp_path / "file").touch()
    for name in ("a", "a", "file"):
        bulk_load.ensure(tmp_path / name, 4)
    assert calls == [tmp_path / "a"] * 2
    assert read_description(tmp_path / "a").dim == 4


def test_a_lost_manifest_is_an_error_and_no_return_to_the_bulk_load(tmp_path: Path, golden: Path) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "docs"))
    with open_writer(directory) as writer:
        writer.upsert([given("new", 100)])
    (directory / "MANIFEST").unlink()
    for use in (CollectionReader, CollectionWriter, CollectionReader.verify):
        with pytest.raises(CollectionError, match="it has a log, but no file MANIFEST"):
            use(directory)


def test_rows_of_bare_vectors_are_documents_by_their_numbers(tmp_path: Path) -> None:
    ids = np.arange(ROWS)[::-1] * 3 + 7  # not ascending
    vectors = np.array([vector_of(n, DIM) for n in range(ROWS)])
    bulk_load.build(vectors, tmp_path / "v", metric="l2", degree=4, ids=ids)
    name = str(ids[5])
    with CollectionReader(tmp_path / "v") as reader, open_writer(tmp_path / "v") as writer:
        assert nearest(reader, 5) == [name]
        writer.upsert([given(name, 105), given("text", 100)])
        assert writer.state.rows_of([name])[name] == ids.max() + 1
        assert writer.delete([str(ids[6])]) == 1
        reader.poll()
        assert nearest(reader, 105) == [name]
        assert nearest(reader, 100) == ["text"]
        assert not {name, str(ids[6])} & set(nearest(reader, 5, k=1) + nearest(reader, 6, k=1))
        writer.compact()
        reader.poll()
        assert nearest(reader, 7) == [str(ids[7])]
        assert len(contents(writer)) == ROWS


def test_adding_files_while_another_process_writes_is_refused(tmp_path: Path) -> None:
    directory = bulk(tmp_path / "docs")
    with open_writer(directory), pytest.raises(CollectionBusy):
        bulk_load.build([Document("a", "", "a")], directory, vectors=np.eye(1, DIM), force=True)
    with pytest.raises(OutputRefused):
        bulk_load.build([Document("a", "", "a")], directory, vectors=np.eye(1, DIM))


@pytest.mark.parametrize("kind", ["built", "sharded", "bare", "live"])
def test_a_directory_of_an_earlier_version_is_converted_when_it_is_opened(
    tmp_path: Path, golden: Path, kind: str
) -> None:
    directory = Path(shutil.copytree(golden / kind, tmp_path / kind))
    directory.chmod(0o750)
    identity = read_description(directory).identity
    indexes = {path.stat().st_ino for path in directory.rglob("*.npy")}
    assert CollectionReader.verify(directory) == ""
    assert {path.stat().st_ino for path in directory.rglob("*.npy")} == indexes, "indexes are linked, not copied"
    assert {path.name for path in directory.iterdir()} <= {"MANIFEST", "collection.json", "log", "segments"} | {
        "tombstones", "writer.lock"
    }  # fmt: skip
    assert kind == "live" or {path.stat().st_mode & 0o777 for path in directory.rglob("*")} == {0o750, 0o640}
    demanded = OF_TENANT if kind == "live" else None
    name = str(7 + 3 * (ROWS - 1 - 5)) if kind == "bare" else "d5"
    with CollectionReader(directory) as reader:
        assert nearest(reader, 5, filter=demanded) == [name]
        assert len(contents(reader)) == ROWS - (kind == "live")
    with open_writer(directory) as writer:
        writer.upsert([UpsertDocument("new", "n", attributes={"tenant": "t"}, vector=vector_of(100, DIM))])
        writer.delete([name])
        expected = contents(writer)
        writer.compact()
        assert contents(writer) == expected
    with CollectionReader(directory) as reader:
        assert nearest(reader, 100, filter=demanded) == ["new"]
        assert contents(reader) == expected
    assert read_description(directory).identity == identity
    assert CollectionReader.verify(directory) == ""


def test_documents_without_a_keyword_index_get_one_when_they_are_converted(tmp_path: Path, golden: Path) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "built"))
    found = read_description(directory)
    files = {name: one for name, one in found.files.items() if name != KEYWORDS}
    (directory / DESCRIPTION).write_bytes(encode_with_checksum(structs.replace(found, files=files)))
    (directory / KEYWORDS).unlink()
    documents = CollectionDocuments(directory, lambda: 0.0)
    rows, _ = documents.search_keywords("17", vector_of(0, DIM), 5, None, 1 << 62)
    assert [one.id for one in documents.get(rows.tolist()) if one is not None] == ["d17"]
    documents.close()


def test_of_several_readers_that_open_an_old_directory_one_converts_it_and_the_others_wait(
    tmp_path: Path, golden: Path
) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "built"))
    lock = acquire_lock(directory)  # as one that converts it holds it
    with ThreadPoolExecutor(4) as threads:
        opened = [threads.submit(CollectionReader, directory) for _ in range(4)]
        upgrade(Disk(), directory)
        os.close(lock)
        for one in opened:
            with one.result(60) as reader:
                assert len(contents(reader)) == ROWS


def test_an_old_directory_that_may_not_be_written_to_is_refused_with_what_to_do(
    tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "built"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(CollectionError, match="may not write to") as refusal:
        CollectionReader(directory)
    assert f"run `trinity index upgrade {directory}` as a user who may write to it, or on a" in refusal.value.message


@pytest.mark.parametrize("name", [DOCUMENTS, "attributes.msgpack", "index-1/meta.json"])
def test_a_damaged_old_directory_is_not_converted(tmp_path: Path, golden: Path, name: str) -> None:
    directory = Path(shutil.copytree(golden / "sharded", tmp_path / "docs"))
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(CollectionError, match=f"{Path(name).name} is damaged"):
        CollectionReader(directory)
    assert not (directory / "MANIFEST").exists()
