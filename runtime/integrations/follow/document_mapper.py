"""Mapping of a database's points to documents: which field is the text, and which become attributes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidDocument
from runtime.integrations.follow.source import Point
from runtime.retrieval.attributes.schema import Schema, extend_schema, preview
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.passages import Attribute


@dataclass(frozen=True)
class FieldMapping:
    """Names of a point's fields: `text`, `title`, and those that become `attributes` (empty: all that can).

    A field within an object is named with dots: `metadata.source`.
    """

    text: str = "text"
    title: str = "title"
    attributes: tuple[str, ...] = ()


class DocumentMapper:
    """Converts points to documents. Fields that cannot be attributes are left out, and each is reported once."""

    def __init__(self, fields: FieldMapping, report: Callable[[str], None]) -> None:
        self._fields, self._report = fields, report
        self._reported: set[str] = set()

    def to_document(self, point: Point, schema: Schema) -> UpsertDocument:
        """Convert a point. schema: of the attributes so far. Raises `InvalidDocument` if the text is not a string."""
        flat = dict(flattened(point.fields))
        text, title = flat.pop(self._fields.text, ""), flat.pop(self._fields.title, "")
        if not isinstance(text, str):
            raise InvalidDocument(
                f"field {self._fields.text!r} of point {point.key!r} is {preview(text)}, not a string"
            )
        if not text:
            self._report_once(self._fields.text, f"point {point.key!r} has no text in the field {self._fields.text!r}")
        attributes: dict[str, Attribute] = {}
        for name, value in flat.items():
            if not self._fields.attributes or name in self._fields.attributes:
                try:
                    schema = extend_schema(schema, {name: value})
                    attributes[name] = value
                except InvalidDocument as error:
                    self._report_once(name, f"point {point.key!r}: {error.message}; the attribute is left out")
        return UpsertDocument(str(point.key), text, str(title), attributes, point.vector)

    def _report_once(self, name: str, message: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._report(message)


def flattened(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, with those of nested objects; omits nulls."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value
