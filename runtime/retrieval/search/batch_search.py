"""Many queries as one call: sent as far as there is room, the next ones as others come back."""

from runtime.errors import TrinityError
from runtime.retrieval.search.dispatcher import BATCH_QUERIES
from runtime.retrieval.search.query import Query, SearchBatch, SearchResult, failed_result
from runtime.retrieval.search.transport import QueryTransport
from runtime.retrieval.search.vectors import Vectors


class BatchSearch:
    """`send` and `take` what ended, in turn, until `done`; then `result`. Ends even if no pool ever comes."""

    def __init__(self, transport: QueryTransport, queries: list[Query], rows: Vectors, k: int) -> None:
        self._transport, self._queries, self._rows, self._k = transport, queries, rows, k
        self._since_ns = transport.clock()
        self._sent = 0  # questions that were taken, or have failed before they were
        self._rows_of = {query.ticket: row for row, query in enumerate(queries)}
        self._results: list[SearchResult | None] = [None] * len(queries)
        self._missing = len(queries)

    @property
    def done(self) -> bool:
        return self._missing == 0

    def send(self) -> None:
        """Ask what there is room for. Raises `InvalidRequest` for what cannot be asked: nothing was sent then."""
        while self._sent < len(self._queries):
            next_ones = slice(self._sent, self._sent + BATCH_QUERIES)
            queries = self._queries[next_ones]
            end = self._transport.wait_error(queries[0], self._since_ns, self._transport.clock())
            if end is not None:
                self._give_up(end)
                return
            try:
                count = self._transport.submit_many(queries, self._rows[next_ones])
            except TrinityError as error:
                if self._sent == 0:
                    raise
                self._fail(queries[0], error)
                count = 1
            if count == 0:
                return
            self._sent += count

    def _give_up(self, end: TrinityError) -> None:
        for query in self._queries[self._sent :]:
            self._fail(query, end)
        self._sent = len(self._queries)

    def _fail(self, query: Query, error: TrinityError) -> None:
        self.take(failed_result(query.ticket, error))

    def take(self, result: SearchResult) -> bool:
        """Keep a result. False: it is not of this batch."""
        row = self._rows_of.get(result.ticket)
        if row is None:
            return False
        self._results[row] = result
        self._missing -= 1
        return True

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
        for row, query in enumerate(self._queries[: self._sent]):
            if self._results[row] is None:
                self._transport.cancel(query.ticket)

    def result(self) -> SearchBatch:
        """All results, once `done`."""
        return SearchBatch([result for result in self._results if result is not None], self._k)
