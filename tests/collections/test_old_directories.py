"""Directories of earlier versions are read as they are, and converted by their first writer."""

import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.errors import CollectionError, Unavailable
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import ATTRIBUTES, DOCUMENTS, KEYWORDS, MANIFEST, read_description
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.collections.upgrade import upgrade
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.neighbors import Neighbors
from tests.collections.bulk_loads import DIM, ROWS, bulk, flatten, given, nearest
from tests.collections.small_collections import contents, open_writer, vector_of

OF_TENANT = parse_filter({"type": "eq", "key": "tenant", "value": "t"})


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories that version 1.2 made: `built`, `sharded` and `bare` by bulk loads, `live` by writes."""
    found = tmp_path_factory.mktemp("golden")
    with tarfile.open(Path(__file__).with_name("golden.tar.gz")) as archive:
        archive.extractall(found, filter="data")
    return found


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


@pytest.mark.parametrize("name", ["ids.npy", "codes.npy"])
def test_a_damaged_array_of_an_old_directory_is_found_by_its_conversion_if_that_relies_on_it_else_later(
    tmp_path: Path, golden: Path, name: str
) -> None:
    directory = Path(shutil.copytree(golden / "bare", tmp_path / "docs"))
    array = np.load(directory / "index" / name, mmap_mode="r+")
    array[-1] += 1  # the largest id: rows that are added later would begin one further
    array.flush()
    if name == "ids.npy":
        with pytest.raises(CollectionError, match=r"docs/index/ids\.npy is damaged: its checksum"):
            upgrade(Disk(), directory)
        assert not (directory / MANIFEST).exists()
    else:
        upgrade(Disk(), directory)
    with pytest.raises(CollectionError, match=rf"{name} is damaged: its checksum"):
        CollectionReader.verify(directory)


@pytest.mark.parametrize("kind", ["sharded", "bare", "without keywords"])
def test_an_upgrade_that_is_killed_at_any_operation_leaves_the_old_or_the_new_collection(
    tmp_path: Path, golden: Path, kind: str
) -> None:
    without = kind == "without keywords"
    old = flatten(bulk(tmp_path / "old", shards=2), keywords=False) if without else golden / kind
    for operations in range(200):
        directory = Path(shutil.copytree(old, tmp_path / str(operations)))
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


def test_a_lost_manifest_is_an_error_and_no_return_to_the_bulk_load(tmp_path: Path, golden: Path) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "docs"))
    with open_writer(directory) as writer:
        writer.upsert([given("new", 100)])
    (directory / "MANIFEST").unlink()
    for use in (CollectionReader, CollectionWriter, CollectionReader.verify):
        with pytest.raises(CollectionError, match="it has a log, but no file MANIFEST"):
            use(directory)


@pytest.fixture(params=["built", "sharded", "bare", "live", "three shards", "bare with gaps"])
def old(request: pytest.FixtureRequest, tmp_path: Path, golden: Path) -> Path:
    """A directory of an earlier version, of each kind."""
    match request.param:
        case "three shards":
            return flatten(bulk(tmp_path / "old", shards=3))
        case "bare with gaps":
            vectors = np.array([vector_of(n, DIM) for n in range(ROWS)])
            ids = np.arange(ROWS)[::-1] * 3 + 7
            bulk_load.build(vectors, tmp_path / "old", metric="l2", degree=4, ids=ids, shards=3)
            return flatten(tmp_path / "old")
    return Path(shutil.copytree(golden / request.param, tmp_path / "old"))


def listing(directory: Path) -> dict[Path, tuple[int, ...]]:
    """Return what any write to a directory changes."""
    paths = (directory, *directory.rglob("*"))
    return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for path in paths if (s := path.stat())}


def answers(directory: Path) -> list[object]:
    """Return what a collection tells its users."""
    queries = np.array([vector_of(n, DIM) for n in range(ROWS)])
    with CollectionReader(directory) as reader, closing(CollectionDocuments(directory, lambda: 0.0)) as documents:
        schema, demanded = reader.state.schema, OF_TENANT if reader.description.demanded else None
        is_later = parse_filter({"type": "gte", "key": "year", "value": 2008})
        later = is_later if "year" in schema and demanded is None else demanded
        words: Neighbors = np.empty(0, np.int64), np.empty(0, np.float32)
        if not any(segment.lacks_keywords for segment in reader.state.segments):
            words = documents.search_keywords("text 17 or 18", queries[0], ROWS, later, 1 << 62)
        near, near_later = (reader.search(queries, 5, filter=one) for one in (demanded, later))
        found: list[NDArray[Any]] = [*near, *near_later, *words]
        return [
            *(rows.tolist() for rows in found),
            documents.get(words[0].tolist()),
            documents.files().page(ROWS, "", "", descending=True),
            documents.summary,
            (contents(reader), dict(schema)),
            [reader.state.file_bytes(name) for name in ("index/", DOCUMENTS, KEYWORDS)],
            reader.state.rows_of([*contents(reader)]),
            reader.identity,
        ]


def test_a_directory_of_an_earlier_version_opens_as_it_is_and_a_writer_converts_it(old: Path) -> None:
    old.chmod(0o750)
    before, expected = listing(old), answers(old)
    assert CollectionReader.verify(old) == ""
    assert listing(old) == before, "reading writes nothing"
    indexes = {path.stat().st_ino for path in old.rglob("*.npy")}
    open_writer(old).close()
    assert {path.stat().st_ino for path in old.rglob("*.npy")} == indexes, "indexes are linked, not copied"
    assert {path.name for path in old.iterdir()} <= {"MANIFEST", "collection.json", "log", "segments"} | {
        "tombstones", "writer.lock"
    }  # fmt: skip
    assert answers(old) == expected
    assert CollectionReader.verify(old) == ""
    with open_writer(old) as writer:
        name = next(iter(contents(writer)))
        writer.upsert([UpsertDocument("new", "n", attributes={"tenant": "t"}, vector=vector_of(100, DIM))])
        writer.delete([name])
        written = contents(writer)
        writer.compact()
        assert contents(writer) == written
    with CollectionReader(old) as reader:
        demanded = OF_TENANT if reader.description.demanded else None
        assert nearest(reader, 100, filter=demanded) == ["new"]
        assert contents(reader) == written
    assert CollectionReader.verify(old) == ""


@pytest.mark.parametrize("kind", ["built", "sharded", "bare"])
def test_the_files_of_a_converted_directory_have_its_modes(tmp_path: Path, golden: Path, kind: str) -> None:
    directory = Path(shutil.copytree(golden / kind, tmp_path / kind))
    directory.chmod(0o750)
    upgrade(Disk(), directory)
    assert {path.stat().st_mode & 0o777 for path in directory.rglob("*")} == {0o750, 0o640}


@pytest.mark.parametrize("written", [False, True])
def test_readers_that_have_an_old_directory_open_follow_its_conversion(old: Path, written: bool) -> None:
    def segments(reader: CollectionReader) -> set[int]:
        return {id(segment) for segment in reader.state.segments}

    shards = read_description(old).shards
    with ExitStack() as stack:
        readers = [
            stack.enter_context(CollectionReader(old, background=background, shard=shard))
            for background in (False, True)
            for shard in (None, *range(shards))
        ]
        documents = stack.enter_context(CollectionDocuments(old, lambda: 0.0))
        lazy = stack.enter_context(CollectionReader(old))
        opened = [segments(reader) for reader in readers]
        before = [contents(reader) for reader in readers]
        with open_writer(old) as writer:
            if written:
                name = next(iter(contents(writer)))
                writer.upsert([UpsertDocument("new", "17", attributes={"tenant": "t"}, vector=vector_of(100, DIM))])
                writer.delete([name])
            for reader, segments_before, contents_before in zip(readers, opened, before, strict=True):
                assert reader.poll() or not read_description(old).size
                assert not reader.poll()
                assert reader.current
                assert segments(reader) == segments_before, "the segments stay open"
                if not written:
                    assert contents(reader) == contents_before
                elif len(reader.state.segments) == shards:
                    assert contents(reader) == contents(writer)
                reader.verify_segments()
            for segment in lazy.state.segments:
                assert (segment.keywords is None) == (KEYWORDS not in segment.files), "it is opened late"
            documents.file_count()
            assert contents(documents) == contents(writer)
            writer.compact()
            for reader in readers[:2]:
                reader.poll()
        assert contents(readers[0]) == contents(documents)


def test_checksums_that_are_compared_while_an_old_directory_is_converted_are_those_of_its_files(
    tmp_path: Path, golden: Path
) -> None:
    directory = Path(shutil.copytree(golden / "sharded", tmp_path / "docs"))
    with CollectionReader(directory) as reader:
        reader.verify_segments(lambda read_bytes: upgrade(Disk(), directory))
        assert not reader.unverified


def test_an_old_directory_in_the_place_of_another_is_noticed(tmp_path: Path, golden: Path) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "docs"))
    with CollectionReader(directory) as reader:
        directory.rename(tmp_path / "moved")
        shutil.copytree(golden / "bare", directory)
        assert not reader.poll()
        assert reader.replaced
        assert len(contents(reader)) == ROWS


def test_an_old_directory_that_is_restored_after_its_conversion_is_reopened(tmp_path: Path, golden: Path) -> None:
    directory = Path(shutil.copytree(golden / "built", tmp_path / "docs"))
    open_writer(directory).close()
    with CollectionReader(directory) as reader:
        directory.rename(tmp_path / "moved")
        shutil.copytree(golden / "built", directory)
        with pytest.raises(CollectionError, match="an earlier state of"):
            reader.poll()
        assert reader.outdated


@pytest.mark.parametrize("shards", [1, 3])
def test_documents_without_a_keyword_index_get_one_when_they_are_converted(tmp_path: Path, shards: int) -> None:
    def found(documents: CollectionDocuments) -> list[str]:
        rows, _ = documents.search_keywords("17", vector_of(0, DIM), 5, None, 1 << 62)
        return [one.id for one in documents.get(rows.tolist()) if one is not None]

    directory = flatten(bulk(tmp_path / "old", shards), keywords=False)
    with CollectionDocuments(directory, lambda: 0.0) as documents:
        assert len(contents(documents)) == ROWS
        with pytest.raises(Unavailable, match="without a keyword index: `trinity index compact` makes one"):
            found(documents)
        open_writer(directory).close()
        assert found(documents) == ["d17"]
        documents.verify_segments()
    assert CollectionReader.verify(directory) == ""


@pytest.mark.parametrize("use", [CollectionReader, open_writer])
@pytest.mark.parametrize("name", [DOCUMENTS, ATTRIBUTES, KEYWORDS, "index-1/meta.json", "index-1/ids.npy"])
@pytest.mark.parametrize("damage", ["cut", "missing", "a pipe"])
def test_an_old_directory_without_a_whole_file_is_not_opened(
    tmp_path: Path, golden: Path, name: str, damage: str, use: Callable[[Path], object]
) -> None:
    path = Path(shutil.copytree(golden / "sharded", tmp_path / "docs")) / name
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "a pipe":
        os.mkfifo(path)
    with pytest.raises(CollectionError, match=path.name):
        use(tmp_path / "docs")
    assert not (tmp_path / "docs/MANIFEST").exists()


@pytest.mark.parametrize("name", [DOCUMENTS, ATTRIBUTES, KEYWORDS, "index-1/meta.json"])
def test_a_damaged_old_directory_is_not_converted(tmp_path: Path, golden: Path, name: str) -> None:
    directory = Path(shutil.copytree(golden / "sharded", tmp_path / "docs"))
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content)
    for use in (open_writer, CollectionReader.verify):
        with pytest.raises(CollectionError, match=f"{Path(name).name} is damaged"):
            use(directory)
    assert not (directory / "MANIFEST").exists()
