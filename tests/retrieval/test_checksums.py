"""Checksums of files are verified; files of two builds are never opened together."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import SegmentInfo, checksum_file, verify_file
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.state import Loaded, State
from tests.pool.rebuilds import build


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "codes.npy"
    path.write_bytes(bytes(range(256)) * 20_000)
    return path


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"x" + b[1:], lambda b: b""])
def test_a_truncated_grown_or_modified_file_is_named(file: Path, change: Callable[[bytes], bytes]) -> None:
    checksum = checksum_file(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CollectionError, match=r"codes\.npy is damaged: its checksum"):
        verify_file(file, checksum)


def test_a_file_that_cannot_be_opened_or_read_is_named(tmp_path: Path, file: Path) -> None:
    with pytest.raises(CollectionError, match=r"missing\.npy cannot be read"):
        verify_file(tmp_path / "missing.npy", checksum_file(file))
    with pytest.raises(CollectionError, match="cannot be read: Is a directory"):
        verify_file(tmp_path, checksum_file(file))


def test_an_identity_covers_every_array(tmp_path: Path) -> None:
    first, second = build(tmp_path / "docs", 1), build(tmp_path / "docs", 2)
    assert first != second
    assert build(tmp_path / "again", 1) == first
    meta = tmp_path / "docs" / "segments/0/index" / "meta.json"
    text = meta.read_text()
    meta.write_text(text.replace('"sha256": "', '"sha256": "0', 1)[:-2] + "\n")
    with pytest.raises(CollectionError, match=r"meta\.json is damaged"):
        CollectionReader(tmp_path / "docs")


def test_files_that_are_replaced_while_they_are_opened_are_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "docs", 1)
    second = build(tmp_path / "next", 2)
    open_segments = State.open_segments

    def replacing(state: State, infos: Sequence[SegmentInfo]) -> Loaded:
        if (tmp_path / "next").exists():
            shutil.rmtree(tmp_path / "docs")
            (tmp_path / "next").rename(tmp_path / "docs")
        return open_segments(state, infos)

    monkeypatch.setattr(State, "open_segments", replacing)
    with CollectionReader(tmp_path / "docs") as found:
        assert found.identity == second
        assert [one and one.text for one in found.documents([0])] == ["text 0 of generation 2"]


def test_a_collection_that_is_replaced_at_every_attempt_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "docs", 1)
    generation, open_segments = 1, State.open_segments

    def replacing(state: State, infos: Sequence[SegmentInfo]) -> Loaded:
        nonlocal generation
        generation += 1
        opened = open_segments(state, infos)
        build(tmp_path / "docs", generation)
        return opened

    monkeypatch.setattr(State, "open_segments", replacing)
    with pytest.raises(CollectionError, match="was replaced by another collection while it was opened"):
        CollectionReader(tmp_path / "docs")
