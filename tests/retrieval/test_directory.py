"""Where a collection is built: what killed builds left is removed, nothing else is, and a full disk is said."""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import EXIT_BUSY, EXIT_CONFIG, CollectionBusy, CollectionError, NoRoom, OutputRefused
from runtime.retrieval.collections import bulk_load, directory
from runtime.retrieval.collections.directory import atomic_directory
from runtime.retrieval.collections.disk import LOCK, writing
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from tests.retrieval.long_builds import long_source, wait_until_it_reads

VECTORS = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)


def build(out: Path) -> None:
    bulk_load.build(VECTORS, out, degree=4, force=True)


def full_database() -> sqlite3.Error:
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count = 1")
    try:
        database.execute("CREATE TABLE full (text TEXT)")
    except sqlite3.Error as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), EXIT_BUSY),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), EXIT_BUSY),
        (OSError(errno.EFBIG, "File too large"), EXIT_BUSY),
        (OSError("256000 requested and 67552 written"), EXIT_BUSY),  # numpy's, of a file that is full
        (full_database(), EXIT_BUSY),
        (MemoryError(), EXIT_BUSY),
        (OSError(errno.EACCES, "Permission denied"), EXIT_CONFIG),
        (sqlite3.DatabaseError("file is not a database"), EXIT_CONFIG),
    ],
    ids=repr,
)
def test_too_little_room_is_told_from_what_would_not_help_to_try_again(
    tmp_path: Path, error: Exception, code: int
) -> None:
    with (
        pytest.raises(CollectionError, match="docs cannot be built") as raised,
        atomic_directory(tmp_path / "docs", replace=False),
    ):
        raise error
    assert raised.value.exit_code == code


def test_numpys_error_of_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    with (
        pytest.raises(NoRoom, match=r"docs cannot be built: no room for a file: 9 requested and 5 written bytes$"),
        atomic_directory(tmp_path / "docs", replace=False),
    ):
        raise OSError("9 requested and 5 written")


def test_an_error_of_another_file_names_it(tmp_path: Path) -> None:
    with (
        pytest.raises(CollectionError, match=r"docs cannot be built: No such file or directory: .*/source\.npy$"),
        atomic_directory(tmp_path / "docs", replace=False),
    ):
        (tmp_path / "source.npy").read_bytes()
    assert os.listdir(tmp_path) == []


def test_what_a_build_that_was_killed_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    source, out = long_source(tmp_path), tmp_path / "parent" / "docs"
    command: list[str | Path] = [sys.executable, "-m", "launchers.main", "index", "build", source, "--out", out]
    child = subprocess.Popen([*command, "--embedder", "hashing-64"], stderr=subprocess.DEVNULL)
    try:
        wait_until_it_reads(out)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    finally:
        child.kill()
        child.wait(timeout=60)
    (left,) = out.parent.iterdir()
    half = left / f".index-1.{'0a' * 16}"
    half.mkdir()
    (half / "codes.npy").touch()
    (left / "log" / f".{0:020}.log.part").touch()
    (left / "segments" / "0" / "keywords.sqlite-journal").touch()
    build(out)
    assert os.listdir(out.parent) == ["docs"]


def test_what_a_build_that_was_killed_while_it_removed_the_old_collection_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **options: Any) -> None:
        if path.parent == tmp_path / ".docs.building":
            (path.parent / "MANIFEST").unlink(missing_ok=True)
            raise KeyboardInterrupt
        remove(path, **options)

    remove = shutil.rmtree
    build(tmp_path / "docs")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "docs")
    assert CollectionReader.verify(tmp_path / "docs") == ""
    build(tmp_path / "docs")
    assert os.listdir(tmp_path) == ["docs"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_build_begins_in_a_directory_whose_files_are_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def removed(path: Path, **options: Any) -> None:
        others.update(name for name in os.listdir(path) if path == left and name != LOCK)
        remove(path, **options)

    def fail(stage: str, part: float) -> None:
        if fails:
            raise ZeroDivisionError

    others, left, remove = set[str](), tmp_path / ".docs.building", shutil.rmtree
    build(tmp_path / "docs")
    monkeypatch.setattr(shutil, "rmtree", removed)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        bulk_load.build(VECTORS, tmp_path / "docs", degree=4, force=True, progress=fail)
    assert not others, "its lock is removed with these"
    assert os.listdir(tmp_path) == ["docs"]


def test_a_collection_that_is_replaced_is_at_its_place_at_every_moment(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    build(out)
    watch = "import os, sys\nprint(flush=True)\nwhile os.path.exists(sys.argv[2]):\n    os.stat(sys.argv[1])"
    (tmp_path / "go").touch()
    watcher = subprocess.Popen([sys.executable, "-c", watch, out, tmp_path / "go"], stdout=subprocess.PIPE)
    try:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        for _ in range(30):
            build(out)
        (tmp_path / "go").unlink()
        assert watcher.wait(timeout=60) == 0, "the directory was missing"
    finally:
        watcher.kill()
        watcher.communicate()


def test_a_collection_is_replaced_on_a_file_system_that_cannot_exchange_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "docs")
    before = (tmp_path / "docs").stat().st_ino
    monkeypatch.setattr(directory, "_exchange", lambda *_: False)
    build(tmp_path / "docs")
    assert os.listdir(tmp_path) == ["docs"]
    assert (tmp_path / "docs").stat().st_ino != before


def test_a_build_in_the_place_of_a_collection_that_has_a_writer_is_refused_before_it_reads(tmp_path: Path) -> None:
    def documents() -> Iterator[Document]:
        pytest.fail("it reads")
        yield

    build(tmp_path / "docs")
    with writing(tmp_path / "docs"), pytest.raises(CollectionBusy, match="docs has a writer already: process"):
        bulk_load.build(documents(), tmp_path / "docs", vectors=VECTORS, force=True)


def test_a_second_build_of_the_same_directory_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    with atomic_directory(out, replace=True) as building:
        (building / "documents.sqlite").touch()
        (building / "temporary").touch()
        with pytest.raises(CollectionBusy, match=r"\.docs\.building has a writer already: process"):
            build(out)
        assert (building / "documents.sqlite").exists()
        (building / "documents.sqlite").unlink()
        (building / "temporary").unlink()
        build(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["docs", "other"]


@pytest.mark.parametrize("when", ["before its lock is opened", "before its lock is held"])
def test_a_build_that_puts_its_directory_in_place_when_another_begins_does_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    out, opened = tmp_path / "docs", os.open
    (tmp_path / ".docs.building").mkdir()

    def open_meanwhile(path: Any, *options: Any, **named: Any) -> int:
        monkeypatch.undo()
        lock = opened(path, *options, **named) if when == "before its lock is held" else -1
        Path(path).parent.rename(tmp_path / "in place")
        return lock if lock >= 0 else opened(path, *options, **named)

    monkeypatch.setattr(os, "open", open_meanwhile)
    build(out)
    assert sorted(os.listdir(tmp_path)) == ["docs", "in place"]


@pytest.mark.parametrize("name", ["notes.txt", "index/notes.txt", "documents.sqlite"])
def test_what_trinity_did_not_write_is_never_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / ".docs.building" / name
    path.parent.mkdir(parents=True)
    if name == "documents.sqlite":
        path.symlink_to(tmp_path)
    else:
        path.touch()
    before = sorted((tmp_path / ".docs.building").rglob("*"))
    with pytest.raises(OutputRefused, match="is not part of a collection"):
        build(tmp_path / "docs")
    assert sorted((tmp_path / ".docs.building").rglob("*")) == before, "no file is added either"
    assert os.path.lexists(path)
    assert os.listdir(tmp_path) == [".docs.building"]


def test_a_link_in_place_of_the_directory_of_a_build_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".docs.building").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CollectionError, match="cannot be made"):
        build(tmp_path / "docs")
    assert sorted(os.listdir(tmp_path)) == [".docs.building", "elsewhere"]
