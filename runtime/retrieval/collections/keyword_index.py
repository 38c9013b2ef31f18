"""Keyword index of a collection: BM25 over titles and texts by SQLite's FTS5, by row. It does not contain the texts."""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, CollectionReplaced, DeadlineExceeded
from runtime.retrieval.collections.documents import open_table

MAX_WORDS = 32  # in a query
MAX_ROWS = 1 << 12  # that a query ranks: about 3 ms
_APPLICATION_ID = 0x54524E57  # "TRNW"
_TABLE = "CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='porter unicode61')"
_WORD = re.compile(r"[^\W_]+")
_MAX_CHARACTERS = 64  # longer words are cut
_OPERATIONS = 1000  # of SQLite between two checks of the deadline
_FETCH_ROWS = 256  # rows fetched at a time

Rows = NDArray[np.int64]
Texts = Iterable[tuple[int, str, str]]  # row, title, text
Allowed = Callable[[Rows], NDArray[np.bool_]]


class KeywordIndex:
    """An FTS5 table of documents by row. Thread-safe; searches are serialised by a lock."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Use `create`, `open` or `temporary`."""
        self._connection, self._name = connection, name
        self._lock = threading.Lock()

    @staticmethod
    def create(path: Path, texts: Texts) -> None:
        """Write a new file. Raises `sqlite3.Error`, and leaves an incomplete file then."""
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            index = KeywordIndex(_prepared(connection), str(path))
            index._insert(texts)
            connection.execute("INSERT INTO words(words) VALUES ('optimize')")
        finally:
            connection.close()

    @classmethod
    def open(cls, path: Path) -> "KeywordIndex":
        """Open a file that `create` wrote. Raises `CollectionError` if it is missing, foreign or damaged."""
        return cls(open_table(path, _APPLICATION_ID, "words", _TABLE), str(path))

    @classmethod
    def temporary(cls) -> "KeywordIndex":
        """Create an empty index in an unnamed temporary file, which is deleted when the index is closed."""
        connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        return cls(_prepared(connection), "the temporary keyword index")

    def add(self, texts: Texts) -> None:
        """Insert rows, each at most once. Raises `CollectionError`."""
        with self._lock:
            try:
                self._insert(texts)
            except sqlite3.Error as error:
                raise CollectionError(f"{self._name} cannot be written: {error}") from error

    def search(
        self,
        text: str,
        depth: int,
        allowed: Allowed | None,
        deadline_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Rows:
        """Return the `allowed` rows that match words of a text, by descending BM25 score, int64 [≤ depth].

        Of the text's first `MAX_WORDS` words, the rarest are searched as long as together they match at most `MAX_ROWS`
        rows: frequent words add little to the rank and take long. Raises `DeadlineExceeded`, `CollectionError`, and
        `CollectionReplaced` if the index is closed.
        """
        with self._lock:
            try:
                self._connection.set_progress_handler(lambda: clock() >= deadline_ns, _OPERATIONS)
                words = self._rare_words(text)
                return self._ranked(words, depth, allowed) if words else np.empty(0, np.int64)
            except sqlite3.OperationalError as error:
                if clock() >= deadline_ns:
                    raise DeadlineExceeded("the keyword search exceeded its deadline") from error
                raise CollectionError(f"{self._name} cannot be read: {error}") from error
            except sqlite3.ProgrammingError as error:
                raise CollectionReplaced(f"{self._name} is closed") from error
            except sqlite3.Error as error:
                raise CollectionError(f"{self._name} cannot be read: {error}") from error
            finally:
                with suppress(sqlite3.ProgrammingError):
                    self._connection.set_progress_handler(None, 0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        self._connection.close()

    def _insert(self, texts: Texts) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO words(rowid, title, text) VALUES (?, ?, ?)", texts)
        self._connection.execute("COMMIT")

    def _rare_words(self, text: str) -> Sequence[str]:
        words = dict.fromkeys(
            match[0][:_MAX_CHARACTERS].lower() for match in islice(_WORD.finditer(text), 16 * MAX_WORDS)
        )
        counts = sorted((self._count_rows(word), word) for word in islice(words, MAX_WORDS))
        rows_left, rare = MAX_ROWS, []
        for count, word in counts:
            rows_left -= count
            if count and rows_left >= 0:
                rare.append(word)
        return rare

    def _count_rows(self, word: str) -> int:
        """Return how many rows match a word, at most `MAX_ROWS` + 1."""
        sql = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        (count,) = self._connection.execute(sql, (_quoted(word), MAX_ROWS + 1)).fetchone()
        return int(count)

    def _ranked(self, words: Sequence[str], depth: int, allowed: Allowed | None) -> Rows:
        cursor = self._connection.execute(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank", (" OR ".join(map(_quoted, words)),)
        )
        found = np.empty(0, np.int64)
        while len(found) < depth and (some := cursor.fetchmany(_FETCH_ROWS if allowed else depth)):
            rows = np.array(some, np.int64)[:, 0]
            found = np.concatenate([found, rows if allowed is None else rows[allowed(rows)]])
        cursor.close()
        return found[:depth]


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Create the empty table, without a journal or syncs: a crash leaves a file that is not used."""
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(_TABLE)
    return connection


def _quoted(word: str) -> str:
    """Quote a word for FTS5, so that no part of it is query syntax."""
    return f'"{word}"'
