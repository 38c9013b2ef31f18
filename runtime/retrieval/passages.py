"""A passage: what retrieval finds and an answer uses."""

from collections.abc import Mapping, Sequence

import msgspec

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]
"""What is known of a document beside its text: of a file's passage `source`, its path, `heading` and `page`."""


class Passage(msgspec.Struct, frozen=True):
    """A document that was found: its id in the collection, its title, its distance to the query, its text, and what
    else is known of it."""

    id: str
    title: str
    distance: float
    text: str = ""
    attributes: Attributes = {}


class PartialPassages(list[Passage]):
    """Passages that were found without some of the nodes that a collection is on."""
