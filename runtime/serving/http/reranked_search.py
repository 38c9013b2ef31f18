"""Searches of the frontend with reranking."""

from collections.abc import Callable
from time import monotonic_ns

from msgspec.structs import replace

from runtime.retrieval.async_retriever import run_steps, wait_until
from runtime.retrieval.passages import FoundPassages, OnRead
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.query import Query
from runtime.serving.http.service import SearchSource


class RerankedSearch:
    """A `SearchSource` that reranks the passages of `source` for the queries that want it."""

    def __init__(self, source: SearchSource, reranking: Reranking) -> None:
        self._source, self._reranking = source, reranking

    async def search(
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> FoundPassages:
        """See `SearchSource`."""
        until_ns = monotonic_ns() + int(timeout_s * 1e9)
        wanted = query if query.rerank is None else self._reranking.candidates(query)
        found = FoundPassages.of(
            await self._source.search(wanted, on_embedded=on_embedded, on_read=on_read, timeout_s=timeout_s)
        )
        if query.rerank is None:
            return found
        times = replace(found.times, read_ns=monotonic_ns())
        query = replace(query, spec=replace(query.spec, deadline_ns=until_ns))
        passages, ranking = await run_steps(self._reranking.rank(query, found), wait_until)
        return FoundPassages(passages, ranking=ranking, times=times)

    def missing(self) -> list[str]:
        return self._source.missing()

    def unavailable(self) -> dict[str, str]:
        return self._source.unavailable()
