"""A database's points as documents: which field is the text, and which are attributes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidDocument
from runtime.integrations.follow.source import Point
from runtime.retrieval.attributes.schema import Schema, extend_schema
from runtime.retrieval.live.validation import UpsertDocument
from runtime.retrieval.passages import Attribute


@dataclass(frozen=True)
class FieldMapping:
    """Of a point: `text` and `title` name the fields with these, `attributes` those that become attributes (empty: all
    that can). A field within an object is named with dots: `metadata.source`."""

    text: str = "text"
    title: str = "title"
    attributes: tuple[str, ...] = ()


class DocumentMapper:
    """Makes documents of points. What cannot be an attribute of this collection is left out, and `report` told once."""

    def __init__(self, fields: FieldMapping, report: Callable[[str], None]) -> None:
        self._fields, self._report = fields, report
        self._told: set[str] = set()

    def to_document(self, point: Point, schema: Schema) -> UpsertDocument:
        """schema: of the attributes that the collection knows. Raises `InvalidDocument` where the text is none."""
        flat = dict(flattened(point.fields))
        text, title = flat.pop(self._fields.text, ""), flat.pop(self._fields.title, "")
        if not isinstance(text, str):
            raise InvalidDocument(f"field {self._fields.text!r} of point {point.key!r} is no text, but {text!r:.80}")
        if not text:
            self._say(self._fields.text, f"point {point.key!r} has no text in the field {self._fields.text!r}")
        attributes: dict[str, Attribute] = {}
        for name, value in flat.items():
            if not self._fields.attributes or name in self._fields.attributes:
                try:
                    schema = extend_schema(schema, {name: value})
                    attributes[name] = value
                except InvalidDocument as error:
                    self._say(name, f"point {point.key!r}: {error.message}; such are left out")
        return UpsertDocument(str(point.key), text, str(title), attributes, point.vector)

    def _say(self, name: str, words: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._report(words)


def flattened(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, of objects within objects too; what is null is not there."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value
