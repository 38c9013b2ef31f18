"""A directory replaced or removed while its collection is open: no acknowledged write is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.reader import CollectionReader
from tests.collections.small_collections import contents, documents, maintain, new_writer, open_writer


def _another(directory: Path) -> None:
    """Replace the directory by another collection."""
    shutil.move(directory, directory.with_name("old"))
    with new_writer(directory) as writer:
        writer.upsert(documents(range(3)))
        writer.flush()


def _nothing(directory: Path) -> None:
    shutil.rmtree(directory)


def _backed_up(directory: Path) -> Path:
    return Path(shutil.copytree(directory, directory.with_name("backup")))


def _whole(directory: Path) -> None:
    """Replace the directory by the backup."""
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("backup"), directory)


def _file_by_file(directory: Path) -> None:
    """Restore only the files that changed."""
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
    """Restore contents in place; files keep their inodes."""
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


def test_a_writer_of_the_old_directory_does_not_change_the_new_collection(tmp_path: Path) -> None:
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


def test_a_build_during_a_replacement_is_discarded(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a", seal_rows=10) as writer:
        writer.upsert(documents(range(10)))

        def build(directory: Path, job: object) -> None:
            _another(directory)

        with pytest.raises(CollectionError, match="reopen it"):
            maintain(writer, build)
    with open_writer(tmp_path / "a") as anew:
        assert sorted(contents(anew)) == ["0", "1", "2"]


def test_a_reader_reports_a_replaced_collection_and_keeps_its_state(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        with CollectionReader(tmp_path / "a") as reader:
            assert not reader.replaced
            _another(tmp_path / "a")
            for _ in range(2):
                assert not reader.poll()
                assert reader.replaced
            assert len(contents(reader)) == 10


@pytest.mark.parametrize("replace", [_another, _nothing])
def test_verifying_a_directory_replaced_meanwhile_reports_no_corruption(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(10)))
        writer.flush()
        with CollectionReader(tmp_path / "a") as reader:
            replace(tmp_path / "a")
            reader.verify_segments()
            assert not reader.unverified
            assert len(contents(reader)) == 10


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_reader_reports_a_restored_backup_and_a_new_reader_opens_it(
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
        with CollectionReader(tmp_path / "a") as reader:
            assert reader.outdated == ""
            restore(tmp_path / "a")
            for _ in range(2):
                with pytest.raises(CollectionError, match=r"an earlier state of .* was restored"):
                    reader.poll()
            assert "was restored" in reader.outdated
            assert len(contents(reader)) == 20
    with CollectionReader(tmp_path / "a") as anew:
        assert len(contents(anew)) == 12


@pytest.mark.parametrize("restore", RESTORES)
def test_no_write_is_acknowledged_that_a_restored_collection_lacks(
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
