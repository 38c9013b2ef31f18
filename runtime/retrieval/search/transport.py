"""What takes queries to who answers them: the pools of this node (`Dispatcher`), other nodes (`RemoteDispatcher`)."""

from collections.abc import Sequence
from typing import Protocol

from runtime.errors import TrinityError
from runtime.retrieval.search.query import Query, SearchResult
from runtime.retrieval.search.vectors import Vectors


class QueryTransport(Protocol):
    """Every question that is taken ends once in `collect`, unless it was cancelled. Nothing waits."""

    def clock(self) -> int:
        """Monotonic ns: what deadlines are measured by."""

    def submit(self, query: Query, wait_for_room: bool = False) -> None:
        """Take a question, also while there is no room to send it if it is `wait_for_room`. Raises `InvalidRequest`,
        `Overloaded`, `Unavailable`: not taken."""

    def submit_many(self, queries: list[Query], rows: Vectors) -> int:
        """As many of the questions as there is room for now, from the first on; how many. They are alike but for their
        vectors, `rows` [n, dim]. Raises as `ask`."""

    def wait_error(self, query: Query, since_ns: int, now_ns: int) -> TrinityError | None:
        """What ends a question that was not taken since `since_ns`; None if it may wait on."""

    def cancel(self, ticket: int) -> None:
        """The result is not wanted any more; it comes as an error, or not at all."""

    def collect(self) -> Sequence[SearchResult]:
        """What has ended since the last call."""

    def close(self) -> None:
        """What is outstanding never comes. Idempotent."""
