"""The documents of a sealed segment: one SQLite file, written once."""

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import CollectionError
from runtime.retrieval.collections.documents import open_table
from runtime.retrieval.passages import Attributes

_APPLICATION_ID = 0x54524E4C  # "TRNL"
_TABLE = (
    "CREATE TABLE documents (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, text TEXT, attributes BLOB)"
)
_MAX_IDS = 500  # in one SQL query
_attributes = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | list[str]])


class StoredDocument(msgspec.Struct, frozen=True):
    """A stored document, under its permanent row."""

    row: int
    id: str
    title: str
    text: str
    attributes: Attributes


class SegmentDocuments:
    """Documents by row and by id. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open a file that `write` wrote. Raises `CollectionError`."""
        self.path = path
        self._lock = threading.Lock()
        self._connection = open_table(path, _APPLICATION_ID, "documents", _TABLE)

    @staticmethod
    def write(path: Path, documents: Iterable[StoredDocument]) -> None:
        """Write a new file. Raises `sqlite3.Error`, and leaves an incomplete file then."""
        writer = sqlite3.connect(path, isolation_level=None)
        try:
            writer.execute("PRAGMA journal_mode = OFF")
            writer.execute("PRAGMA synchronous = OFF")
            writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            writer.execute(_TABLE)
            writer.execute("BEGIN")
            writer.executemany(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
                ((d.row, d.id, d.title, d.text, msgspec.msgpack.encode(d.attributes)) for d in documents),
            )
            writer.execute("COMMIT")
        finally:
            writer.close()

    def get(self, rows: Sequence[int]) -> list[StoredDocument]:
        """Return the documents of rows. Raises `CollectionError` for a row that does not exist."""
        return [self.find(row) or self._document((row, None)) for row in rows]

    def find(self, row: int) -> StoredDocument | None:
        """Return the document of a row, or None if it is not here. Raises `CollectionError`."""
        columns = self._query("SELECT row, id, title, text, attributes FROM documents WHERE row = ?", (int(row),))
        return self._document(columns[0]) if columns else None

    def all(self) -> list[StoredDocument]:
        """Return all documents, by row."""
        rows = self._query("SELECT row, id, title, text, attributes FROM documents ORDER BY row", ())
        return [self._document(columns) for columns in rows]

    def texts(self, first: int, limit: int) -> list[tuple[int, str, str]]:
        """Return up to `limit` rows from `first` on, with their titles and texts. Raises `CollectionError`."""
        sql = "SELECT row, title, text FROM documents WHERE row >= ? ORDER BY row LIMIT ?"
        return [(int(row), str(title), str(text)) for row, title, text in self._query(sql, (first, limit))]

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that exist."""
        found: dict[str, int] = {}
        for begin in range(0, len(ids), _MAX_IDS):
            part = tuple(ids[begin : begin + _MAX_IDS])
            placeholders = ", ".join("?" * len(part))
            found.update(self._query(f"SELECT id, row FROM documents WHERE id IN ({placeholders})", part))
        return found

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    def _query(self, sql: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(sql, values).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise CollectionError(f"{self.path} is damaged: {error}") from error

    def _document(self, columns: tuple[Any, ...]) -> StoredDocument:
        row, *texts = columns
        if len(texts) != 4 or not all(isinstance(text, str) for text in texts[:3]) or not isinstance(texts[3], bytes):
            raise CollectionError(f"{self.path}: the document in row {row} is missing or damaged")
        try:
            return StoredDocument(row, texts[0], texts[1], texts[2], _attributes.decode(texts[3]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CollectionError(f"{self.path} is damaged in row {row}: {error}") from error
