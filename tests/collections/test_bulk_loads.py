"""Collections that begin with a bulk load are written to like those that begin empty."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import BuildRefused, CollectionBusy, OutputRefused
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from tests.collections.bulk_loads import DIM, ROWS, bulk, given, nearest
from tests.collections.small_collections import contents, open_writer, vector_of


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


@pytest.mark.parametrize("dim", [0, 16385])
def test_no_vectors_of_a_dimension_that_no_collection_has_do_not_replace_one(dim: int, tmp_path: Path) -> None:
    directory = bulk(tmp_path / "docs")
    with pytest.raises(BuildRefused, match=rf"dim is {dim}, outside 1\.\.16384"):
        bulk_load.build(np.empty((0, dim), np.float32), directory, force=True)
    assert CollectionReader.verify(directory) == ""


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
