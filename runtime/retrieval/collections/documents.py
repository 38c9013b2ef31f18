"""Document store of a collection: one read-only SQLite file beside the index, one row a document.

Rows count from 0 in source order, and are the ids that the index returns. For documents that were read from files, the
store also records the files with their checksums: see `runtime.retrieval.ingestion`.
"""

import os
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.passages import Attributes

MAX_DOCUMENTS = 50_000_000
_APPLICATION_ID = 0x54524E59  # "TRNY", in SQLite's own header: distinguishes our files from other databases
_VERSION = 2
_TABLES = {  # by version; version 1 has neither attributes nor files
    1: ("CREATE TABLE documents (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, text TEXT)",),
    2: (
        "CREATE TABLE documents (row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, text TEXT, "
        "attributes TEXT, file INTEGER)",
        "CREATE TABLE files (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL)",
        "CREATE TABLE sources (root TEXT NOT NULL, passage_tokens INTEGER NOT NULL)",
    ),
}
_MAX_TEXT_BYTES = 64 << 20
_BATCH_ROWS = 256  # rows that `texts` reads at a time

Rows = Sequence[int] | NDArray[np.int64]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of text with the id from its source, its title and its attributes. `file`: see `Sources`."""

    id: str
    title: str
    text: str
    attributes: Attributes = field(default_factory=dict, hash=False)
    file: str = ""


@dataclass(slots=True)
class Sources:
    """The files that documents were read from: SHA-256 in hexadecimal by path, relative to the folder `root`."""

    root: str
    passage_tokens: int
    files: dict[str, str] = field(default_factory=dict)


class DocumentStore:
    """Documents in a SQLite file, which any number of processes may read. Thread-safe."""

    def __init__(self, path: Path, size: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.size = size
        self.file_count = 0  # files in `sources`; each document of one that has one document a line counts
        self._lock = threading.Lock()  # a row takes microseconds, so a connection a thread would not be faster
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        self._version = _VERSION

    @classmethod
    def create(
        cls, path: Path, documents: Iterable[Document], *, sources: Sources | None = None, limit: int = MAX_DOCUMENTS
    ) -> Self:
        """Write `documents` to a new file and open it. `sources` may be filled in while they are read.

        Raises `CollectionError` for no documents, more than `limit`, or a duplicate id. A crash may leave an incomplete
        file: build in a temporary directory and rename that.
        """
        if path.exists():
            raise CollectionError(f"{path} already exists")
        writer = sqlite3.connect(path, isolation_level=None)
        try:
            writer.execute("PRAGMA journal_mode = OFF")
            writer.execute("PRAGMA synchronous = OFF")
            writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            writer.execute(f"PRAGMA user_version = {_VERSION}")
            for table in _TABLES[_VERSION]:
                writer.execute(table)
            writer.execute("BEGIN")
            size = _insert(writer, documents, sources, limit)
            writer.execute("COMMIT")
        finally:
            writer.close()
        if size == 0:
            raise CollectionError("the source contains no documents")
        return cls(path, size)

    @classmethod
    def open(cls, path: Path, size: int | None = None) -> Self:
        """Open a file that `create` wrote. Raises `CollectionError` if it is missing, foreign or damaged, or if its
        number of documents is not the number of vectors (`size`)."""
        if not path.is_file():
            raise CollectionError(f"{path} is missing")
        store = cls(path, 0)

        def read(connection: sqlite3.Connection) -> int:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application_id != _APPLICATION_ID or version not in _TABLES:
                raise CollectionError(f"{path} is not a document store of version {_VERSION} or earlier")
            tables = connection.execute("SELECT type, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
            # Other tables could hold other types, and a query of a view could run forever.
            if sorted(tables) != sorted(("table", table) for table in _TABLES[version]):
                raise CollectionError(f"{path} is damaged: its tables have another schema")
            store._version = version
            if version > 1:
                (store.file_count,) = connection.execute(_COUNT_FILES).fetchone()
            (last,) = connection.execute("SELECT max(row) FROM documents").fetchone()
            return -1 if last is None else int(last)

        try:
            store.size = store._read(read) + 1
            if size not in (None, store.size):
                raise CollectionError(f"{path} has {store.size} documents for {size} vectors")
        except CollectionError:
            store.close()
            raise
        return store

    def get(self, rows: Rows, on_read: Callable[[Document], None] = lambda document: None) -> list[Document]:
        """Return the documents of these rows, in order; `on_read` is called with each before the next is read.

        Raises `CollectionError` for a row that does not exist.
        """

        def read(connection: sqlite3.Connection) -> list[Document]:
            found = []
            for row in rows:
                found.append(self._row(connection, int(row)))
                on_read(found[-1])
            return found

        return self._read(read)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the title and the text of every row. Raises `CollectionError`."""
        for begin in range(0, self.size, _BATCH_ROWS):
            rows = range(begin, min(begin + _BATCH_ROWS, self.size))
            yield from ((found.title, found.text) for found in self.get(rows))

    def sources(self) -> Sources | None:
        """Return the files that the documents were read from; None if they were not read from files."""

        def read(connection: sqlite3.Connection) -> Sources | None:
            source = connection.execute("SELECT root, passage_tokens FROM sources").fetchone()
            if source is None:
                return None
            files = dict(connection.execute("SELECT path, sha256 FROM files").fetchall())
            texts = (source[0], *files, *files.values())
            if not all(isinstance(text, str) for text in texts) or not isinstance(source[1], int):
                raise CollectionError(f"{self.path} is damaged: its table of sources has wrong types")
            return Sources(source[0], source[1], files)

        return self._read(read) if self._version > 1 else None

    def rows_by_file(self) -> dict[str, list[int]]:
        """Return the rows of the documents of each file of `sources`."""

        def read(connection: sqlite3.Connection) -> dict[str, list[int]]:
            rows: dict[str, list[int]] = defaultdict(list)
            for row, path in connection.execute("SELECT row, path FROM documents JOIN files ON file = number"):
                rows[str(path)].append(int(row))
            return {path: sorted(found) for path, found in rows.items()}

        return self._read(read) if self._version > 1 else {}

    def close(self) -> None:
        """Close the file. Idempotent; the next read reopens it."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(self, connection: sqlite3.Connection, row: int) -> Document:
        found = connection.execute(_SELECT[self._version], (row,)).fetchone()
        if found is None:
            raise CollectionError(f"{self.path} has no row {row}: its rows are 0 to {self.size - 1}")
        if not all(isinstance(value, str) for value in found):
            raise CollectionError(f"{self.path} is damaged: row {row} holds something other than text")
        name, title, text, attributes, file = found
        try:
            return Document(name, title, text, _decode_attributes(attributes) if attributes else {}, file)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise CollectionError(f"{self.path} is damaged: row {row} has no attributes: {error}") from error

    def _read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._lock:
            try:
                return query(self._connected())
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise CollectionError(f"{self.path} is damaged: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._owner != os.getpid():  # a SQLite connection must not be used after a fork
            self._connection = read_only(self.path)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_BYTES)
            self._owner = os.getpid()
        return self._connection


def read_only(path: Path) -> sqlite3.Connection:
    """Connect to an immutable file: without locks or a journal, so that no write permission is needed. Raises
    `CollectionError`."""
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        return sqlite3.connect(address, uri=True, check_same_thread=False)
    except sqlite3.Error as error:
        raise CollectionError(f"{path} is damaged: {error}") from error


def open_table(path: Path, application_id: int, name: str, table: str) -> sqlite3.Connection:
    """Connect, as `read_only`, to a file with exactly this table. Raises `CollectionError` if the file is missing,
    foreign or damaged."""
    if not path.is_file():
        raise CollectionError(f"{path} is missing")
    connection = read_only(path)
    try:
        (own,) = connection.execute("PRAGMA application_id").fetchone()
        tables = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (name,)).fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        raise CollectionError(f"{path} is damaged: {error}") from error
    if own != application_id or tables != [("table", table)]:
        connection.close()
        raise CollectionError(f"{path} is damaged: its table {name!r} has another schema")
    return connection


_SELECT = {
    1: "SELECT id, title, text, '', '' FROM documents WHERE row = ?",
    2: "SELECT id, title, text, coalesce(attributes, ''), coalesce(path, '') "
    "FROM documents LEFT JOIN files ON file = number WHERE row = ?",
}
_COUNT_FILES = """
WITH lines AS (SELECT number FROM files WHERE path GLOB '*.jsonl' OR path GLOB '*.jsonl.gz')
SELECT (SELECT count(*) FROM files) - (SELECT count(*) FROM lines)
     + CASE WHEN EXISTS (SELECT 1 FROM lines) THEN (SELECT count(*) FROM documents WHERE file IN lines) ELSE 0 END"""
_decode_attributes = msgspec.json.Decoder(Attributes).decode


def _insert(writer: sqlite3.Connection, documents: Iterable[Document], sources: Sources | None, limit: int) -> int:
    size = 0
    numbers: dict[str, int] = {}
    for document in documents:
        if size == limit:
            raise CollectionError(f"the source contains more than {limit:,} documents, the limit of a collection")
        try:
            attributes = msgspec.json.encode(document.attributes).decode() if document.attributes else None
            file = numbers.setdefault(document.file, len(numbers)) if document.file else None
            row = (size, document.id, document.title, document.text, attributes, file)
            writer.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            (first,) = writer.execute("SELECT row FROM documents WHERE id = ?", (document.id,)).fetchone()
            raise CollectionError(
                f"documents {first + 1} and {size + 1} have the same id {document.id!r}: ids must be unique"
            ) from error
        except UnicodeEncodeError as error:
            raise CollectionError(f"document {size + 1} holds an unpaired surrogate: {error.reason}") from error
        size += 1
    if sources is not None:
        writer.execute("INSERT INTO sources VALUES (?, ?)", (sources.root, sources.passage_tokens))
        files = ((number, path, sources.files[path]) for path, number in numbers.items())
        writer.executemany("INSERT INTO files VALUES (?, ?, ?)", files)
    return size
