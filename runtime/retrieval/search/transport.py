"""Interface of query transports: local pools (`Dispatcher`) or other nodes over HTTP (`RemoteDispatcher`)."""

from collections.abc import Sequence
from typing import Protocol

from runtime.errors import TrinityError
from runtime.retrieval.search.query import Query, SearchResult
from runtime.retrieval.search.vectors import Vectors


class QueryTransport(Protocol):
    """Every accepted query ends exactly once in `collect`, unless it was cancelled. No method blocks."""

    def clock(self) -> int:
        """Return the time that deadlines are compared with: monotonic ns."""

    def submit(self, query: Query, wait_for_room: bool = False) -> None:
        """Accept a query; with `wait_for_room` also if it cannot be sent yet. Raises `InvalidRequest`, `Overloaded`,
        `Unavailable` if it is not accepted."""

    def submit_many(self, queries: list[Query], rows: Vectors) -> int:
        """Accept as many queries as there is room for, from the first on; return how many.

        They differ in their vectors alone, `rows` [n, dim]. Raises as `submit`.
        """

    def wait_error(self, query: Query, since_ns: int, now_ns: int) -> TrinityError | None:
        """Return the error that ends a query not accepted since `since_ns`; None if it may still wait."""

    def cancel(self, ticket: int) -> None:
        """Cancel a query: it ends with an error, or is not returned by `collect`."""

    def collect(self) -> Sequence[SearchResult]:
        """Return what has ended since the last call."""

    def close(self) -> None:
        """Close the transport; outstanding queries never end. Idempotent."""
