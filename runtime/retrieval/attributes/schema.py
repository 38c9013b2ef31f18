"""Attributes and their types: what a document may bring, and what a collection has learnt of it.

A collection learns an attribute's type when it first meets it, and refuses values of another one from then on.
"""

import math
import re
from collections.abc import Mapping
from enum import StrEnum

from runtime.errors import InvalidDocument
from runtime.retrieval.passages import Attributes

MAX_ATTRIBUTES = 64  # of a collection
MAX_STRING_BYTES = 4096
MAX_LIST = 256  # strings of one value
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_INT64 = 1 << 63


class AttributeType(StrEnum):
    """The type of an attribute."""

    STRING = "string"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    STRINGS = "list of strings"

    @property
    def one(self) -> str:
        """In a sentence: "an integer"."""
        return f"an {self}" if self is AttributeType.INTEGER else f"a {self}"


Schema = Mapping[str, AttributeType]


def attribute_type(name: str, value: object) -> AttributeType:
    """The type of a value. Raises `InvalidDocument` for one that is none, or over its limit."""
    match value:
        case bool():
            return AttributeType.BOOLEAN
        case int():
            if not -_INT64 <= value < _INT64:
                raise InvalidDocument(f"attribute {name!r} is an integer that does not fit into 64 bits", "attributes")
            return AttributeType.INTEGER
        case float():
            if not math.isfinite(value):
                raise InvalidDocument(f"attribute {name!r} is {value}; it must be finite", "attributes")
            return AttributeType.FLOAT
        case str():
            _check_string(name, value)
            return AttributeType.STRING
        case list() | tuple():
            if len(value) > MAX_LIST:
                raise InvalidDocument(
                    f"attribute {name!r} has {len(value)} strings; the limit is {MAX_LIST}", "attributes"
                )
            for item in value:
                if not isinstance(item, str):
                    raise InvalidDocument(
                        f"attribute {name!r} holds {preview(item)} in its list; only strings may be there", "attributes"
                    )
                _check_string(name, item)
            return AttributeType.STRINGS
    raise InvalidDocument(
        f"attribute {name!r} is {preview(value)}; it must be a string, a number, a boolean or a list of strings",
        "attributes",
    )


def extend_schema(schema: Schema, attributes: Attributes) -> dict[str, AttributeType]:
    """The schema with what a document's attributes add to it. An integer may stand where floats are.

    Raises `InvalidDocument` for a value of another type than before, a name that is none, or one name too many.
    """
    known = dict(schema)
    for name, value in attributes.items():
        if name not in known and not (isinstance(name, str) and NAME.fullmatch(name)):
            raise InvalidDocument(
                f"attribute {preview(name)} cannot be a name: up to 64 letters, digits, '_', '.' and '-'", "attributes"
            )
        kind, before = attribute_type(name, value), known.get(name)
        if before is None:
            if len(known) == MAX_ATTRIBUTES:
                raise InvalidDocument(
                    f"attribute {name!r} is one too many: the limit is {MAX_ATTRIBUTES}", "attributes"
                )
            known[name] = kind
        elif kind != before and not (kind is AttributeType.INTEGER and before is AttributeType.FLOAT):
            raise InvalidDocument(
                f"attribute {name!r} is {kind.one}, {preview(value)}; it was {before.one} before", "attributes"
            )
    return known


def preview(value: object) -> str:
    """What an error says of a value: 80 characters at most, also of a number that Python does not print."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a number of over 4,300 digits"


def _check_string(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidDocument(f"attribute {name!r} holds an unpaired surrogate", "attributes") from error
    if size > MAX_STRING_BYTES:
        raise InvalidDocument(f"attribute {name!r} has {size} bytes; the limit is {MAX_STRING_BYTES}", "attributes")
