"""A passage: what retrieval finds and an answer uses."""

import msgspec


class Passage(msgspec.Struct, frozen=True):
    """A document that was found: its id in the collection, its title, its distance to the query, its text."""

    id: str
    title: str
    distance: float
    text: str
