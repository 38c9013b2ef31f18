"""Interface of the databases whose collections can be followed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from runtime.errors import Unavailable

_T = TypeVar("_T")
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)  # between attempts


@dataclass(frozen=True)
class Point:
    """A point or row. `key`: its id in the database; `vector`: d numbers, None if it was not requested."""

    key: int | str
    fields: dict[str, Any]
    vector: Sequence[float] | None = None


class Source(Protocol):
    """A collection of a database, or the points that pass a filter.

    dim: of its vectors. metric: cosine, l2 or ip. Methods raise `Unavailable` if the database does not respond.
    """

    dim: int
    metric: str

    def count(self) -> int:
        """Return the approximate number of points."""

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        """Yield pages of at most `size` points, including all that exist throughout. fields: None for all of them."""

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        """Return the points with these ids that exist."""


def call_with_retries(
    name: str, call: Callable[..., _T], *arguments: Any, sleep: Callable[[float], None] = time.sleep, **options: Any
) -> _T:
    """Call a method of a database's client, with retries. Raises `Unavailable` with the last error.

    Permanent errors (a status of 4xx) are not retried. name: of the source, for the error.
    """
    for wait_s in (*_BACKOFF_S, None):
        try:
            return call(*arguments, **options)
        except Exception as error:  # each library has its own exceptions
            permanent = 400 <= int(getattr(error, "status_code", None) or 500) < 500
            if permanent or wait_s is None:
                raise Unavailable(f"{name}: {type(error).__name__}: {str(error).strip()[:500]}") from error
            sleep(wait_s)
    raise AssertionError
