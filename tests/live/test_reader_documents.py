"""A reader finds the documents of rows that a pool returned, even if it has not polled since."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.errors import InvalidFilter
from runtime.retrieval.attributes.filters import Comparison
from runtime.retrieval.live.reader import LiveDocumentStore
from tests.live.small_collections import documents, new_writer


def test_documents_of_segments_sealed_since_the_last_poll_are_found(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        reading = LiveDocumentStore(tmp_path / "a")
        for part in range(3):
            writer.upsert(documents(range(10 * part, 10 * part + 10)))
            writer.flush()  # the log that it was in goes
        writer.delete(["25"])
        rows = list(writer.state.rows_of(["3", "14", "29"]).values())
        assert [found and found.id for found in reading.get([*rows, 25])] == ["3", "14", "29", None]
        reading.close()


def test_an_unwritten_row_has_no_document(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        writer.upsert(documents(range(3)))
        reading = LiveDocumentStore(tmp_path / "a")
        assert reading.get([7]) == [None]
        reading.close()


def test_filters_are_checked_against_the_documents_of_now(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a") as writer:
        reading = LiveDocumentStore(tmp_path / "a")
        writer.upsert([replace(document, attributes={"fresh": 1}) for document in documents(range(3))])
        reading.check_filter(Comparison("fresh", "eq", (1,)))
        with pytest.raises(InvalidFilter, match="'fresh' is an integer; it cannot be compared with 'text'"):
            reading.check_filter(Comparison("fresh", "eq", ("text",)))
        with pytest.raises(InvalidFilter, match="there is no attribute 'other'"):
            reading.check_filter(Comparison("other", "eq", (1,)))
        reading.close()
