"""The words of a collection's documents: BM25 by SQLite's FTS5, over titles and texts, by row. The texts themselves are
not kept in it."""

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

MAX_WORDS = 32  # of a query
MAX_ROWS = 1 << 12  # that a query ranks: some 3 ms
_APPLICATION_ID = 0x54524E57  # "TRNW"
_TABLE = "CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='porter unicode61')"
_WORD = re.compile(r"[^\W_]+")
_LONGEST = 64  # characters of a word that are looked for
_OPERATIONS = 1000  # of SQLite between two looks at the clock
_AT_ONCE = 256  # rows of an answer

Rows = NDArray[np.int64]
Texts = Iterable[tuple[int, str, str]]  # row, title, text
Allowed = Callable[[Rows], NDArray[np.bool_]]


class KeywordIndex:
    """Rows by their words. Any number of threads may ask one; they take turns."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Use `create`, `open` or `temporary`."""
        self._connection, self._name = connection, name
        self._lock = threading.Lock()

    @staticmethod
    def create(path: Path, texts: Texts) -> None:
        """Write a new file. Raises `sqlite3.Error`, with half a file there."""
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
        """Open a file that `create` wrote. Raises `CollectionError` for a missing, foreign or damaged one."""
        return cls(open_table(path, _APPLICATION_ID, "words", _TABLE), str(path))

    @classmethod
    def temporary(cls) -> "KeywordIndex":
        """An empty one in a file of its own, which has no name and goes with it."""
        connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        return cls(_prepared(connection), "the temporary index of words")

    def add(self, texts: Texts) -> None:
        """Take in rows, none twice. Raises `CollectionError`."""
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
        """The rows that have words of a text, the best by BM25 first, int64 [≤ depth]; of those that are `allowed`.

        Of its first `MAX_WORDS` words those that the fewest rows have are looked for, as long as together no more than
        `MAX_ROWS` rows have them: others tell little, and take long. Raises `DeadlineExceeded`, `CollectionError`, and
        `CollectionReplaced` when it is closed.
        """
        with self._lock:
            try:
                self._connection.set_progress_handler(lambda: clock() >= deadline_ns, _OPERATIONS)
                asked = self._rare(text)
                return self._ranked(asked, depth, allowed) if asked else np.empty(0, np.int64)
            except sqlite3.OperationalError as error:
                if clock() >= deadline_ns:
                    raise DeadlineExceeded("its words were not found in time") from error
                raise CollectionError(f"{self._name} cannot be read: {error}") from error
            except sqlite3.ProgrammingError as error:
                raise CollectionReplaced(f"{self._name} is not searched any more") from error
            except sqlite3.Error as error:
                raise CollectionError(f"{self._name} cannot be read: {error}") from error
            finally:
                with suppress(sqlite3.ProgrammingError):
                    self._connection.set_progress_handler(None, 0)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        self._connection.close()

    def _insert(self, texts: Texts) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO words(rowid, title, text) VALUES (?, ?, ?)", texts)
        self._connection.execute("COMMIT")

    def _rare(self, text: str) -> Sequence[str]:
        found = dict.fromkeys(match[0][:_LONGEST].lower() for match in islice(_WORD.finditer(text), 16 * MAX_WORDS))
        counts = sorted((self._count_rows(word), word) for word in islice(found, MAX_WORDS))
        room, asked = MAX_ROWS, []
        for count, word in counts:
            room -= count
            if count and room >= 0:
                asked.append(word)
        return asked

    def _count_rows(self, word: str) -> int:
        """How many rows have a word; one more than `MAX_ROWS` for all that is more."""
        sql = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        (count,) = self._connection.execute(sql, (_quoted(word), MAX_ROWS + 1)).fetchone()
        return int(count)

    def _ranked(self, asked: Sequence[str], depth: int, allowed: Allowed | None) -> Rows:
        cursor = self._connection.execute(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank", (" OR ".join(map(_quoted, asked)),)
        )
        found = np.empty(0, np.int64)
        while len(found) < depth and (some := cursor.fetchmany(_AT_ONCE if allowed else depth)):
            rows = np.array(some, np.int64)[:, 0]
            found = np.concatenate([found, rows if allowed is None else rows[allowed(rows)]])
        cursor.close()
        return found[:depth]


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Of vectors [n, d] to a query [d], as searches tell them: squared for l2; 1 - cosine; minus dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """With an empty table; nothing else reads it, and what a crash leaves of it is of no use."""
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(_TABLE)
    return connection


def _quoted(word: str) -> str:
    """A word as FTS5 takes it literally: nothing in it is syntax."""
    return f'"{word}"'
