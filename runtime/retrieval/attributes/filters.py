"""Filters: comparisons of attributes, combined by and, or and not, in OpenAI's format extended by `not`.

    {"type": "and", "filters": [{"type": "eq", "key": "tenant", "value": "acme"},
                                {"type": "not", "filter": {"type": "in", "key": "tags", "value": ["old"]}}]}

eq, ne, gt, gte, lt and lte compare with one value, in and nin with a list. ne is "not eq", nin "not in": a document
without the attribute passes these two and no other comparison. A list of strings is eq to each string in it.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from runtime.errors import InvalidFilter
from runtime.retrieval.attributes.schema import AttributeType, Schema, holds, preview, scalar_fault

Scalar = str | int | float | bool
Operator = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
OPERATORS: tuple[str, ...] = get_args(Operator)
MAX_DEPTH = 8
MAX_COMPARISONS = 128
MAX_VALUES = 1024  # of one `in`
MAX_BYTES = 16_000  # of a filter as it is sent to a pool
_MAX_KEY = 64  # characters
_ORDERED = ("gt", "gte", "lt", "lte")
_COMPARED_AS = {AttributeType.STRINGS: AttributeType.STRING, AttributeType.INTEGER: AttributeType.FLOAT}
_NEGATED: dict[str, Operator] = {"ne": "eq", "nin": "in"}


class Comparison(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Comparison of an attribute with a value, or with several for `in`. `ne` and `nin` are represented by `Not`."""

    key: str
    operator: Operator
    values: tuple[Scalar, ...]


class AllOf(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Conjunction."""

    filters: tuple["Filter", ...]


class AnyOf(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Disjunction."""

    filters: tuple["Filter", ...]


class Not(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Negation."""

    filter: "Filter"


Filter = Comparison | AllOf | AnyOf | Not
FilterLike = Filter | Mapping[str, Any] | bytes | None
"""A filter as callers pass it: parsed, as a JSON object, or encoded by `filter_bytes`."""
_decode = msgspec.json.Decoder(Filter).decode


def parse_filter(source: object) -> Filter:
    """Parse the JSON object of a filter into canonical form: filters that differ in order alone are equal.

    Raises `InvalidFilter` for an invalid filter, or one over MAX_DEPTH, MAX_COMPARISONS or MAX_VALUES.
    """
    return _Parser().parse(source, 1)


def canonical(filter: Filter) -> bytes:
    """Encode a filter; equal filters have equal encodings (a cache key)."""
    return msgspec.json.encode(filter)


def decode_filter(content: bytes) -> Filter:
    """Decode and validate the output of `canonical`. Raises `InvalidFilter`."""
    try:
        filter: Filter = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFilter(f"this is not a filter: {error}", "filter") from error
    _check_size(filter, 2 * MAX_DEPTH)  # `ne` and `nin` take two levels
    return filter


def _check_size(filter: Filter, depth: int) -> int:
    """Return the number of comparisons. Raises `InvalidFilter`."""
    if isinstance(filter, Comparison):
        count = 1
    elif depth == 1:
        raise InvalidFilter(f"the filter is nested deeper than {MAX_DEPTH} levels", "filter")
    else:
        parts = (filter.filter,) if isinstance(filter, Not) else filter.filters
        if not parts:
            raise InvalidFilter("'and' and 'or' need at least one filter", "filter")
        count = sum(_check_size(part, depth - 1) for part in parts)
    if count > MAX_COMPARISONS:
        raise InvalidFilter(f"the filter has more than {MAX_COMPARISONS} comparisons", "filter")
    return count


def filter_bytes(filter: FilterLike) -> bytes:
    """Encode a filter, or the JSON object of one, to be sent to a pool; b"" for none. Raises `InvalidFilter`."""
    if filter is None or isinstance(filter, bytes):
        return filter or b""
    parsed = filter if isinstance(filter, Comparison | AllOf | AnyOf | Not) else parse_filter(filter)
    content = canonical(parsed)
    if len(content) > MAX_BYTES:
        raise InvalidFilter(f"the filter has {len(content)} bytes; the limit is {MAX_BYTES}", "filter")
    return content


def check_filter(filter: Filter, schema: Schema) -> None:
    """Raise `InvalidFilter` for an attribute that a collection does not have, or a value of another type."""
    for comparison in comparisons(filter):
        kind = schema.get(comparison.key)
        if kind is None:
            # The known ones are not listed: they may be other tenants'.
            raise InvalidFilter(f"no document has the attribute {comparison.key!r}", "filter")
        for value in comparison.values:
            if not holds(_COMPARED_AS.get(kind, kind), value):
                raise InvalidFilter(
                    f"{comparison.key!r} is {kind.with_article}; it cannot be compared with {preview(value)}", "filter"
                )
        if comparison.operator in _ORDERED and kind in (AttributeType.BOOLEAN, AttributeType.STRINGS):
            raise InvalidFilter(
                f"{comparison.key!r} is {kind.with_article}, which has no order: {comparison.operator} is not possible",
                "filter",
            )


def binds(filter: Filter | None, key: str) -> bool:
    """Return whether a filter restricts an attribute to certain values (by eq or in)."""
    match filter:
        case Comparison():
            return filter.key == key and filter.operator in ("eq", "in")
        case AllOf():
            return any(binds(part, key) for part in filter.filters)
        case AnyOf():
            return all(binds(part, key) for part in filter.filters)
    return False


class AttributeBinding(NamedTuple):
    """An owner: restriction to documents with one value of an attribute (a string, or a list of strings).

    The owner finds all documents that pass `filter`, and may write only those that it `holds`, which it shares with no
    other owner.
    """

    key: str
    value: str

    @property
    def text(self) -> str:
        """The owner as a string."""
        return f"{self.key}={self.value}"

    def filter(self) -> Comparison:
        """Return the filter for these documents."""
        return Comparison(self.key, "eq", (self.value,))

    def holds(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether a document with these attributes has this value and no other."""
        attribute = attributes.get(self.key)
        values = attribute if isinstance(attribute, list | tuple) else [attribute]
        return len(values) > 0 and all(value == self.value for value in values)


def excludes(filter: Filter, bound: AttributeBinding) -> bool:
    """Return whether a filter requires other values of the attribute, so that no document could pass."""
    match filter:
        case Comparison():
            return binds(filter, bound.key) and bound.value not in filter.values
        case AllOf():
            return any(excludes(part, bound) for part in filter.filters)
        case AnyOf():
            return all(excludes(part, bound) for part in filter.filters)
    return False


def both_filters(one: Filter | None, other: Filter | None) -> Filter | None:
    """Return the conjunction of two filters; None passes everything."""
    if one is None or other is None:
        return one or other
    return _joined(AllOf, (one, other))


def comparisons(filter: Filter) -> list[Comparison]:
    """Return all comparisons of a filter."""
    match filter:
        case Comparison():
            return [filter]
        case Not():
            return comparisons(filter.filter)
    return [comparison for part in filter.filters for comparison in comparisons(part)]


def _levels(source: object) -> int:
    """Return the depth of a filter's JSON object."""
    levels, parts = 0, [source]
    while parts := [part for part in parts if isinstance(part, dict)]:
        levels += 1
        joined = [part.get("filters") for part in parts]
        parts = [part.get("filter") for part in parts]
        parts += [part for filters in joined if isinstance(filters, list) for part in filters]
    return levels


class _Parser:
    def __init__(self) -> None:
        self._comparisons = 0

    def parse(self, source: object, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise InvalidFilter(
                f"the filter has {depth - 1 + _levels(source)} levels; the limit is {MAX_DEPTH}", "filter"
            )
        if not isinstance(source, Mapping):
            raise InvalidFilter(f"a filter must be an object with a type, not {preview(source)}", "filter")
        match source.get("type"):
            case "and" | "or" as joint:
                parts = self._field(source, "filters")
                if not isinstance(parts, list | tuple) or not parts:
                    raise InvalidFilter(f"{joint!r} needs a list of filters, not {preview(parts)}", "filter")
                if len(parts) > MAX_COMPARISONS:
                    raise InvalidFilter(
                        f"{joint!r} joins {len(parts)} filters; the limit is {MAX_COMPARISONS}", "filter"
                    )
                parsed = tuple(self.parse(part, depth + 1) for part in parts)
                return _joined(AllOf if joint == "and" else AnyOf, parsed)
            case "not":
                return _negated(self.parse(self._field(source, "filter"), depth + 1))
            case str() as operator if operator in OPERATORS:
                return self._comparison(operator, source)  # type: ignore[arg-type]
            case other:
                raise InvalidFilter(
                    f"the type of a filter is and, or, not, {', '.join(OPERATORS)}; not {preview(other)}", "filter"
                )

    def _comparison(self, operator: Operator, source: Mapping[Any, Any]) -> Filter:
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS:
            raise InvalidFilter(f"the filter has more than {MAX_COMPARISONS} comparisons", "filter")
        key, value = self._field(source, "key", "value"), source["value"]
        if not isinstance(key, str) or not 1 <= len(key) <= _MAX_KEY or scalar_fault(key):  # of stores: any characters
            raise InvalidFilter(
                f"the key of a filter is the name of an attribute, up to {_MAX_KEY} characters, not {preview(key)}",
                "filter",
            )
        if operator not in ("in", "nin"):
            values: tuple[Scalar, ...] = (_scalar(key, value),)
        elif not isinstance(value, list | tuple):
            raise InvalidFilter(f"{operator!r} of {key!r} needs a list of values, not {preview(value)}", "filter")
        elif len(value) > MAX_VALUES:
            raise InvalidFilter(f"{operator!r} of {key!r} has {len(value)} values; the limit is {MAX_VALUES}", "filter")
        else:
            different = {_order(item): item for item in (_scalar(key, item) for item in value)}
            values = tuple(different[order] for order in sorted(different))
        positive = Comparison(key, _NEGATED.get(operator, operator), values)
        return Not(positive) if operator in _NEGATED else positive

    @staticmethod
    def _field(source: Mapping[Any, Any], name: str, *others: str) -> Any:
        expected = {"type", name, *others}
        if set(source) != expected:
            raise InvalidFilter(
                f"a filter of type {source['type']!r} has {', '.join(sorted(expected))}, not {preview(list(source))}",
                "filter",
            )
        return source[name]


def _joined(joint: type[AllOf] | type[AnyOf], parts: tuple[Filter, ...]) -> Filter:
    flat: dict[bytes, Filter] = {}
    for part in parts:
        for inner in part.filters if isinstance(part, joint) else (part,):
            flat[canonical(inner)] = inner
    ordered = tuple(flat[key] for key in sorted(flat))
    return ordered[0] if len(ordered) == 1 else joint(ordered)


def _negated(inner: Filter) -> Filter:
    return inner.filter if isinstance(inner, Not) else Not(inner)


def _scalar(key: str, value: object) -> Scalar:
    if not isinstance(value, str | int | float | bool):
        raise InvalidFilter(f"{key!r} is compared with a string, a number or a boolean, not {preview(value)}", "filter")
    if fault := scalar_fault(value):
        raise InvalidFilter(f"{key!r} is compared with {preview(value)}, which {fault}", "filter")
    return value


def _order(value: Scalar) -> tuple[str, Scalar]:
    return type(value).__name__, value
