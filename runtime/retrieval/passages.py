"""A passage: a retrieved document."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from runtime.errors import ResponseTooLarge

MAX_PASSAGES_BYTES = 32 << 20  # of one search, also as JSON
Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]
"""A document's metadata: of a passage from a file `source` (its path), `heading` and `page`."""


class Passage(msgspec.Struct, frozen=True):
    """A retrieved document: id in the collection, title, distance to the query, text, attributes.

    `score`: its relevance to the query by the reranker, None if it was not reranked.
    """

    id: str
    title: str
    distance: float
    text: str = ""
    attributes: Attributes = {}
    score: float | None = None


RERANKED = "reranked"


class SearchTimes(msgspec.Struct, frozen=True):
    """Monotonic ns at which a batch of texts began with the query's, the pools had answered, and the passages had been
    read, if they were then reranked; 0: it did not happen."""

    batched_ns: int = 0
    found_ns: int = 0
    read_ns: int = 0


NO_TIMES = SearchTimes()


class FoundPassages(list[Passage]):
    """Passages of a search, and what there is to say about it.

    `ranking`: `RERANKED`; the code of the error that prevented it; or "", not requested.
    """

    def __init__(self, passages: Iterable[Passage] = (), *, ranking: str = "", times: SearchTimes = NO_TIMES) -> None:
        super().__init__(passages)
        self.ranking, self.times = ranking, times

    @classmethod
    def of(cls, passages: Iterable[Passage]) -> "FoundPassages":
        """Return the passages themselves, or a list of them about which there is nothing to say."""
        return passages if isinstance(passages, FoundPassages) else cls(passages)


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
    size = len(msgspec.json.encode(attributes)) if attributes else 0
    for part in (id, title, text):
        size += len(part) if part.isascii() else len(part.encode(errors="replace"))
    return size


def check_size(size: int, wanted: int) -> None:
    """Raise `ResponseTooLarge` if the first passages of `wanted` have too many bytes."""
    if size > MAX_PASSAGES_BYTES:
        raise ResponseTooLarge(
            f"the {wanted} passages have {size:,} bytes or more, the limit is {MAX_PASSAGES_BYTES:,}: search for fewer",
            "k",
        )
