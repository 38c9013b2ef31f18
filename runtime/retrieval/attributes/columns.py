"""Columnar storage of documents' attributes, for vectorized evaluation of filters.

Strings are dictionary-encoded: in order of first appearance while rows are appended, in ascending order in files, so
that a stored code is the string's rank. A column may end before the last row: later rows lack the attribute.
"""

import operator
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.attributes.evaluation import Work, evaluate
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.attributes.ordered import Bits, OrderedValues
from runtime.retrieval.attributes.schema import AttributeType, Schema, holds
from runtime.retrieval.passages import Attributes

__all__ = ["Bits", "Column", "Columns", "FilterCache"]

_DTYPES: dict[AttributeType, Any] = {
    AttributeType.INTEGER: np.int64,
    AttributeType.FLOAT: np.float64,
    AttributeType.BOOLEAN: np.int8,
    AttributeType.STRING: np.int32,
    AttributeType.STRINGS: np.int32,
}
_STRINGS = (AttributeType.STRING, AttributeType.STRINGS)
_FILTERS_KEPT = 64  # in a cache
_SORTED_AT_ONCE = 8192  # strings: the interpreter's lock is held meanwhile, about 5 ms
_APPENDED_AT_ONCE = 1024


class _Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: AttributeType
    rows: bytes  # int64: the row of each value, ascending; lists have several values per row
    values: bytes
    words: list[str]  # the dictionary, ascending; in files of earlier versions in any order


class Column:
    """The values of one attribute: rows int64 [n], ascending, and values [n]; a list has one entry per string.

    Rows may be appended by one thread while others evaluate filters over the rows before.
    """

    def __init__(self, kind: AttributeType) -> None:
        self.kind = kind
        self._strings: list[str] = []  # by code
        self._codes: dict[str, int] = {}
        self._ascending: list[str] = []  # the strings seen by `ordered`
        self._ascending_codes = np.empty(0, np.int32)
        self._rows = np.empty(16, np.int64)
        self._values = np.empty(16, _DTYPES[kind])
        self._count = 0
        self._ordered: OrderedValues | None = None
        self._lock = threading.Lock()  # of the order

    def append(self, rows: list[int], values: list[Any]) -> None:
        """Append the values of rows, which ascend from behind the last one."""
        if self.kind is AttributeType.STRINGS:
            pairs = [(row, string) for row, value in zip(rows, values, strict=True) for string in dict.fromkeys(value)]
            rows, values = [row for row, _ in pairs], [string for _, string in pairs]
        if self.kind in _STRINGS:
            values = [self._code(string) for string in values]
        self._put(rows, values)

    def ordered(self, size: int) -> OrderedValues:
        """Return the values of the first `size` rows in order; computed once for each size."""
        with self._lock:
            if self._ordered is None or self._ordered.size != size:
                rows, values = self._upto(size)
                if self.kind in _STRINGS:
                    codes = self._ranks()[values]
                    self._ordered = OrderedValues(self.kind, self._ascending, codes, rows, size)
                else:
                    ascending = np.unique(values)
                    codes = np.searchsorted(ascending, values).astype(np.int32) + np.int32(1)
                    self._ordered = OrderedValues(self.kind, ascending, codes, rows, size)
            return self._ordered

    def only(self, value: str, rows: NDArray[np.int64]) -> Bits:
        """Return whether each of some rows has this string and no other value."""
        own = np.zeros(len(rows), bool)
        if self.kind in _STRINGS:
            with_values, values = self._upto(1 << 62)
            first = np.searchsorted(with_values, rows)
            alone = np.searchsorted(with_values, rows, side="right") - first == 1
            own[alone] = values[first[alone]] == self._code_of(value)
        return own

    def to_stored(self) -> _Stored:
        rows, values = self._upto(1 << 62)
        words: list[str] = []
        if self.kind in _STRINGS:
            values = (self._ranks()[values] - 1).astype(np.int32)
            words = self._ascending
        return _Stored(self.kind, rows.tobytes(), values.tobytes(), words)

    @classmethod
    def from_stored(cls, stored: _Stored, size: int) -> "Column":
        """Raises `ValueError` for inconsistent content."""
        column = cls(stored.kind)
        rows, values = np.frombuffer(stored.rows, np.int64), np.frombuffer(stored.values, _DTYPES[stored.kind])
        lists = stored.kind is AttributeType.STRINGS
        if len(rows) != len(values) or (len(rows) and not (rows[0] >= 0 and rows[-1] < size)):
            raise ValueError("its rows are out of range")
        if (np.diff(rows) < (0 if lists else 1)).any():
            raise ValueError("its rows are not ascending")
        if stored.kind in _STRINGS:
            if len(values) > 0 and not 0 <= int(values.min()) <= int(values.max()) < len(stored.words):
                raise ValueError("a string code is out of range")
            column._order_words(stored.words)
        column._rows, column._values, column._count = rows, values, len(rows)
        return column

    def _upto(self, size: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the rows before `size` and their values. The arrays are replaced when they grow, never moved."""
        rows = self._rows[: self._count]
        count = int(np.searchsorted(rows, size))
        return rows[:count], self._values[:count]

    def _ranks(self) -> NDArray[np.int32]:
        """Return the code in the order (from 1 on) of each string's own code; `_ascending` are the strings in order."""
        known = len(self._ascending)
        fresh = sorted((string, code) for code, string in enumerate(self._strings[known:], known))
        if fresh:
            places = [bisect_left(self._ascending, string) for string, _ in fresh] if known else 0
            codes = np.array([code for _, code in fresh], np.int32)
            self._ascending_codes = np.insert(self._ascending_codes, places, codes)
            self._ascending = sorted(self._ascending + [string for string, _ in fresh])  # merges two runs
        ranks = np.empty(len(self._ascending_codes), np.int32)
        ranks[self._ascending_codes] = np.arange(1, len(ranks) + 1, dtype=np.int32)
        return ranks

    def _order_words(self, words: list[str]) -> None:
        """Install a stored dictionary, sorting one of an earlier version."""
        self._strings = words
        if all(map(operator.lt, words, islice(words, 1, None))):
            self._ascending, self._ascending_codes = words, np.arange(len(words), dtype=np.int32)
            return
        chunks = (
            range(first, min(first + _SORTED_AT_ONCE, len(words))) for first in range(0, len(words), _SORTED_AT_ONCE)
        )
        order = list(merge(*(sorted(chunk, key=words.__getitem__) for chunk in chunks), key=words.__getitem__))
        self._ascending, self._ascending_codes = [words[code] for code in order], np.array(order, np.int32)

    def _code_of(self, string: str) -> int:
        """Return the code of a string, -1 for none. A stored dictionary is in order, without `_codes`."""
        if string in self._codes:
            return self._codes[string]
        position = bisect_left(self._ascending, string)
        return int(self._ascending_codes[position]) if self._ascending[position : position + 1] == [string] else -1

    def _code(self, string: str) -> int:
        code = self._codes.setdefault(string, len(self._strings))
        if code == len(self._strings):
            self._strings.append(string)
        return code

    def _put(self, rows: list[int], values: list[Any]) -> None:
        end = self._count + len(rows)
        if (more := max(end, 2 * len(self._rows)) - len(self._rows)) and end > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty(more, np.int64)])
            self._values = np.concatenate([self._values, np.empty(more, self._values.dtype)])
        self._rows[self._count : end], self._values[self._count : end] = rows, values
        self._count = end


class Columns:
    """The attributes of rows 0, 1, …; append-only."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self.size = 0

    @classmethod
    def from_documents(cls, documents: Iterable[Attributes], schema: Schema) -> "Columns":
        """Return the columns of documents, in order; `schema` has all of their attributes."""
        columns, remaining = cls(), iter(documents)
        while part := list(islice(remaining, _APPENDED_AT_ONCE)):
            columns.append(part, schema)
        return columns

    @classmethod
    def empty(cls, size: int) -> "Columns":
        """Return the columns of rows without attributes."""
        columns = cls()
        columns.size = size
        return columns

    @property
    def schema(self) -> dict[str, AttributeType]:
        """The attributes that occur, and their types."""
        return {name: column.kind for name, column in self._columns.items()}

    def of_rows(self, rows: NDArray[np.int64]) -> "Columns":
        """Return the columns of some rows, which ascend."""
        columns = Columns.empty(len(rows))
        for name, column in self._columns.items():
            stored = column.to_stored()
            with_values = np.frombuffer(stored.rows, np.int64)
            here = np.isin(with_values, rows)
            values = np.frombuffer(stored.values, _DTYPES[stored.kind])[here]
            places = np.searchsorted(rows, with_values[here])
            own = _Stored(stored.kind, places.tobytes(), values.tobytes(), stored.words)
            columns._columns[name] = Column.from_stored(own, len(rows))
        return columns

    def append(self, documents: Sequence[Attributes], schema: Schema) -> None:
        """Append rows. Attributes that are not in `schema`, or have another type there, are left out: a deleted
        document's may be."""
        by_name: dict[str, tuple[list[int], list[Any]]] = {}
        for row, attributes in enumerate(documents, self.size):
            for name, value in attributes.items():
                if name in schema and holds(schema[name], value):
                    rows, values = by_name.setdefault(name, ([], []))
                    rows.append(row)
                    values.append(value)
        for name, (rows, values) in by_name.items():
            self._columns.setdefault(name, Column(schema[name])).append(rows, values)
        self.size += len(documents)

    def held_by(self, owner: AttributeBinding, rows: NDArray[np.int64]) -> Bits:
        """Return whether each of some rows belongs to an owner, bool [rows], as `AttributeBinding.holds`."""
        column = self._columns.get(owner.key)
        return np.zeros(len(rows), bool) if column is None else column.only(owner.value, rows)

    def matching(self, filter: Filter, work: Work | None = None, size: int | None = None) -> Bits:
        """Return whether each of the first `size` rows (default: of all) passes a filter, bool [size].

        An attribute that no row has counts as missing. Raises `InvalidFilter` if that is too much work.
        """
        count = self.size if size is None else size
        absent = OrderedValues.absent(count)

        def ordered(name: str) -> OrderedValues:
            column = self._columns.get(name)
            return absent if column is None else column.ordered(count)

        return evaluate(filter, ordered, count, work or Work())

    def strings(self, name: str, size: int) -> tuple[Sequence[str], NDArray[np.int32]]:
        """Return the strings of an attribute, ascending, and the number of its string for each of the first `size`
        rows, from 1 on; 0: none. An attribute of another type has none."""
        column = self._columns.get(name)
        if column is None or column.kind is not AttributeType.STRING:
            return (), np.zeros(size, np.int32)
        return column.ordered(size).strings()

    def encode(self) -> bytes:
        """Return the content for `decode`."""
        return msgspec.msgpack.encode((self.size, {name: column.to_stored() for name, column in self._columns.items()}))

    @classmethod
    def decode(cls, content: bytes) -> "Columns":
        """Decode what `encode` encoded. Raises `CollectionError` for damaged content."""
        columns = cls()
        try:
            columns.size, stored = msgspec.msgpack.decode(content, type=tuple[int, dict[str, _Stored]])
            for name, column in stored.items():
                columns._columns[name] = Column.from_stored(column, columns.size)
        except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
            raise CollectionError(f"the attributes of a segment are damaged: {error}") from error
        return columns


class FilterCache:
    """The rows of columns that do not change any more that pass the filters used last, up to a number of bytes.

    Thread-safe.
    """

    def __init__(self, columns: Columns, most_bytes: int = 16 << 20) -> None:
        self._columns, self._most = columns, max(1, most_bytes // max(columns.size, 1))
        self._found: dict[Filter, Bits] = {}  # least recently used first
        self._lock = threading.Lock()

    def matching(self, filter: Filter, work: Work | None = None) -> Bits:
        """As `Columns.matching`. The result is shared: do not write into it."""
        with self._lock:
            bits = self._found.pop(filter, None)
            if bits is not None:
                self._found[filter] = bits
                return bits
        bits = self._columns.matching(filter, work)
        with self._lock:
            self._found[filter] = bits
            while len(self._found) > min(self._most, _FILTERS_KEPT):
                del self._found[next(iter(self._found))]
        return bits
