"""A passage: a retrieved document."""

from collections.abc import Mapping, Sequence

import msgspec

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]
"""A document's metadata: of a passage from a file `source` (its path), `heading` and `page`."""


class Passage(msgspec.Struct, frozen=True):
    """A retrieved document: id in the collection, title, distance to the query, text, attributes."""

    id: str
    title: str
    distance: float
    text: str = ""
    attributes: Attributes = {}


class PartialPassages(list[Passage]):
    """Passages of a collection on several nodes, some of which did not answer."""
