"""A batch of queries: sent as far as there is room, the rest as results arrive."""

from runtime.errors import Overloaded, TrinityError
from runtime.retrieval.search.dispatcher import Dispatcher
from runtime.retrieval.search.query import Query, SearchBatch, SearchResult, failed_result


class BatchSearch:
    """Alternate `send` and `add` until `done`, then read `result`. Ends even if no pool ever appears."""

    def __init__(self, dispatcher: Dispatcher, queries: list[Query], k: int) -> None:
        self._dispatcher, self._queries, self._k = dispatcher, queries, k
        self._since_ns = dispatcher.clock()
        self._sent = 0  # queries that were accepted, or failed before
        self._row_of = {query.ticket: row for row, query in enumerate(queries)}
        self._results: list[SearchResult | None] = [None] * len(queries)
        self._missing = len(queries)

    @property
    def done(self) -> bool:
        """Whether every query has ended."""
        return self._missing == 0

    def send(self) -> None:
        """Send as many queries as there is room for. Raises `InvalidRequest` for the first; nothing was sent then."""
        if self._sent == len(self._queries):
            return
        error = self._dispatcher.wait_error(self._queries[self._sent], self._since_ns, self._dispatcher.clock())
        if error is not None:
            self._fail_unsent(error)
        while self._sent < len(self._queries):
            query = self._queries[self._sent]
            try:
                self._dispatcher.submit(query)
            except Overloaded:
                return
            except TrinityError as refusal:
                if self._sent == 0:
                    raise
                self._fail(query, refusal)
            self._sent += 1

    def _fail_unsent(self, error: TrinityError) -> None:
        for query in self._queries[self._sent :]:
            self._fail(query, error)
        self._sent = len(self._queries)

    def _fail(self, query: Query, error: TrinityError) -> None:
        self.add(failed_result(query.ticket, error))

    def add(self, result: SearchResult) -> bool:
        """Store a result. Return False if it does not belong to this batch."""
        row = self._row_of.get(result.ticket)
        if row is None:
            return False
        self._results[row] = result
        self._missing -= 1
        return True

    def cancel(self) -> None:
        """Cancel all outstanding queries."""
        for row, query in enumerate(self._queries[: self._sent]):
            if self._results[row] is None:
                self._dispatcher.cancel(query.ticket)

    def result(self) -> SearchBatch:
        """Return all results, once `done`."""
        return SearchBatch([result for result in self._results if result is not None], self._k)
