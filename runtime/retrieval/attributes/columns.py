"""The attributes of many documents, an array an attribute, over which a filter is evaluated at once.

Strings are kept once each, in the order in which they came, and rows hold their numbers. A column may end before the
last row: later rows lack the attribute.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.attributes.filters import AllOf, AnyOf, Comparison, Filter, Not
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
    rows: bytes  # int64: the row of each value, ascending; several values a row for lists
    values: bytes
    words: list[str]


class Column:
    """The values of one attribute: `rows` int64 [n], ascending, and `values` [n]; a list has an entry a string."""

    def __init__(self, kind: AttributeType) -> None:
        self.kind = kind
        self.words: list[str] = []
        self._numbers: dict[str, int] = {}
        self._rows = np.empty(16, np.int64)
        self._values = np.empty(16, _DTYPES[kind])
        self._count = 0

    def append(self, row: int, value: Any) -> None:
        """The value of a row after the last one."""
        if self.kind is AttributeType.STRINGS:
            for word in dict.fromkeys(value):
                self._put(row, self._number(word))
        else:
            self._put(row, self._number(value) if self.kind is AttributeType.STRING else value)

    def passing(self, comparison: Comparison, size: int) -> Bits:
        """Whether each of `size` rows has a value that stands so to one of the comparison's."""
        rows, values = self._rows[: self._count], self._values[: self._count]
        hit = np.zeros(len(rows), bool)
        if self.kind in (AttributeType.STRING, AttributeType.STRINGS):
            compare = _COMPARE["eq" if comparison.operator == "in" else comparison.operator]
            if comparison.operator in ("eq", "in"):
                known = (self._numbers.get(str(value), -1) for value in comparison.values)
                words = np.zeros(len(self.words), bool)
                words[[number for number in known if number >= 0]] = True
            else:
                words = np.array([compare(word, comparison.values[0]) for word in self.words], bool)
            hit = words[values] if len(words) else hit
        elif comparison.operator == "in":
            hit = np.isin(values, _exact(comparison.values, values.dtype))
        else:
            hit = _compared(values, comparison.operator, comparison.values[0])
        out = np.zeros(size, bool)
        out[rows[hit]] = True
        return out

    def stored(self) -> _Stored:
        return _Stored(
            self.kind, self._rows[: self._count].tobytes(), self._values[: self._count].tobytes(), self.words
        )

    @classmethod
    def restored(cls, stored: _Stored, size: int) -> "Column":
        column = cls(stored.kind)
        rows, values = np.frombuffer(stored.rows, np.int64), np.frombuffer(stored.values, _DTYPES[stored.kind])
        lists = stored.kind is AttributeType.STRINGS
        if len(rows) != len(values) or (len(rows) and not (rows[0] >= 0 and rows[-1] < size)):
            raise ValueError("its rows are not those of the segment")
        if (np.diff(rows) < (0 if lists else 1)).any():
            raise ValueError("its rows are in no order")
        strings = stored.kind in (AttributeType.STRING, AttributeType.STRINGS) and len(values) > 0
        if strings and not 0 <= int(values.min()) <= int(values.max()) < len(stored.words):
            raise ValueError("it has a string that is not there")
        column._rows, column._values, column._count = rows, values, len(rows)
        column.words, column._numbers = stored.words, {word: number for number, word in enumerate(stored.words)}
        return column

    def _number(self, word: str) -> int:
        number = self._numbers.setdefault(word, len(self.words))
        if number == len(self.words):
            self.words.append(word)
        return number

    def _put(self, row: int, value: Any) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._rows[self._count], self._values[self._count] = row, value
        self._count += 1


class Columns:
    """The attributes of rows 0, 1, …; rows are added, never changed."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self.size = 0

    @classmethod
    def of(cls, documents: Iterable[Attributes], schema: Schema) -> "Columns":
        columns = cls()
        for attributes in documents:
            columns.append(attributes, schema)
        return columns

    @property
    def schema(self) -> dict[str, AttributeType]:
        """The attributes that rows have."""
        return {name: column.kind for name, column in self._columns.items()}

    def append(self, attributes: Attributes, schema: Schema) -> None:
        """One more row; `schema` has every attribute."""
        for name, value in attributes.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column(schema[name])
            column.append(self.size, value)
        self.size += 1

    def passing(self, wanted: Filter) -> Bits:
        """Whether each row passes, bool [size]. An attribute that no row has counts as missing."""
        match wanted:
            case Comparison():
                column = self._columns.get(wanted.key)
                return np.zeros(self.size, bool) if column is None else column.passing(wanted, self.size)
            case Not():
                return ~self.passing(wanted.filter)
            case AllOf():
                every: Bits = np.all([self.passing(part) for part in wanted.filters], axis=0)
                return every
            case AnyOf():
                some: Bits = np.any([self.passing(part) for part in wanted.filters], axis=0)
                return some

    def encode(self) -> bytes:
        """What `decode` takes."""
        return msgspec.msgpack.encode((self.size, {name: column.stored() for name, column in self._columns.items()}))

    @classmethod
    def decode(cls, content: bytes, schema: Schema | None = None) -> "Columns":
        """Raises `CollectionError` for what `encode` did not write, or not under this schema, if one is given."""
        columns = cls()
        try:
            columns.size, stored = msgspec.msgpack.decode(content, type=tuple[int, dict[str, _Stored]])
            for name, one in stored.items():
                if schema is not None and schema.get(name) != one.kind:
                    raise ValueError(f"attribute {name!r} is no {one.kind} in this collection")
                columns._columns[name] = Column.restored(one, columns.size)
        except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
            raise CollectionError(f"the attributes of a segment are damaged: {error}") from error
        return columns


def _exact(values: tuple[Any, ...], dtype: Any) -> NDArray[Any]:
    """Those of some numbers that an array of this type can hold as they are."""
    if dtype.kind == "i":
        return np.array([int(v) for v in values if v == int(v) and -(1 << 63) <= v < 1 << 63], np.int64)
    return np.array([float(value) for value in values if float(value) == value], np.float64)


def _compared(values: NDArray[Any], name: str, value: Any) -> Bits:
    """Compares as Python does, without rounding one number to the other's type."""
    if values.dtype == np.int8:
        value = int(value)
    elif values.dtype.kind == "i" and isinstance(value, float):
        value, name = _beside(value, math.floor(value), name)
        if not -(1 << 63) <= value < 1 << 63:
            return np.full(len(values), name != "eq" and (value > 0) == (name in ("lt", "lte")))
    elif values.dtype.kind == "f" and isinstance(value, int):
        value, name = _beside(value, float(value), name)
    if name == "no":
        return np.zeros(len(values), bool)
    found: Bits = _COMPARE[name](values, value)
    return found


def _beside(value: float, near: float, name: str) -> tuple[float, str]:
    """How numbers that cannot lie between `value` and `near` compare with `near`; "no" for never."""
    if near == value:
        return near, name
    if name == "eq":
        return near, "no"
    above = name in ("gt", "gte")
    return near, ("gt" if above else "lte") if near < value else ("gte" if above else "lt")
