"""Keyword indexes of documents: BM25 over titles and texts. They do not contain the texts.

A sealed segment has its index in a file; that of the growing rows is in memory. Documents are numbered in the order of
their rows. A search ranks the *visible* documents of several indexes together, and its result depends on nothing else:
the number and the lengths of documents, and how many have a word, are counted among the visible ones. Hence others'
documents, deleted ones and those that a filter excludes neither take places nor can be inferred.

documents   for each chunk of consecutive documents, the first one's number and their lengths in words, uint32
postings    for each chunk and stem, the documents that have it, ascending: (number - first) << 8 | min(count, 255),
            uint32
"""

import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError, DeadlineExceeded
from runtime.retrieval.databases import ReadOnlyDatabase
from runtime.retrieval.keywords.words import stem, words_of

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

Bits = NDArray[np.bool_]
Rows = NDArray[np.int64]
Lengths = NDArray[np.uint32]
Matches = NDArray[np.int64]
"""Documents that have a stem, [3, documents]: row, how often it has the stem, length in words."""
Texts = Iterable[tuple[str, str]]  # title, text


class Postings:
    """An index in memory, to which documents are added. Thread-safe; one thread adds.

    Words are appended as numbers of their stems, and inverted before they are read or when there are many: together
    that takes a fraction of the time of appending to each stem's postings.
    """

    def __init__(self) -> None:
        self._lengths = array("I")
        self._stems: dict[str, int] = {}
        self._numbers = _StemNumbers(self._stems)
        self._entries: list[array[int]] = []  # by number of the stem
        self._pending = array("I")  # stems of the documents from `_inverted` on
        self._inverted = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Lengths:
        """Of each document, in words."""
        with self._lock:  # numpy copies without the interpreter's lock, and an array cannot grow meanwhile
            return np.array(self._lengths, np.uint32)

    def add(self, title: str, text: str) -> None:
        """Add a document."""
        words = words_of(f"{title}\n{text}")[:MAX_DOCUMENT_WORDS]
        numbers = [self._numbers[word] for word in words]
        with self._lock:
            self._pending.extend(numbers)
            self._lengths.append(len(words))
            if len(self._pending) > _MAX_PENDING:
                self._invert()

    def entries(self, word: str) -> Iterator[tuple[int, bytes]]:
        """Yield the number of the first document, 0, and the entries of a stem."""
        with self._lock:
            self._invert()
            number = self._stems.get(word, len(self._entries))
            content = self._entries[number].tobytes() if number < len(self._entries) else b""
        yield 0, content

    def all_entries(self) -> Iterator[tuple[str, bytes]]:
        """Yield the stems, sorted, with their entries."""
        self._invert()
        return ((word, self._entries[number].tobytes()) for word, number in sorted(self._stems.items()))

    def _invert(self) -> None:
        if self._inverted == len(self._lengths):
            return
        documents = np.repeat(
            np.arange(self._inverted, len(self._lengths), dtype=np.uint64), self._lengths[self._inverted :]
        )
        stems = np.array(self._pending, np.uint64)
        pairs, counts = np.unique(stems << np.uint64(32) | documents, return_counts=True)
        entries = ((pairs << np.uint64(8)) | np.minimum(counts, 255).astype(np.uint64)).astype(np.uint32)
        stems = pairs >> np.uint64(32)
        begins = np.flatnonzero(np.diff(stems, prepend=np.uint64(1 << 32)))
        self._entries += [array("I") for _ in range(len(self._stems) - len(self._entries))]
        for begin, end in pairwise([*begins.tolist(), len(entries)]):
            self._entries[int(stems[begin])].frombytes(entries[begin:end].tobytes())
        self._pending, self._inverted = array("I"), len(self._lengths)


class _StemNumbers(dict[str, int]):
    """The number of each word's stem in `stems`, which grows."""

    def __init__(self, stems: dict[str, int]) -> None:
        super().__init__()
        self._stems = stems

    def __missing__(self, word: str) -> int:
        number = self[word] = self._stems.setdefault(stem(word), len(self._stems))
        return number


class KeywordFile:
    """An index in an SQLite file, which does not change. Thread-safe. `lengths`: of each document, in words.

    Methods raise the errors of `ReadOnlyDatabase`.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open a file that `create` wrote. Raises `CollectionError` if it is missing, foreign or damaged, or has
        another number of documents than `size`."""
        self._database = ReadOnlyDatabase(path, "keyword index", {(_APPLICATION_ID, 0): (_DOCUMENTS, _POSTINGS)})
        try:
            chunks = self._database.rows("SELECT lengths FROM documents ORDER BY first")
            parts = [np.frombuffer(lengths, np.uint32) for (lengths,) in chunks]
        except (ValueError, TypeError) as error:
            raise CollectionError(f"{path} is damaged: {error}") from error
        self.lengths: Lengths = np.concatenate([np.empty(0, np.uint32), *parts])
        if len(self.lengths) != size:
            raise CollectionError(f"{path} is damaged: it has {len(self.lengths)} documents, not {size}")

    @staticmethod
    def create(path: Path, texts: Texts) -> None:
        """Write a new file. Raises `sqlite3.Error`, and leaves an incomplete file then."""
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _write(connection, texts)
        finally:
            connection.close()

    def entries(self, word: str) -> Iterator[tuple[int, bytes]]:
        """Yield the number of the first document and the entries of a stem, of each chunk that has it."""
        return self._database.rows("SELECT first, entries FROM postings WHERE stem = ? ORDER BY first", word)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()


def _write(connection: sqlite3.Connection, texts: Texts) -> None:
    """Write the tables, without a journal or syncs: a crash leaves a file that is not used."""
    for statement in (f"PRAGMA application_id = {_APPLICATION_ID}", "PRAGMA journal_mode = OFF"):
        connection.execute(statement)
    for statement in ("PRAGMA synchronous = OFF", _DOCUMENTS, _POSTINGS):
        connection.execute(statement)
    remaining, first = iter(texts), 0
    while chunk := list(islice(remaining, CHUNK)):
        postings = Postings()
        for title, text in chunk:
            postings.add(title, text)
        entries = ((word, first, content) for word, content in postings.all_entries())
        connection.execute("BEGIN")
        connection.execute("INSERT INTO documents VALUES (?, ?)", (first, postings.lengths.tobytes()))
        connection.executemany("INSERT INTO postings VALUES (?, ?, ?)", entries)
        connection.execute("COMMIT")
        first += len(chunk)


# ---- searches


class Searched(NamedTuple):
    """An index that a search reads: the rows of its documents, and whether each of the first ones is visible; others
    are not."""

    words: Postings | KeywordFile
    rows: Rows
    visible: Bits


def search_indexes(
    indexes: Sequence[Searched],
    text: str,
    depth: int,
    deadline_ns: int,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Rows:
    """Return the rows of the visible documents that have words of a text, by descending BM25 score, int64 [≤ depth].

    Of the text's first `MAX_WORDS` different stems, the rarest are searched as long as together they match at most
    `MAX_ROWS` visible documents: frequent words add little to the rank and take long. Raises `DeadlineExceeded`, and
    the errors of `KeywordFile.entries`.
    """
    words = words_of(text[:_MAX_QUERY_CHARACTERS])[:_MAX_READ]
    lengths = [index.words.lengths[: len(index.visible)] for index in indexes]
    matches = {}
    for word in islice(dict.fromkeys(stem(word) for word in words), MAX_WORDS):
        if clock() >= deadline_ns:
            raise DeadlineExceeded("the keyword search exceeded its deadline")
        matches[word] = _matches(word, indexes, lengths)
    counted = [sizes[index.visible] for index, sizes in zip(indexes, lengths, strict=True)]
    return _ranked(_rarest(matches), np.concatenate([np.empty(0, np.uint32), *counted]))[:depth]


def _matches(word: str, indexes: Sequence[Searched], lengths: Sequence[Lengths]) -> Matches:
    """Return the visible documents with a stem. Stops when there are over `MAX_ROWS`."""
    columns, size = [np.empty((3, 0), np.int64)], 0
    for (words, rows, visible), sizes in zip(indexes, lengths, strict=True):
        for first, content in words.entries(word):
            try:
                entries = np.frombuffer(content, np.uint32)
                numbers = first + (entries >> 8).astype(np.int64)
            except (ValueError, TypeError) as error:
                raise CollectionError(f"the entries of {word!r} in a keyword index are damaged: {error}") from error
            numbers, entries = numbers[numbers < len(visible)], entries[numbers < len(visible)]
            here = visible[numbers]
            numbers, counts = numbers[here], entries[here] & 255
            columns.append(np.stack([rows[numbers], counts, sizes[numbers]]))
            size += len(numbers)
            if size > MAX_ROWS:
                return np.concatenate(columns, axis=1)
    return np.concatenate(columns, axis=1)


def _rarest(matches: Mapping[str, Matches]) -> list[Matches]:
    """Return the rarest stems' matches, which together are at most `MAX_ROWS`."""
    rows_left, rare = MAX_ROWS, []
    for _, word in sorted((matching.shape[1], word) for word, matching in matches.items()):
        rows_left -= matches[word].shape[1]
        if rows_left >= 0:
            rare.append(matches[word])
    return rare


def _ranked(matches: Sequence[Matches], counted: Lengths) -> Rows:
    """Return the rows of some stems' matches by descending BM25 score, ties by row. counted: the lengths of all visible
    documents."""
    rows, counts, lengths = np.concatenate([np.empty((3, 0), np.int64), *matches], axis=1)
    frequencies = np.array([matching.shape[1] for matching in matches], np.float64)
    weights = np.log1p((len(counted) - frequencies + 0.5) / (frequencies + 0.5))
    weights = np.repeat(weights, frequencies.astype(np.int64))
    relative = lengths / max(counted.mean() if len(counted) else 0.0, 1.0)
    documents, at = np.unique(rows, return_inverse=True)
    scores = np.bincount(at, weights * counts * (_K1 + 1) / (counts + _K1 * (1 - _B + _B * relative)), len(documents))
    return documents[np.lexsort((documents, -scores))]
