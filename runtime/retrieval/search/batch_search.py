"""A batch of queries: sent as far as there is room, the rest as results arrive."""

from runtime.errors import TrinityError
from runtime.retrieval.search.dispatcher import BATCH_QUERIES, Dispatcher
from runtime.retrieval.search.query import Query, SearchBatch, SearchResult, failed_result
from runtime.retrieval.search.vectors import Vectors


class BatchSearch:
    """Alternate `send` and `add` until `done`, then read `result`. Ends even if no pool ever appears."""

    def __init__(self, dispatcher: Dispatcher, queries: list[Query], rows: Vectors, k: int) -> None:
        self._dispatcher, self._queries, self._rows, self._k = dispatcher, queries, rows, k
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
        while self._sent < len(self._queries):
            chunk = slice(self._sent, self._sent + BATCH_QUERIES)
            queries = self._queries[chunk]
            error = self._dispatcher.wait_error(queries[0], self._since_ns, self._dispatcher.clock())
            if error is not None:
                self._fail_unsent(error)
                return
            try:
                count = self._dispatcher.submit_many(queries, self._rows[chunk])
            except TrinityError as refusal:
                if self._sent == 0:
                    raise
                self._fail(queries[0], refusal)
                count = 1
            if count == 0:
                return
            self._sent += count

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
