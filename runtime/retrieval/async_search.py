"""Retrieval inside an event loop: what the frontend answers `/v1/retrieval` with."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from runtime.retrieval.async_client import AsyncSearchClient
from runtime.retrieval.client import SearchClient
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import Library


class AsyncSearch:
    """Searches for many callers of one event loop. Embedding runs in a thread of its own, so the loop goes on."""

    def __init__(self, library: Library, client: SearchClient, timeout_s: float) -> None:
        self._library = library
        self._client = AsyncSearchClient(client)
        self._timeout_ms = timeout_s * 1e3
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="embed")

    def missing(self) -> list[str]:
        """["pool"] while no pool is attached."""
        return [] if self._client.live else ["pool"]

    async def search(
        self,
        *,
        collection: str,
        k: int,
        query: str | None,
        vector: Sequence[float] | None,
        embedded: Callable[[], None],
    ) -> list[Passage]:
        """The k nearest passages to a text or a vector, nearest first. Raises `TrinityError`.

        `embedded` is called when the query's vector is there.
        """
        if query is not None:
            loop = asyncio.get_running_loop()
            array = (await loop.run_in_executor(self._embedding, self._library.embed, collection, [query]))[0]
        else:
            array = np.asarray(vector, dtype=np.float32)
        embedded()
        result = await self._client.search(array, k, collection=collection, deadline_ms=self._timeout_ms)
        return list(self._library.passages(collection, result))

    async def run(self) -> None:
        """Bring results to their callers until cancelled."""
        try:
            await self._client.run()
        finally:
            self._embedding.shutdown(wait=False, cancel_futures=True)
