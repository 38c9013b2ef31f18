"""A directory that is replaced, or gone, while its collection is open: nothing is lost, nothing written into it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import CollectionError
from runtime.retrieval.live.reader import LiveReader
from tests.live.small import contents, documents, new_writer, open_writer


def _another(directory: Path) -> None:
    """Another collection in the place of one."""
    shutil.move(directory, directory.with_name("old"))
    with new_writer(directory) as writer:
        writer.upsert(documents(range(3)))
        writer.flush()


def _nothing(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.mark.parametrize("replace", [_another, _nothing])
def test_a_write_to_a_directory_that_was_replaced_is_not_acknowledged(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        replace(tmp_path / "a")
        with pytest.raises(CollectionError, match=r"replaced or moved.*open it again"):
            writer.upsert(documents(range(10, 12)))
        with pytest.raises(CollectionError, match="open it again"):
            writer.delete(["1"])


def test_a_writer_of_what_was_there_before_leaves_the_new_collection_as_it_is(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        for part in range(2):
            writer.upsert(documents(range(10 * part, 10 * part + 10)))
            writer.flush()
        writer.upsert(documents(range(20, 30)))
        _another(tmp_path / "a")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
        for work in (writer.flush, writer.compact):
            with pytest.raises(CollectionError, match="open it again"):
                work()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    with open_writer(tmp_path / "a") as anew:
        assert sorted(contents(anew)) == ["0", "1", "2"]


def test_a_build_during_which_the_directory_was_replaced_is_not_taken(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=10) as writer:
        writer.upsert(documents(range(10)))

        def build(directory: Path, job: object) -> None:
            _another(directory)

        with pytest.raises(CollectionError, match="open it again"):
            writer.maintain(build)
    with open_writer(tmp_path / "a") as anew:
        assert sorted(contents(anew)) == ["0", "1", "2"]


def test_a_reader_says_that_another_collection_is_there_and_goes_on_with_what_it_had(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        with LiveReader(tmp_path / "a") as reader:
            _another(tmp_path / "a")
            for _ in range(2):
                with pytest.raises(CollectionError, match="another collection"):
                    reader.poll()
            assert len(contents(reader)) == 10
