"""The document store: what comes back, and what is refused."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.documents import Document, DocumentStore

DOCUMENTS = [
    Document(f"id-{row}", f"title {row}" if row % 2 else "", f"text {row} – ünï\x00", row=row) for row in range(100)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a #?%41 documents.sqlite"  # characters that mean something in SQLite's addresses
    DocumentStore.write(path, DOCUMENTS)
    return path


def test_documents_come_back_by_row_in_the_order_asked_for(path: Path) -> None:
    with DocumentStore(path) as store:
        assert store.last_row == 99
        assert store.get([7, 3, 7]) == [DOCUMENTS[7], DOCUMENTS[3], DOCUMENTS[7]]
        assert store.get(np.array([99, 0], np.int64)) == [DOCUMENTS[99], DOCUMENTS[0]]
        assert store.get(range(100)) == DOCUMENTS
        assert store.get([]) == []


@pytest.mark.parametrize("row", [-1, 100])
def test_a_row_that_is_not_there_is_named_with_the_limit(path: Path, row: int) -> None:
    with DocumentStore(path) as store, pytest.raises(CollectionError, match=f"no row {row}: its last one is 99"):
        store.get([0, row])


def test_two_documents_with_one_id_are_refused_by_their_places(tmp_path: Path) -> None:
    documents = [*DOCUMENTS[:5], Document("id-2", "", "again")]
    with pytest.raises(CollectionError, match="documents 3 and 6 have the same id 'id-2'"):
        DocumentStore.write(tmp_path / "d", documents)


def test_no_documents_or_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectionError, match="no documents"):
        DocumentStore.write(tmp_path / "none", [])
    with pytest.raises(CollectionError, match="more than 99 documents"):
        DocumentStore.write(tmp_path / "many", DOCUMENTS, limit=99)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectionError, match="document 1 holds an unpaired surrogate"):
        DocumentStore.write(tmp_path / "d", [Document("a", "", "\ud800")])


def test_missing_foreign_and_corrupt_files_are_refused_by_name(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CollectionError, match="nowhere is missing"):
        DocumentStore(tmp_path / "nowhere")
    foreign = tmp_path / "foreign"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE documents (row, id, title, text)")
    connection.close()
    with pytest.raises(CollectionError, match="foreign is not a document store"):
        DocumentStore(foreign)
    path.write_bytes(b"SQLite format 2\x00" + path.read_bytes()[16:])
    with pytest.raises(CollectionError, match=r"documents\.sqlite is damaged"):
        DocumentStore(path)


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        for statement in statements:
            writer.execute(statement)
    return path


def test_a_table_with_another_schema_is_refused_before_it_is_read(path: Path) -> None:
    endless = "WITH RECURSIVE n(row) AS (SELECT 0 UNION ALL SELECT row + 1 FROM n) SELECT row, 'a', 'b', 'c' FROM n"
    changed(path, "ALTER TABLE documents RENAME TO others", f"CREATE VIEW documents AS {endless}")
    with pytest.raises(CollectionError, match="its tables have another schema"):
        DocumentStore(path)


def test_a_damaged_schema_is_no_error_of_another_kind(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(whole.index(b"tablefiles") - 12, whole.index(b"CREATE TABLE files")):  # its record in the schema
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with suppress(CollectionError):
                DocumentStore(path).close()


@pytest.mark.parametrize("value", ["NULL", "7", "x'00ff'", "CAST(x'ff00ff' AS TEXT)", "zeroblob(100000000)"])
def test_a_value_that_is_not_text_is_corruption(path: Path, value: str) -> None:
    with DocumentStore(changed(path, f"UPDATE documents SET text = {value} WHERE row = 3")) as store:
        store.get([2, 4])
        if value == "7":  # SQLite makes it the text "7"
            assert store.get([3])[0].text == "7"
            return
        with pytest.raises(CollectionError, match="is damaged"):
            store.get([3])
