"""The documents of a collection: one read-only SQLite file beside the index, a row a document.

Rows count from 0 in the order of the source, and are the ids that the index returns.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError

MAX_DOCUMENTS = 50_000_000
_APPLICATION_ID = 0x54524E59  # "TRNY", in SQLite's own header: tells our files from any other database
_VERSION = 1
_TABLE = "CREATE TABLE documents (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, text TEXT)"
_MAX_TEXT_BYTES = 64 << 20

Rows = Sequence[int] | NDArray[np.int64]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of text with the id its source gave it."""

    id: str
    title: str
    text: str


class DocumentStore:
    """Documents in SQLite. Any number of processes and threads may read one file, and a store, at once."""

    def __init__(self, path: Path, size: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.size = size
        self._lock = threading.Lock()  # a row takes microseconds: a connection a thread would save nothing
        self._connection: sqlite3.Connection | None = None
        self._owner = 0

    @classmethod
    def create(cls, path: Path, documents: Iterable[Document], *, limit: int = MAX_DOCUMENTS) -> Self:
        """Write `documents` to a new file and open it.

        Raises `CollectionError` for no documents, over `limit` of them, or two with one id. A crash while it is written
        may leave half a file: build in a temporary directory and rename that.
        """
        if path.exists():
            raise CollectionError(f"{path} already exists")
        writer = sqlite3.connect(path, isolation_level=None)
        try:
            writer.execute("PRAGMA journal_mode = OFF")
            writer.execute("PRAGMA synchronous = OFF")
            writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            writer.execute(f"PRAGMA user_version = {_VERSION}")
            writer.execute(_TABLE)
            writer.execute("BEGIN")
            size = _insert(writer, documents, limit)
            writer.execute("COMMIT")
        finally:
            writer.close()
        if size == 0:
            raise CollectionError("there are no documents")
        return cls(path, size)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file that `create` wrote. Raises `CollectionError` for a missing, foreign or damaged file."""
        if not path.is_file():
            raise CollectionError(f"{path} is missing")
        store = cls(path, 0)

        def read(connection: sqlite3.Connection) -> int:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if (application_id, version) != (_APPLICATION_ID, _VERSION):
                raise CollectionError(f"{path} is not a document store of version {_VERSION}")
            tables = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = 'documents'").fetchall()
            if tables != [("table", _TABLE)]:  # another would hold other types, and a view could take for ever
                raise CollectionError(f"{path} is damaged: its table of documents is not the one that was made")
            (last,) = connection.execute("SELECT max(row) FROM documents").fetchone()
            return -1 if last is None else int(last)

        try:
            store.size = store._read(read) + 1
        except CollectionError:
            store.close()
            raise
        return store

    def get(self, rows: Rows) -> list[Document]:
        """The documents of these rows, in their order. Raises `CollectionError` for a row there is none of."""
        return self._read(lambda connection: [self._row(connection, int(row)) for row in rows])

    def close(self) -> None:
        """Let go of the file. Closing twice is fine; reading again reopens it."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(self, connection: sqlite3.Connection, row: int) -> Document:
        found = connection.execute("SELECT id, title, text FROM documents WHERE row = ?", (row,)).fetchone()
        if found is None:
            raise CollectionError(f"{self.path} has no row {row}: its rows are 0 to {self.size - 1}")
        if not all(isinstance(value, str) for value in found):
            raise CollectionError(f"{self.path} is damaged: row {row} holds something other than text")
        return Document(*found)

    def _read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._lock:
            try:
                return query(self._connected())
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise CollectionError(f"{self.path} is damaged: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._owner != os.getpid():  # SQLite's connections do not survive a fork
            # immutable: no locks, no journal, no write however the file's permissions are
            address = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_BYTES)
            self._owner = os.getpid()
        return self._connection


def _insert(writer: sqlite3.Connection, documents: Iterable[Document], limit: int) -> int:
    size = 0
    for document in documents:
        if size == limit:
            raise CollectionError(f"there are more than {limit:,} documents, the limit of a collection")
        try:
            writer.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?)", (size, document.id, document.title, document.text)
            )
        except sqlite3.IntegrityError as error:
            (first,) = writer.execute("SELECT row FROM documents WHERE id = ?", (document.id,)).fetchone()
            raise CollectionError(
                f"document {size + 1} has the id {document.id!r} of document {first + 1}: ids must differ"
            ) from error
        except UnicodeEncodeError as error:
            raise CollectionError(f"document {size + 1} holds an unpaired surrogate: {error.reason}") from error
        size += 1
    return size
