"""A worker's library follows the pools that its client is attached to, and the worker's table tells how that goes."""

from runtime.node.metrics.columns import RetrievingMetrics
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.library import Library
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient

EVERY_NS = 500_000_000


class Follower:
    """`step` as often as one likes; it acts twice a second."""

    def __init__(self, library: Library, client: SearchClient | AsyncSearchClient, table: WorkerTable) -> None:
        self._library, self._client, self._table = library, client, table
        self._due_ns = 0

    def step(self, now_ns: int) -> None:
        """Open the documents of what is served by now, and say of which collections they are missing."""
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + EVERY_NS
        for collection in self._library.dims:
            self._library.follow(collection, self._client.identities(collection))
        troubles = self._library.troubles
        self._table.set(RetrievingMetrics.WITHOUT_DOCUMENTS, len(troubles))
        note = "; ".join(f"collection {name}: {trouble}" for name, trouble in troubles.items())
        if self._table.note != note:
            self._table.note = note
