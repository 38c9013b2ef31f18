"""A reader finds the documents of rows that a pool returned, even if it has not polled since."""

from pathlib import Path

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
