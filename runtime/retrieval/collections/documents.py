"""Documents of a sealed segment: one read-only SQLite file, one row a document.

A row number permanently denotes one text, and is the id that an index returns. For documents that were read from files,
the store also records the files with their checksums: see `runtime.retrieval.ingestion`.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.databases import ReadOnlyDatabase
from runtime.retrieval.passages import Attributes

MAX_DOCUMENTS = 50_000_000
_APPLICATION_ID, _BINARY_ID = 0x54524E59, 0x54524E4C  # "TRNY", "TRNL": in SQLite's own header
_VERSION, _BINARY = 2, 0
_DOCUMENTS = "CREATE TABLE documents (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, text TEXT"
_FORMATS = {  # version 1 has neither attributes nor files; `_BINARY` has attributes in MessagePack, and no files
    (_BINARY_ID, _BINARY): (f"{_DOCUMENTS}, attributes BLOB)",),
    (_APPLICATION_ID, 1): (f"{_DOCUMENTS})",),
    (_APPLICATION_ID, _VERSION): (
        f"{_DOCUMENTS}, attributes TEXT, file INTEGER)",
        "CREATE TABLE files (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL)",
        "CREATE TABLE sources (root TEXT NOT NULL, passage_tokens INTEGER NOT NULL)",
    ),
}
_COLUMNS = {
    _BINARY: "row, id, title, text, attributes, '' FROM documents",
    1: "row, id, title, text, '', '' FROM documents",
    2: "row, id, title, text, coalesce(attributes, ''), coalesce(path, '') "
    "FROM documents LEFT JOIN files ON file = number",
}
_MAX_IDS = 500  # or rows, in one SQL query
_BATCH_ROWS = 256  # that `all` reads at a time

Rows = Sequence[int] | NDArray[np.int64]


class Document(msgspec.Struct, frozen=True):
    """A passage of text with its id, title and attributes. `file`: see `Sources`. `row`: its permanent row; -1: none
    yet."""

    id: str
    title: str
    text: str
    attributes: Attributes = {}
    file: str = ""
    row: int = -1


class Sources(msgspec.Struct):
    """The files that documents were read from: SHA-256 in hexadecimal by path, relative to the folder `root`."""

    root: str
    passage_tokens: int
    files: dict[str, str] = {}


class DocumentStore:
    """Documents in a SQLite file, which any number of processes may read. Thread-safe.

    Methods raise the errors of `ReadOnlyDatabase`.
    """

    def __init__(self, path: Path, part: tuple[int, int] = (0, 1)) -> None:
        """Open a file that `write` wrote; of part (i, n), only the rows i, i + n, i + 2n, …

        Raises `CollectionError` if it is missing, foreign or damaged.
        """
        self.path, self._database = path, ReadOnlyDatabase(path, "document store", _FORMATS)
        self._version = self._database.version
        if part != (0, 1):  # a temporary name precedes others
            rows = f"SELECT * FROM main.documents WHERE row % {part[1]} = {part[0]}"
            list(self._database.rows(f"CREATE TEMP VIEW documents AS {rows}"))
        last = list(self._database.rows("SELECT row FROM documents ORDER BY row DESC LIMIT 1"))
        self.last_row = int(last[0][0]) if last else -1

    @staticmethod
    def write(
        path: Path, documents: Iterable[Document], *, sources: Sources | None = None, limit: int = MAX_DOCUMENTS
    ) -> int:
        """Write a new file; return how many documents it has. `sources` may be filled in while they are read.

        Documents without a row get the row behind the one before. Raises `CollectionError` for no documents, more than
        `limit`, or a duplicate id, and `sqlite3.Error`. The file is incomplete then, as after a crash.
        """
        if path.exists():
            raise CollectionError(f"{path} already exists")
        writer = sqlite3.connect(path, isolation_level=None)
        try:
            writer.execute("PRAGMA journal_mode = OFF")
            writer.execute("PRAGMA synchronous = OFF")
            writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            writer.execute(f"PRAGMA user_version = {_VERSION}")
            for table in _FORMATS[_APPLICATION_ID, _VERSION]:
                writer.execute(table)
            writer.execute("BEGIN")
            size = _insert(writer, documents, sources, limit)
            writer.execute("COMMIT")
        finally:
            writer.close()
        if size == 0:
            raise CollectionError("the source contains no documents")
        return size

    def find(self, rows: Rows, on_read: Callable[[Document], None] = lambda document: None) -> dict[int, Document]:
        """Return the documents of those rows that are here; `on_read` is called with each before the next is read, in
        any order."""
        by_row: dict[int, Document] = {}
        for columns in self._rows_in(f"{_COLUMNS[self._version]} WHERE row", [int(row) for row in rows]):
            by_row[columns[0]] = one = self._document(*columns)
            on_read(one)
        return by_row

    def get(self, rows: Rows, on_read: Callable[[Document], None] = lambda document: None) -> list[Document]:
        """Return the documents of rows, in order. Raises `CollectionError` for a row that is not here."""
        by_row = self.find(rows, on_read)
        missing = next((row for row in rows if row not in by_row), None)
        if missing is not None:
            raise CollectionError(f"{self.path} has no row {missing}: its last one is {self.last_row}")
        return [by_row[int(row)] for row in rows]

    def all(self) -> Iterator[Document]:
        """Yield the documents, by row."""
        first, sql = 0, f"SELECT {_COLUMNS[self._version]} WHERE row >= ? ORDER BY row LIMIT ?"
        while part := list(self._database.rows(sql, first, _BATCH_ROWS)):
            yield from (self._document(*columns) for columns in part)
            first = part[-1][0] + 1

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that exist."""
        return dict(self._rows_in("id, row FROM documents WHERE id", ids))

    def _rows_in(self, sql: str, values: Sequence[object]) -> Iterator[Any]:
        """Yield the rows of a query, which ends with a column's name, where that has one of these values."""
        for begin in range(0, len(values), _MAX_IDS):
            part = values[begin : begin + _MAX_IDS]
            yield from self._database.rows(f"SELECT {sql} IN ({', '.join('?' * len(part))})", *part)

    def sources(self) -> Sources | None:
        """Return the files that documents were read from; None if none were."""
        if self._version != _VERSION:
            return None
        source = list(self._database.rows("SELECT root, passage_tokens FROM sources"))
        if not source:
            return None
        (root, passage_tokens), files = source[0], dict(self._database.rows("SELECT path, sha256 FROM files"))
        texts = (root, *files, *files.values())
        if not all(isinstance(text, str) for text in texts) or not isinstance(passage_tokens, int):
            raise CollectionError(f"{self.path} is damaged: its table of sources has wrong types")
        return Sources(root, passage_tokens, files)

    def rows_by_file(self) -> dict[str, list[int]]:
        """Return the rows of the documents of each file of `sources`, by row."""
        rows: dict[str, list[int]] = defaultdict(list)
        if self._version == _VERSION:
            sql = "SELECT row, path FROM documents JOIN files ON file = number ORDER BY row"
            for row, path in self._database.rows(sql):
                rows[str(path)].append(int(row))
        return dict(rows)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _document(self, row: int, *columns: Any) -> Document:
        name, title, text, attributes, file = columns
        if not all(isinstance(value, str) for value in (name, title, text, file)):
            raise CollectionError(f"{self.path} is damaged: row {row} holds something other than text")
        decode = _decode_binary if self._version == _BINARY else _decode_attributes
        try:
            return Document(name, title, text, decode(attributes) if attributes else {}, file, row)
        except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
            raise CollectionError(f"{self.path} is damaged: row {row} has no attributes: {error}") from error


_decode_attributes = msgspec.json.Decoder(Attributes).decode
_decode_binary = msgspec.msgpack.Decoder(Attributes).decode


def _insert(writer: sqlite3.Connection, documents: Iterable[Document], sources: Sources | None, limit: int) -> int:
    size, row = 0, -1
    numbers: dict[str, int] = {}
    for document in documents:
        if size == limit:
            raise CollectionError(f"the source contains more than {limit:,} documents, the limit of a collection")
        row = document.row if document.row >= 0 else row + 1
        try:
            attributes = msgspec.json.encode(document.attributes).decode() if document.attributes else None
            file = numbers.setdefault(document.file, len(numbers)) if document.file else None
            columns = (row, document.id, document.title, document.text, attributes, file)
            writer.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", columns)
        except sqlite3.IntegrityError as error:
            before = "SELECT count(*) FROM documents WHERE row <= (SELECT row FROM documents WHERE id = ?)"
            (first,) = writer.execute(before, (document.id,)).fetchone()
            raise CollectionError(
                f"documents {first} and {size + 1} have the same id {document.id!r}: ids must be unique"
            ) from error
        except UnicodeEncodeError as error:
            raise CollectionError(f"document {size + 1} holds an unpaired surrogate: {error.reason}") from error
        size += 1
    if sources is not None:
        writer.execute("INSERT INTO sources VALUES (?, ?)", (sources.root, sources.passage_tokens))
        files = ((number, path, sources.files[path]) for path, number in numbers.items())
        writer.executemany("INSERT INTO files VALUES (?, ?, ?)", files)
    return size
