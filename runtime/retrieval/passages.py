"""A passage: a retrieved document."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from runtime.errors import ResponseTooLarge

MAX_PASSAGES_BYTES = 32 << 20  # of one search, also as JSON: another node reads no more
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


OnRead = Callable[[int], None]
"""Called with the bytes of all passages of a search that were read so far, before the next one is read."""


def without_text(passages: Iterable[Passage]) -> tuple[Passage, ...]:
    """Return the passages as clients receive them as citations: without their texts."""
    return tuple(msgspec.structs.replace(passage, text="") for passage in passages)


def within(passages: Sequence[Passage], distance: float) -> list[Passage]:
    """Return the passages that are not farther than a distance; those with none are kept."""
    return [passage for passage in passages if not passage.distance > distance]


def ignore_size(size: int) -> None:
    """An `OnRead` of a search whose passages are not sent to a client."""


def size_of(id: str, title: str, text: str, attributes: Attributes) -> int:
    """Return the bytes of a passage's texts and attributes."""
    texts = (part if part.isascii() else part.encode(errors="replace") for part in (id, title, text))
    return sum(map(len, texts)) + (len(msgspec.json.encode(attributes)) if attributes else 0)


def check_size(size: int, wanted: int) -> None:
    """Raise `ResponseTooLarge` if the first passages of `wanted` have too many bytes."""
    if size > MAX_PASSAGES_BYTES:
        raise ResponseTooLarge(
            f"the {wanted} passages have {size:,} bytes or more, the limit is {MAX_PASSAGES_BYTES:,}: search for fewer",
            "k",
        )
