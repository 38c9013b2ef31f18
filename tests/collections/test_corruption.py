"""Torn and corrupt files of a collection: truncated, reported, or an error."""

import random
import shutil
import struct
from pathlib import Path

import pytest

from runtime.errors import (
    CollectionError,
)
from runtime.retrieval.collections.log import HEADER, RECORD, header_of, log_path
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search
from runtime.retrieval.collections.validation import UpsertDocument
from tests.collections.small_collections import contents, document, documents, new_writer, open_writer, vector_of


def _records(path: Path) -> list[int]:
    """Where the records of a log file end."""
    content, ends = path.read_bytes(), [HEADER.size]
    while ends[-1] < len(content):
        ends.append(ends[-1] + RECORD.size + struct.unpack_from("<I", content, ends[-1] + 4)[0])
    return ends


def test_a_torn_log_is_truncated_after_the_last_whole_record_and_reported(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        for number in range(2):
            writer.upsert([document(str(number), number)])
    path = log_path(tmp_path / "a", 0)
    content, ends = path.read_bytes(), _records(path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        kept = max([number for number, end in enumerate(ends) if end <= size], default=0)
        whole = size == 0 or size in ends
        assert (CollectionReader.verify(tmp_path / "a") == "") == whole
        with open_writer(tmp_path / "a") as writer:
            assert (writer.repaired == "") == whole
            assert len(contents(writer)) == kept
            writer.upsert([document("more", 99)])
        with CollectionReader(tmp_path / "a") as reader:
            assert reader.log.torn_bytes == 0
            assert len(contents(reader)) == kept + 1


def test_a_log_corrupt_before_whole_records_is_an_error_and_is_not_truncated(
    tmp_path: Path,
) -> None:
    whole, path = tmp_path / "whole", log_path(tmp_path / "whole", 0)
    with new_writer(whole) as writer, CollectionReader(whole) as reader:
        for number in range(3):
            writer.upsert([document(str(number), number)])
            if number == 0:
                reader.poll()
        content = path.read_bytes()
        ends = _records(path)
        for place in range(ends[1], ends[2], 3):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
            for _ in range(2):
                with pytest.raises(CollectionError, match="damaged"):
                    reader.poll()
            assert set(contents(reader)) == {"0"}
        path.write_bytes(content)
        reader.poll()
        assert set(contents(reader)) == {"0", "1", "2"}
    for place in range(0, ends[2], 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        for open_collection in (CollectionReader, open_writer):
            with pytest.raises(CollectionError, match="damaged"):
                open_collection(whole)
        assert len(path.read_bytes()) == len(content)


def test_a_reader_waits_for_the_rest_of_the_last_record_unless_a_newer_file_exists(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", log_path(tmp_path / "whole", 0)
    with new_writer(whole) as writer:
        for number in range(2):
            writer.upsert([document(str(number), number)])
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with CollectionReader(whole) as reader:
        assert set(contents(reader)) == {"0"}
        assert not reader.poll()
        log_path(whole, 2).write_bytes(header_of(reader.description.identity, 2))
        with pytest.raises(CollectionError, match="not the last file of the log"):
            reader.poll()
        path.write_bytes(content)
        assert reader.poll()
        assert set(contents(reader)) == {"0", "1"}


def test_a_text_that_looks_like_a_record_is_not_parsed_as_one(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert([document("0", 0)])
    stolen = log_path(tmp_path / "a", 0).read_bytes()[HEADER.size :]
    with new_writer(tmp_path / "b") as writer:
        writer.upsert([document("0", 0)])
        writer.upsert([UpsertDocument("1", stolen.decode("latin-1"), vector=vector_of(1))])
    path = log_path(tmp_path / "b", 0)
    path.write_bytes(path.read_bytes()[:-1])
    with open_writer(tmp_path / "b") as writer:
        assert "an incomplete record" in writer.repaired
        assert contents(writer) == {"0": "text 0"}


def test_any_corrupt_file_raises_a_typed_error(tmp_path: Path) -> None:
    chance = random.Random(1)
    whole = tmp_path / "whole"
    with new_writer(whole) as writer:
        writer.upsert(documents(range(20), tags=["a", "b"], year=3))
        writer.flush()
        writer.delete(["3", "4"])
        writer.upsert(documents(range(20, 25)))
        writer.flush()
        writer.upsert(documents(range(25, 28)))
        expected = contents(writer)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.name != "writer.lock"]
    assert len(files) > 15
    for name in files:
        content = (whole / name).read_bytes()
        hostile = [b"", chance.randbytes(len(content)), content[: len(content) // 2], content * 2]
        for _ in range(2):
            place = chance.randrange(len(content))
            hostile.append(content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :])
        for bad in hostile:
            if bad == content:
                continue
            damaged = tmp_path / "damaged"
            shutil.copytree(whole, damaged)
            (damaged / name).write_bytes(bad)
            for use in (CollectionReader.verify, _opened_and_searched):
                try:
                    use(damaged)
                except CollectionError:
                    continue
                if use == CollectionReader.verify and name.parts[0] != "log":
                    pytest.fail(f"the corruption of {name} was not detected")
            shutil.rmtree(damaged)
    with open_writer(whole) as writer:
        assert contents(writer) == expected


def _opened_and_searched(directory: Path) -> None:
    """Open it as readers do, too."""
    with open_writer(directory) as writer:
        search(writer.state, vector_of(1)[None], 5)
        contents(writer)


def test_a_reader_that_could_not_open_the_log_recovers(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer, CollectionReader(tmp_path / "a") as reader:
        writer.upsert(documents(range(5)))
        writer.flush()
        first = contents(writer)
        writer.upsert(documents(range(5, 10)))
        writer.flush()  # the log with these is gone before the reader has opened it
        log = log_path(tmp_path / "a", writer.state.sequence)
        log.rename(tmp_path / "away")
        with pytest.raises(CollectionError, match="cannot be read"):
            reader.poll()
        assert contents(reader) == first
        (tmp_path / "away").rename(log)
        writer.upsert(documents(range(10, 12)))
        reader.poll()
        assert contents(reader) == contents(writer)
