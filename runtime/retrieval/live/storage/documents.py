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
_AT_ONCE = 500  # ids in one question
_attributes = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | list[str]])


class StoredDocument(msgspec.Struct, frozen=True):
    """A document as it was stored, under the row that is its own for ever."""

    row: int
    id: str
    title: str
    text: str
    attributes: Attributes


class SegmentDocuments:
    """Documents by row and by id. Any number of threads may read."""

    def __init__(self, path: Path) -> None:
        """Open a file that `write` wrote. Raises `CollectionError`."""
        self.path = path
        self._lock = threading.Lock()
        self._connection = open_table(path, _APPLICATION_ID, "documents", _TABLE)

    @staticmethod
    def write(path: Path, documents: Iterable[StoredDocument]) -> None:
        """Write a new file. Raises `sqlite3.Error`, with half a file there."""
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
        """Raises `CollectionError` for a row there is none of."""
        found = []
        for row in rows:
            columns = self._rows("SELECT row, id, title, text, attributes FROM documents WHERE row = ?", (int(row),))
            found.append(self._document(columns[0] if columns else (row, None)))
        return found

    def all(self) -> list[StoredDocument]:
        """Every document, by row."""
        rows = self._rows("SELECT row, id, title, text, attributes FROM documents ORDER BY row", ())
        return [self._document(columns) for columns in rows]

    def texts(self, first: int, limit: int) -> list[tuple[int, str, str]]:
        """The next rows from `first` on, with their titles and texts. Raises `CollectionError`."""
        sql = "SELECT row, title, text FROM documents WHERE row >= ? ORDER BY row LIMIT ?"
        return [(int(row), str(title), str(text)) for row, title, text in self._rows(sql, (first, limit))]

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """The rows of those of some ids that are here."""
        found: dict[str, int] = {}
        for begin in range(0, len(ids), _AT_ONCE):
            part = tuple(ids[begin : begin + _AT_ONCE])
            placeholders = ", ".join("?" * len(part))
            found.update(self._rows(f"SELECT id, row FROM documents WHERE id IN ({placeholders})", part))
        return found

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    def _rows(self, question: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(question, values).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise CollectionError(f"{self.path} is damaged: {error}") from error

    def _document(self, columns: tuple[Any, ...]) -> StoredDocument:
        row, *texts = columns
        if len(texts) != 4 or not all(isinstance(text, str) for text in texts[:3]) or not isinstance(texts[3], bytes):
            raise CollectionError(f"{self.path} has no document in row {row}, or a damaged one")
        try:
            return StoredDocument(row, texts[0], texts[1], texts[2], _attributes.decode(texts[3]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CollectionError(f"{self.path} is damaged in row {row}: {error}") from error
