"""Retrieval for asyncio: the frontend's searches and embeddings."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from runtime.errors import CollectionReplaced, InvalidFilter, InvalidRequest
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import (
    MAX_BUILD_ATTEMPTS,
    NEW_ATTRIBUTE_WAIT_NS,
    PassageQuery,
    deadline_after_ms,
)

_ATTRIBUTE_POLL_S = 0.01


class AsyncRetriever:
    """Retrieval for the tasks of one event loop. Embedding and keyword search run on threads."""

    def __init__(self, registry: CollectionRegistry, client: SearchClient) -> None:
        self.registry = registry
        self.client = AsyncSearchClient(client)
        self._embedding: dict[str, ThreadPoolExecutor] = {}
        self._keywords = ThreadPoolExecutor(1, thread_name_prefix="keywords")

    def missing(self) -> list[str]:
        """Return ["pool"] while no pool is attached."""
        return [] if self.client.live else ["pool"]

    async def search(
        self, request: PassageQuery, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        """Return the passages, nearest first. Raises `TrinityError`.

        `on_embedded` is called once, when the query's vector is ready, and `on_read` with the size of the passages. The
        pool's deadline is what is left of `timeout_s`.
        """
        if request.hybrid and request.query is None:
            raise InvalidRequest("hybrid requires a text: use query instead of vector", "hybrid")
        content = filter_bytes(request.filter)
        deadline_ns, attempts, embedded = deadline_after_ms(timeout_s * 1e3), 0, False
        attributes_until_ns = time.monotonic_ns() + NEW_ATTRIBUTE_WAIT_NS
        while True:
            try:
                embedder, keywords = "", None
                if request.query is None:
                    vector = np.asarray(request.vector, dtype=np.float32)
                else:
                    embedder, vector = await self._embed_query(request.collection, request.query)
                if not embedded:
                    on_embedded()
                    embedded = True
                if request.hybrid and request.query is not None:
                    keywords = self.registry.keyword_query(
                        request.collection, request.query, request.k, content, deadline_ns
                    )
                search = self.client.search(
                    vector, keywords.depth if keywords else request.k,
                    collection=request.collection, stage=request.stage, filter=content,
                    accept=self.registry.accept(request.collection, embedder, keywords.identity if keywords else ""),
                    deadline_ms=max((deadline_ns - time.monotonic_ns()) / 1e6, 1e-3),
                )  # fmt: skip
                if keywords is None:
                    result = await search
                else:
                    loop = asyncio.get_running_loop()
                    result, found = await asyncio.gather(
                        search, loop.run_in_executor(self._keywords, keywords.search, vector)
                    )
                    result = self.registry.fuse(request.collection, result, found, request.k, request.hybrid)
                return list(self.registry.passages(request.collection, result, on_read))
            except CollectionReplaced:
                attempts += 1
                if attempts == MAX_BUILD_ATTEMPTS:
                    raise
            except InvalidFilter:
                if time.monotonic_ns() > attributes_until_ns or not self.registry.has_attributes(
                    request.collection, content
                ):
                    raise
                self.client.poll_now()
                await asyncio.sleep(_ATTRIBUTE_POLL_S)

    async def _embed_query(self, collection: str, text: str) -> tuple[str, Vectors]:
        """Embed a text with the embedder of the build that is served now; return its name and the vector [dim]."""
        self.registry.follow(collection, self.client.identities(collection))
        embedder = self.registry.embedder(collection)
        loop = asyncio.get_running_loop()
        return embedder.name, (await loop.run_in_executor(self._executor(embedder), embedder.embed, [text]))[0]

    def _executor(self, embedder: Embedder) -> ThreadPoolExecutor:
        """Return the embedder's threads, shared as in `EmbeddingThreads`: one for all that compute in this process."""
        name = embedder.name if embedder.max_concurrency > 1 else ""
        if name not in self._embedding:
            self._embedding[name] = ThreadPoolExecutor(embedder.max_concurrency, thread_name_prefix="embed")
        return self._embedding[name]

    # ---- collections and embedders

    def summary(self, collection: str) -> CollectionSummary:
        """Return the size and properties of a collection. Raises `UnknownCollection`."""
        return self.registry.summary(collection)

    def embedders(self) -> Mapping[str, Embedder]:
        """Return the collections' embedders, by the names that requests use."""
        return self.registry.embedders()

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> tuple[Vectors, int]:
        """Return the texts' vectors [n, dim] and their number of tokens; shares threads with searches."""

        def run() -> tuple[Vectors, int]:
            return embedder.embed(texts, kind), sum(map(embedder.count_tokens, texts))

        return await asyncio.get_running_loop().run_in_executor(self._executor(embedder), run)

    def unavailable(self) -> dict[str, str]:
        """Return the collections that cannot be searched, with reasons."""
        return {**self.registry.unavailable, **self.client.unavailable}

    async def run(self) -> None:
        """Deliver results to their callers until cancelled."""
        try:
            await self.client.run()
        finally:
            for threads in (self._keywords, *self._embedding.values()):
                threads.shutdown(wait=False, cancel_futures=True)
