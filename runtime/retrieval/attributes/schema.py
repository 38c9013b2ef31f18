"""Types of attributes, and a collection's schema.

An attribute's type is fixed by the first document that has it; values of another type are refused from then on.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from runtime.errors import InvalidDocument
from runtime.retrieval.passages import Attributes

MAX_ATTRIBUTES = 64  # of a collection
MAX_STRING_BYTES = 4096
MAX_LIST = 256  # strings in one list
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
    def with_article(self) -> str:
        """For messages: "an integer"."""
        return f"an {self}" if self is AttributeType.INTEGER else f"a {self}"


Schema = Mapping[str, AttributeType]


def attribute_type(name: str, value: object) -> AttributeType:
    """Return the type of a value. Raises `InvalidDocument` for an unsupported type or a value over its limit."""
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
                        f"attribute {name!r} has {preview(item)} in its list; only strings are allowed", "attributes"
                    )
                _check_string(name, item)
            return AttributeType.STRINGS
    raise InvalidDocument(
        f"attribute {name!r} is {preview(value)}; it must be a string, a number, a boolean or a list of strings",
        "attributes",
    )


def holds(kind: AttributeType, value: object) -> bool:
    """Return whether a valid value can be stored under a type. An integer is a valid value of a float attribute."""
    match kind:
        case AttributeType.STRING:
            return isinstance(value, str)
        case AttributeType.STRINGS:
            return isinstance(value, list | tuple)
        case AttributeType.BOOLEAN:
            return isinstance(value, bool)
        case AttributeType.INTEGER:
            return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: Mapping[type, AttributeType] = {
    bool: AttributeType.BOOLEAN,
    int: AttributeType.INTEGER,
    float: AttributeType.FLOAT,
    str: AttributeType.STRING,
    list: AttributeType.STRINGS,
    tuple: AttributeType.STRINGS,
}


def by_shape(documents: Iterable[Attributes]) -> dict[object, Attributes]:
    """Return one of the valid documents for each combination of names and types: they extend a schema as all do."""
    return {tuple([(name, type(value)) for name, value in one.items()]): one for one in documents}


def agrees(schema: Schema, documents: Iterable[Attributes]) -> bool:
    """Return whether valid documents do not extend a schema."""
    return all(
        name in schema and (_KINDS.get(type(value)) is schema[name] or holds(schema[name], value))
        for attributes in documents
        for name, value in attributes.items()
    )


def extend_schema(schema: Schema, attributes: Attributes) -> dict[str, AttributeType]:
    """Return the schema extended by a document's attributes. An integer is a valid value of a float attribute.

    Raises `InvalidDocument` for a value of another type than before, an invalid name, or too many attributes.
    """
    known = dict(schema)
    for name, value in attributes.items():
        if name not in known and not (isinstance(name, str) and NAME.fullmatch(name)):
            raise InvalidDocument(
                f"attribute {preview(name)} is not a valid name: up to 64 letters, digits, '_', '.' and '-'",
                "attributes",
            )
        kind, before = attribute_type(name, value), known.get(name)
        if before is None:
            if len(known) == MAX_ATTRIBUTES:
                raise InvalidDocument(
                    f"attribute {name!r} exceeds the limit of {MAX_ATTRIBUTES} attributes per collection", "attributes"
                )
            known[name] = kind
        elif kind != before and not (kind is AttributeType.INTEGER and before is AttributeType.FLOAT):
            raise InvalidDocument(
                f"attribute {name!r} is {kind.with_article}, {preview(value)}; it was {before.with_article} before",
                "attributes",
            )
    return known


def preview(value: object) -> str:
    """Return a value for an error message: 80 characters at most, also for integers that Python does not print.

    Null and booleans are written as in JSON.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a number of over 4,300 digits"


def _check_string(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidDocument(f"attribute {name!r} contains an unpaired surrogate", "attributes") from error
    if size > MAX_STRING_BYTES:
        raise InvalidDocument(f"attribute {name!r} has {size} bytes; the limit is {MAX_STRING_BYTES}", "attributes")
