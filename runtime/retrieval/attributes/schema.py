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


_KINDS: Mapping[type, AttributeType] = {
    bool: AttributeType.BOOLEAN,  # before int, which it is too
    int: AttributeType.INTEGER,
    float: AttributeType.FLOAT,
    str: AttributeType.STRING,
    list: AttributeType.STRINGS,
    tuple: AttributeType.STRINGS,
}


def _kind_of(value: object) -> AttributeType | None:
    kind_of_type = _KINDS.get(type(value))
    return kind_of_type or next((kind for base, kind in _KINDS.items() if isinstance(value, base)), None)


def attribute_type(name: str, value: object) -> AttributeType:
    """Return the type of a value. Raises `InvalidDocument` for an unsupported type or a value over its limit."""
    kind = _kind_of(value)
    if kind is None:
        raise InvalidDocument(
            f"attribute {name!r} is {preview(value)}; it must be a string, a number, a boolean or a list of strings",
            "attributes",
        )
    if isinstance(value, list | tuple):
        if len(value) > MAX_LIST:
            raise InvalidDocument(f"attribute {name!r} has {len(value)} strings; the limit is {MAX_LIST}", "attributes")
        for item in value:
            if not isinstance(item, str):
                raise InvalidDocument(
                    f"attribute {name!r} has {preview(item)} in its list; only strings are allowed", "attributes"
                )
    for scalar in value if isinstance(value, list | tuple) else (value,):
        if fault := scalar_fault(scalar):
            raise InvalidDocument(f"attribute {name!r} is {preview(scalar)}, which {fault}", "attributes")
    return kind


def scalar_fault(value: object) -> str:
    """Return why a string or number can be neither an attribute nor be compared with one; "" if it can."""
    if isinstance(value, str):
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            return "contains an unpaired surrogate"
        return f"has {size} bytes; the limit is {MAX_STRING_BYTES}" if size > MAX_STRING_BYTES else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else "is not finite"
    return "" if isinstance(value, int) and -_INT64 <= value < _INT64 else "does not fit into 64 bits"


def holds(kind: AttributeType, value: object) -> bool:
    """Return whether a valid value can be stored under a type. An integer is a valid value of a float attribute."""
    actual = _kind_of(value)
    return actual is kind or (kind is AttributeType.FLOAT and actual is AttributeType.INTEGER)


def by_shape(documents: Iterable[Attributes]) -> dict[object, Attributes]:
    """Return one of the valid documents for each combination of names and types: they extend a schema as all do."""
    return {tuple([(name, type(value)) for name, value in attributes.items()]): attributes for attributes in documents}


def agrees(schema: Schema, attributes: Attributes) -> bool:
    """Return whether a valid document does not extend a schema."""
    return all(name in schema and holds(schema[name], value) for name, value in attributes.items())


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
