"""Keyword index of a collection: BM25 over titles and texts. It does not contain the texts.

Documents are numbered in the order in which they are added. A search ranks *visible* documents, and its result depends
on nothing else: the number and the lengths of documents, and how many have a word, are counted among the visible ones.
Hence others' documents, deleted ones and those that a filter excludes neither take places nor can be inferred.

documents   for each chunk of consecutive documents, the first one's number and their lengths in words, uint32
postings    for each chunk and stem, the documents that have it, ascending: (number - first) << 8 | min(count, 255),
            uint32
"""

import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, CollectionReplaced, DeadlineExceeded
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.collections.documents import read_only_uri
from runtime.retrieval.collections.words import stem, words_of

MAX_WORDS = 32  # in a query
MAX_ROWS = 1 << 14  # that a query ranks
_APPLICATION_ID = 0x54524E57  # "TRNW"
_DOCUMENTS = "CREATE TABLE documents (first INTEGER PRIMARY KEY, lengths BLOB NOT NULL)"
_POSTINGS = (
    "CREATE TABLE postings (stem TEXT, first INTEGER, entries BLOB NOT NULL, PRIMARY KEY (stem, first)) WITHOUT ROWID"
)
CHUNK = 1 << 14  # documents
_MAX_PENDING = 1 << 16  # words
MAX_DOCUMENT_WORDS = 1 << 15  # of a document that are indexed: 0.3 s if all are different
_MAX_READ = 16 * MAX_WORDS  # words of a query, to find different ones
_MAX_QUERY_CHARACTERS = 64 * _MAX_READ
_K1, _B = 1.2, 0.75  # of BM25

Rows = NDArray[np.int64]
Lengths = NDArray[np.uint32]
Matches = NDArray[np.int64]
"""Documents, ascending, and how often each has a stem, [2, documents]."""
Texts = Iterable[tuple[str, str]]  # title, text


class _Chunk:
    """Postings of consecutive documents in memory. `lengths`: of each document, in words.

    Words are appended as numbers of their stems, and inverted before they are read or when there are many: together
    that takes a fraction of the time of appending to each stem's postings.
    """

    def __init__(self) -> None:
        self.lengths = array("I")
        self._stems: dict[str, int] = {}
        self._numbers = _StemNumbers(self._stems)
        self._entries: list[array[int]] = []  # by number of the stem
        self._pending = array("I")  # stems of the documents from `_inverted` on
        self._inverted = 0

    def add(self, words: Sequence[str]) -> None:
        """Add a document."""
        self._pending.extend(map(self._numbers.__getitem__, words))
        self.lengths.append(len(words))
        if len(self._pending) > _MAX_PENDING:
            self._invert()

    def entries(self, word: str) -> bytes:
        """Return the entries of a stem."""
        self._invert()
        number = self._stems.get(word)
        return b"" if number is None else self._entries[number].tobytes()

    def all_entries(self) -> Iterator[tuple[str, bytes]]:
        """Yield the stems, sorted, with their entries."""
        self._invert()
        return ((word, self._entries[number].tobytes()) for word, number in sorted(self._stems.items()))

    def _invert(self) -> None:
        if self._inverted == len(self.lengths):
            return
        documents = np.repeat(
            np.arange(self._inverted, len(self.lengths), dtype=np.uint64), self.lengths[self._inverted :]
        )
        stems = np.array(self._pending, np.uint64)
        pairs, counts = np.unique(stems << np.uint64(32) | documents, return_counts=True)
        entries = ((pairs << np.uint64(8)) | np.minimum(counts, 255).astype(np.uint64)).astype(np.uint32)
        stems = pairs >> np.uint64(32)
        begins = np.flatnonzero(np.diff(stems, prepend=np.uint64(1 << 32)))
        self._entries += [array("I") for _ in range(len(self._stems) - len(self._entries))]
        for begin, end in pairwise([*begins.tolist(), len(entries)]):
            self._entries[int(stems[begin])].frombytes(entries[begin:end].tobytes())
        self._pending, self._inverted = array("I"), len(self.lengths)


class _StemNumbers(dict[str, int]):
    """The number of each word's stem in `stems`, which grows."""

    def __init__(self, stems: dict[str, int]) -> None:
        super().__init__()
        self._stems = stems

    def __missing__(self, word: str) -> int:
        number = self[word] = self._stems.setdefault(stem(word), len(self._stems))
        return number


class KeywordIndex:
    """An inverted index in an SQLite file. Thread-safe; searches are serialised by a lock."""

    def __init__(self, connection: sqlite3.Connection, name: str, databases: Sequence[str] = ("main",)) -> None:
        """Use `create`, `open` or `temporary`. databases: SQLite's names, in the order of their documents."""
        self._connection, self._name = connection, name
        self._lock = threading.Lock()
        self._lengths = np.empty(0, np.uint32)  # of the documents of the chunks in files
        self._first: dict[str, int] = {}  # by database, what is added to its numbers of documents
        for database in databases:
            chunks = connection.execute(f"SELECT lengths FROM {database}.documents ORDER BY first")
            self._first[database] = 0 if database == "main" else len(self._lengths)
            self._lengths = np.concatenate([self._lengths, *(np.frombuffer(one, np.uint32) for (one,) in chunks)])
        self._recent = _Chunk()

    @staticmethod
    def create(path: Path, texts: Texts) -> None:
        """Write a new file. Raises `sqlite3.Error`, and leaves an incomplete file then."""
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            index = KeywordIndex(_prepared(connection), str(path))
            index._insert(texts)
            index._write_chunk()
        finally:
            connection.close()

    @classmethod
    def open(cls, *paths: Path) -> "KeywordIndex":
        """Open files that `create` wrote, which do not change: documents are added in a temporary file.

        Their documents are numbered one file after the other. Raises `CollectionError` if one is missing, foreign or
        damaged.
        """
        names, path = [f"sealed{number}" for number in range(len(paths))], paths[0]
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect("", isolation_level=None, check_same_thread=False, uri=True)
            for name, path in zip(names, paths, strict=True):
                if not path.is_file():
                    raise CollectionError(f"{path} is missing")
                connection.execute(f"ATTACH ? AS {name}", (read_only_uri(path),))
                (own,) = connection.execute(f"PRAGMA {name}.application_id").fetchone()
                tables = connection.execute(f"SELECT type, sql FROM {name}.sqlite_master ORDER BY name").fetchall()
                if own != _APPLICATION_ID or tables != [("table", _DOCUMENTS), ("table", _POSTINGS)]:
                    raise CollectionError(f"{path} is damaged: its tables have another schema")
            return cls(_prepared(connection), ", ".join(map(str, paths)), (*names, "main"))
        except (sqlite3.Error, ValueError, TypeError, CollectionError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, CollectionError):
                raise
            raise CollectionError(f"{path} is damaged: {error}") from error

    @classmethod
    def temporary(cls) -> "KeywordIndex":
        """Create an empty index in an unnamed temporary file, which is deleted when the index is closed."""
        connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        return cls(_prepared(connection), "the temporary keyword index")

    @property
    def size(self) -> int:
        """Number of documents."""
        return len(self._lengths) + len(self._recent.lengths)

    def add(self, texts: Texts) -> None:
        """Add documents. Raises `CollectionError`."""
        with self._lock:
            try:
                self._insert(texts)
            except sqlite3.Error as error:
                raise CollectionError(f"{self._name} cannot be written: {error}") from error

    def search(
        self,
        text: str,
        depth: int,
        visible: Bits | None,
        deadline_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Rows:
        """Return the visible documents that have words of a text, by descending BM25 score, int64 [≤ depth].

        visible: bool [≤ size], documents beyond it are not visible; None: all are. Of the text's first `MAX_WORDS`
        different stems, the rarest are searched as long as together they match at most `MAX_ROWS` visible documents:
        frequent words add little to the rank and take long. Raises `DeadlineExceeded`, `CollectionError`, and
        `CollectionReplaced` if the index is closed.
        """
        words = words_of(text[:_MAX_QUERY_CHARACTERS])[:_MAX_READ]
        stems = dict.fromkeys(stem(word) for word in words)
        with self._lock:
            lengths = np.concatenate([self._lengths, np.array(self._recent.lengths, np.uint32)])
            shown = np.ones(self.size, bool) if visible is None else np.zeros(self.size, bool)
            if visible is not None:
                shown[: len(visible)] = visible
            matches = {}
            try:
                for word in islice(stems, MAX_WORDS):
                    if clock() >= deadline_ns:
                        raise DeadlineExceeded("the keyword search exceeded its deadline")
                    matches[word] = self._matches(word, shown)
            except sqlite3.ProgrammingError as error:
                raise CollectionReplaced(f"{self._name} is closed") from error
            except (sqlite3.Error, ValueError, TypeError, IndexError) as error:
                raise CollectionError(f"{self._name} cannot be read: {error}") from error
        return _ranked(_rarest(matches), lengths, lengths[shown])[:depth]

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._connection.close()

    def __del__(self) -> None:
        self._connection.close()

    def _insert(self, texts: Texts) -> None:
        for title, text in texts:
            self._recent.add(words_of(f"{title}\n{text}")[:MAX_DOCUMENT_WORDS])
            if len(self._recent.lengths) == CHUNK:
                self._write_chunk()

    def _write_chunk(self) -> None:
        """Move the documents in memory to the file."""
        first, lengths = len(self._lengths), np.array(self._recent.lengths, np.uint32)
        entries = ((word, first, found) for word, found in self._recent.all_entries())
        self._connection.execute("BEGIN")
        self._connection.execute("INSERT INTO main.documents VALUES (?, ?)", (first, lengths.tobytes()))
        self._connection.executemany("INSERT INTO main.postings VALUES (?, ?, ?)", entries)
        self._connection.execute("COMMIT")
        self._lengths, self._recent = np.concatenate([self._lengths, lengths]), _Chunk()

    def _matches(self, word: str, shown: Bits) -> Matches:
        """Return the shown documents with a stem, and how often each has it. Stops when there are over `MAX_ROWS`."""
        found = [np.empty((2, 0), np.int64)]
        sql = "SELECT first + {}, entries FROM {}.postings WHERE stem = ? ORDER BY first"
        chunks = [self._connection.execute(sql.format(first, name), (word,)) for name, first in self._first.items()]
        recent = self._recent.entries(word)
        size = 0
        for first, content in chain(*chunks, [(len(self._lengths), recent)] if recent else []):
            entries = np.frombuffer(content, np.uint32)
            numbers = first + (entries >> 8).astype(np.int64)
            here = shown[numbers]
            found.append(np.stack([numbers[here], entries[here] & 255]))
            size += found[-1].shape[1]
            if size > MAX_ROWS:
                break
        for cursor in chunks:
            cursor.close()
        return np.concatenate(found, axis=1)


def _rarest(matches: Mapping[str, Matches]) -> list[Matches]:
    """Return the rarest stems' matches, which together are at most `MAX_ROWS`."""
    rows_left, rare = MAX_ROWS, []
    for _, word in sorted((found.shape[1], word) for word, found in matches.items()):
        rows_left -= matches[word].shape[1]
        if rows_left >= 0:
            rare.append(matches[word])
    return rare


def _ranked(matches: Sequence[Matches], lengths: Lengths, shown_lengths: Lengths) -> Rows:
    """Return the documents of some stems' matches by descending BM25 score, ties by number.

    lengths: of all documents by number; shown_lengths: of those that are counted.
    """
    numbers, counts = np.concatenate([np.empty((2, 0), np.int64), *matches], axis=1)
    frequencies = np.array([found.shape[1] for found in matches], np.float64)
    weights = np.log1p((len(shown_lengths) - frequencies + 0.5) / (frequencies + 0.5))
    weights = np.repeat(weights, frequencies.astype(np.int64))
    relative = lengths[numbers] / max(shown_lengths.mean() if len(shown_lengths) else 0.0, 1.0)
    documents, at = np.unique(numbers, return_inverse=True)
    scores = np.bincount(at, weights * counts * (_K1 + 1) / (counts + _K1 * (1 - _B + _B * relative)), len(documents))
    return documents[np.lexsort((documents, -scores))]


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Create the empty tables, without a journal or syncs: a crash leaves a file that is not used."""
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(_DOCUMENTS)
    connection.execute(_POSTINGS)
    return connection
