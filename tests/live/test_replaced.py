"""A directory that is replaced, or gone, while its collection is open: nothing is lost, nothing written into it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import CollectionError
from runtime.retrieval.live.reader import LiveReader
from tests.live.small_collections import contents, documents, maintain, new_writer, open_writer


def _another(directory: Path) -> None:
    """Another collection in the place of one."""
    shutil.move(directory, directory.with_name("old"))
    with new_writer(directory) as writer:
        writer.upsert(documents(range(3)))
        writer.flush()


def _nothing(directory: Path) -> None:
    shutil.rmtree(directory)


def _backed_up(directory: Path) -> Path:
    return Path(shutil.copytree(directory, directory.with_name("backup")))


def _whole(directory: Path) -> None:
    """The backup in the place of the directory."""
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("backup"), directory)


def _file_by_file(directory: Path) -> None:
    """Only what is not as it was is put back, the rest is left."""
    backup = directory.with_name("backup")
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        was = backup / path.relative_to(directory)
        if not was.is_file():
            path.unlink()
        elif was.read_bytes() != path.read_bytes():
            path.unlink()
            shutil.copy(was, path)
    shutil.copytree(backup, directory, dirs_exist_ok=True, copy_function=_where_missing)


def _where_missing(source: str, target: str) -> None:
    if not Path(target).exists():
        shutil.copy(source, target)


def _over_the_files(directory: Path) -> None:
    """Files keep their places on the disk, and get the contents that they had."""
    shutil.copytree(directory.with_name("backup"), directory, dirs_exist_ok=True)


RESTORES = [_whole, _file_by_file, _over_the_files]


@pytest.mark.parametrize("replace", [_another, _nothing])
def test_a_write_to_a_directory_that_was_replaced_is_not_acknowledged(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        replace(tmp_path / "a")
        with pytest.raises(CollectionError, match=r"replaced or moved.*reopen it"):
            writer.upsert(documents(range(10, 12)))
        with pytest.raises(CollectionError, match="reopen it"):
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
            with pytest.raises(CollectionError, match="reopen it"):
                work()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    with open_writer(tmp_path / "a") as anew:
        assert sorted(contents(anew)) == ["0", "1", "2"]


def test_a_build_during_which_the_directory_was_replaced_is_not_taken(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=10) as writer:
        writer.upsert(documents(range(10)))

        def build(directory: Path, job: object) -> None:
            _another(directory)

        with pytest.raises(CollectionError, match="reopen it"):
            maintain(writer, build)
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


@pytest.mark.parametrize("replace", [_another, _nothing])
def test_checksums_of_a_directory_that_was_replaced_meanwhile_are_not_damage(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        writer.flush()
        with LiveReader(tmp_path / "a") as reader:
            replace(tmp_path / "a")
            reader.checksums.verify()
            assert not reader.checksums.pending
            assert len(contents(reader)) == 10


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_reader_says_that_an_earlier_state_was_restored_and_another_one_reads_it(
    tmp_path: Path, restore: Callable[[Path], None], sealed: bool
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        writer.flush()
        writer.upsert(documents(range(10, 12)))
        _backed_up(tmp_path / "a")
        writer.upsert(documents(range(12, 20)))
        if sealed:
            writer.flush()
        with LiveReader(tmp_path / "a") as reader:
            assert reader.outdated == ""
            restore(tmp_path / "a")
            for _ in range(2):
                with pytest.raises(CollectionError, match=r"an earlier state of .* was restored"):
                    reader.poll()
            assert "was restored" in reader.outdated
            assert len(contents(reader)) == 20
    with LiveReader(tmp_path / "a") as anew:
        assert len(contents(anew)) == 12


@pytest.mark.parametrize("restore", RESTORES)
def test_nothing_is_acknowledged_that_a_restored_collection_does_not_have(
    tmp_path: Path, restore: Callable[[Path], None]
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        _backed_up(tmp_path / "a")
        writer.upsert(documents(range(10, 20)))
        restore(tmp_path / "a")
        with pytest.raises(CollectionError, match="reopen it"):
            writer.upsert(documents(range(20, 22)))
    with open_writer(tmp_path / "a") as anew:
        anew.upsert(documents(range(30, 32)))
        assert sorted(contents(anew), key=int) == [*map(str, range(10)), "30", "31"]


def test_a_reader_that_slept_tells_a_restored_copy_that_went_on_from_what_it_had_read(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        _backed_up(tmp_path / "a")
        writer.upsert(documents(range(10, 20)))
    with LiveReader(tmp_path / "a") as reader:
        _whole(tmp_path / "a")
        with open_writer(tmp_path / "a") as anew:
            for part in range(3):
                anew.upsert(documents(range(100 * part, 100 * part + 10)))
                anew.flush()
        with pytest.raises(CollectionError, match="was restored"):
            reader.poll()
