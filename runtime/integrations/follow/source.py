"""What a database is to be for its collection to be followed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from runtime.errors import Unavailable

_T = TypeVar("_T")
_WAITS_S = (0.5, 1.0, 2.0, 4.0)  # between attempts


@dataclass(frozen=True)
class Point:
    """A point, or row. `key`: its id as the database has it; `vector`: d numbers, None where it was not asked for."""

    key: int | str
    fields: dict[str, Any]
    vector: Sequence[float] | None = None


class Source(Protocol):
    """A collection of a database, or what of it passes a filter.

    dim: of its vectors. metric: cosine, l2 or ip. Its methods raise `Unavailable` where the database does not answer.
    """

    dim: int
    metric: str

    def count(self) -> int:
        """How many points there are, about."""

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        """All points that are there all the while, at most `size` at once. fields: None for all of them."""

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        """The points with these ids that are there."""


def call_with_retries(
    what: str, call: Callable[..., _T], *given: Any, sleep: Callable[[float], None] = time.sleep, **named: Any
) -> _T:
    """What a database's client answers, asked again a few times. Raises `Unavailable` with its last complaint.

    What it refuses for good (a status of 4xx) is not asked again.
    """
    for wait_s in (*_WAITS_S, None):
        try:
            return call(*given, **named)
        except Exception as error:  # each library has its own
            refused = 400 <= int(getattr(error, "status_code", None) or 500) < 500
            if refused or wait_s is None:
                raise Unavailable(f"{what}: {type(error).__name__}: {str(error).strip()[:500]}") from error
            sleep(wait_s)
    raise AssertionError
