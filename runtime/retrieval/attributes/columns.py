"""Columnar storage of documents' attributes, for vectorized evaluation of filters.

Strings are dictionary-encoded, in order of first appearance. A column may end before the last row: later rows lack the
attribute.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.attributes.filters import AllOf, AnyOf, AttributeBinding, Comparison, Filter, Not
from runtime.retrieval.attributes.schema import AttributeType, Schema
from runtime.retrieval.passages import Attributes

Bits = NDArray[np.bool_]
_DTYPES: dict[AttributeType, Any] = {
    AttributeType.INTEGER: np.int64,
    AttributeType.FLOAT: np.float64,
    AttributeType.BOOLEAN: np.int8,
    AttributeType.STRING: np.int32,
    AttributeType.STRINGS: np.int32,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


class _Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: AttributeType
    rows: bytes  # int64: the row of each value, ascending; lists have several values per row
    values: bytes
    words: list[str]  # the dictionary


class Column:
    """The values of one attribute: rows int64 [n], ascending, and values [n]; a list has one entry per string."""

    def __init__(self, kind: AttributeType) -> None:
        self.kind = kind
        self.strings: list[str] = []
        self._codes: dict[str, int] = {}
        self._rows = np.empty(16, np.int64)
        self._values = np.empty(16, _DTYPES[kind])
        self._count = 0

    def append(self, row: int, value: Any) -> None:
        """Append the value of a row, which must be greater than the last one."""
        if self.kind is AttributeType.STRINGS:
            for string in dict.fromkeys(value):
                self._put(row, self._code(string))
        else:
            self._put(row, self._code(value) if self.kind is AttributeType.STRING else value)

    def matching(self, comparison: Comparison, size: int) -> Bits:
        """Return, for each of `size` rows, whether one of its values satisfies the comparison."""
        rows, values = self._rows[: self._count], self._values[: self._count]
        hit = np.zeros(len(rows), bool)
        if self.kind in (AttributeType.STRING, AttributeType.STRINGS):
            compare = _COMPARE["eq" if comparison.operator == "in" else comparison.operator]
            if comparison.operator in ("eq", "in"):
                codes = (self._codes.get(str(value), -1) for value in comparison.values)
                matches = np.zeros(len(self.strings), bool)
                matches[[code for code in codes if code >= 0]] = True
            else:
                matches = np.array([compare(string, comparison.values[0]) for string in self.strings], bool)
            hit = matches[values] if len(matches) else hit
        elif comparison.operator == "in":
            hit = np.isin(values, _exact(comparison.values, values.dtype))
        else:
            hit = _compared(values, comparison.operator, comparison.values[0])
        out = np.zeros(size, bool)
        out[rows[hit]] = True
        return out

    def only(self, value: str, size: int) -> Bits:
        """Return, for each of `size` rows, whether it has this string and no other value."""
        out = np.zeros(size, bool)
        if self.kind in (AttributeType.STRING, AttributeType.STRINGS):
            rows, own = self._rows[: self._count], self._values[: self._count] == self._codes.get(value, -1)
            out[rows[own]] = True
            out[rows[~own]] = False
        return out

    def to_stored(self) -> _Stored:
        return _Stored(
            self.kind, self._rows[: self._count].tobytes(), self._values[: self._count].tobytes(), self.strings
        )

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
        strings = stored.kind in (AttributeType.STRING, AttributeType.STRINGS) and len(values) > 0
        if strings and not 0 <= int(values.min()) <= int(values.max()) < len(stored.words):
            raise ValueError("a string code is out of range")
        column._rows, column._values, column._count = rows, values, len(rows)
        column.strings, column._codes = stored.words, {string: code for code, string in enumerate(stored.words)}
        return column

    def _code(self, string: str) -> int:
        code = self._codes.setdefault(string, len(self.strings))
        if code == len(self.strings):
            self.strings.append(string)
        return code

    def _put(self, row: int, value: Any) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._rows[self._count], self._values[self._count] = row, value
        self._count += 1


class Columns:
    """The attributes of rows 0, 1, …; append-only."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self.size = 0

    @classmethod
    def from_documents(cls, documents: Iterable[Attributes], schema: Schema) -> "Columns":
        """Return the columns of documents, in order; `schema` has all of their attributes."""
        columns = cls()
        for attributes in documents:
            columns.append(attributes, schema)
        return columns

    @property
    def schema(self) -> dict[str, AttributeType]:
        """The attributes that occur, and their types."""
        return {name: column.kind for name, column in self._columns.items()}

    def append(self, attributes: Attributes, schema: Schema) -> None:
        """Append a row; `schema` has all of its attributes."""
        for name, value in attributes.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column(schema[name])
            column.append(self.size, value)
        self.size += 1

    def held_by(self, owner: AttributeBinding) -> Bits:
        """Return whether each row belongs to an owner, bool [size], as `AttributeBinding.holds`."""
        column = self._columns.get(owner.key)
        return np.zeros(self.size, bool) if column is None else column.only(owner.value, self.size)

    def matching(self, filter: Filter) -> Bits:
        """Return whether each row passes a filter, bool [size]. An attribute that no row has counts as missing."""
        match filter:
            case Comparison():
                column = self._columns.get(filter.key)
                return np.zeros(self.size, bool) if column is None else column.matching(filter, self.size)
            case Not():
                return ~self.matching(filter.filter)
            case AllOf():
                every: Bits = np.all([self.matching(part) for part in filter.filters], axis=0)
                return every
            case AnyOf():
                some: Bits = np.any([self.matching(part) for part in filter.filters], axis=0)
                return some

    def encode(self) -> bytes:
        """Return the content for `decode`."""
        return msgspec.msgpack.encode((self.size, {name: column.to_stored() for name, column in self._columns.items()}))

    @classmethod
    def decode(cls, content: bytes, schema: Schema | None = None) -> "Columns":
        """Raises `CollectionError` for damaged content, or content that does not conform to `schema`, if given."""
        columns = cls()
        try:
            columns.size, stored = msgspec.msgpack.decode(content, type=tuple[int, dict[str, _Stored]])
            for name, one in stored.items():
                if schema is not None and schema.get(name) != one.kind:
                    raise ValueError(f"attribute {name!r} is not {one.kind.with_article} in this collection")
                columns._columns[name] = Column.from_stored(one, columns.size)
        except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
            raise CollectionError(f"the attributes of a segment are damaged: {error}") from error
        return columns


def _exact(values: tuple[Any, ...], dtype: Any) -> NDArray[Any]:
    """Return the numbers that are exactly representable in this dtype."""
    if dtype.kind == "i":
        return np.array([int(v) for v in values if v == int(v) and -(1 << 63) <= v < 1 << 63], np.int64)
    return np.array([float(value) for value in values if float(value) == value], np.float64)


def _compared(values: NDArray[Any], name: str, value: Any) -> Bits:
    """Compare as Python does, without rounding one number to the other's type."""
    if values.dtype == np.int8:
        value = int(value)
    elif values.dtype.kind == "i" and isinstance(value, float):
        value, name = _exact_bound(value, math.floor(value), name)
        if not -(1 << 63) <= value < 1 << 63:
            return np.full(len(values), name != "eq" and (value > 0) == (name in ("lt", "lte")))
    elif values.dtype.kind == "f" and isinstance(value, int):
        value, name = _exact_bound(value, float(value), name)
    if name == "no":
        return np.zeros(len(values), bool)
    found: Bits = _COMPARE[name](values, value)
    return found


def _exact_bound(value: float, near: float, name: str) -> tuple[float, str]:
    """Replace a comparison with `value` by one with `near`, for numbers that cannot lie between; "no" for never."""
    if near == value:
        return near, name
    if name == "eq":
        return near, "no"
    above = name in ("gt", "gte")
    return near, ("gt" if above else "lte") if near < value else ("gte" if above else "lt")
