"""Retrieval inside an event loop: what the frontend answers `/v1/retrieval` with."""

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
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import (
    MAX_BUILD_ATTEMPTS,
    NEW_ATTRIBUTE_WAIT_NS,
    PassageQuery,
    deadline_after_ms,
    fuse_keywords,
)

_LOOK_S = 0.01


def _once_is_enough() -> None:
    """The first vector's time is the one that counts."""


class AsyncRetriever:
    """Searches for many callers of one event loop. Embedding runs in threads of its own, so the loop goes on."""

    def __init__(self, registry: CollectionRegistry, client: SearchClient) -> None:
        self.registry = registry
        self.client = AsyncSearchClient(client)
        self._embedding: dict[str, ThreadPoolExecutor] = {}
        self._words = ThreadPoolExecutor(1, thread_name_prefix="words")

    def missing(self) -> list[str]:
        """["pool"] while no pool is attached."""
        return [] if self.client.live else ["pool"]

    async def search(self, asked: PassageQuery, *, embedded: Callable[[], None], timeout_s: float) -> list[Passage]:
        """The passages, nearest first. Raises `TrinityError`.

        `embedded` is called when the query's vector is there. The pool is told how long is left of `timeout_s`.
        """
        collection, query = asked.collection, asked.query
        if asked.hybrid and query is None:
            raise InvalidRequest("hybrid looks for a text's words: ask with query, not with vector", "hybrid")
        deadline_ns, attempts, told = deadline_after_ms(timeout_s * 1e3), MAX_BUILD_ATTEMPTS, embedded
        told_of_ns = time.monotonic_ns() + NEW_ATTRIBUTE_WAIT_NS
        while True:
            attempts -= 1
            try:
                embedder, by_words = "", None
                if query is not None:
                    embedder, array = await self._embed(collection, query)
                else:
                    array = np.asarray(asked.vector, dtype=np.float32)
                told()
                told = _once_is_enough
                if asked.hybrid and query is not None:
                    wanted = filter_bytes(asked.wanted)
                    by_words = self.registry.keyword_query(collection, query, asked.k, wanted, deadline_ns)
                searching = self.client.search(
                    array, by_words.depth if by_words else asked.k,
                    collection=collection, stage=asked.stage, filter=asked.wanted,
                    accept=self.registry.accept(collection, embedder, by_words.identity if by_words else ""),
                    deadline_ms=max((deadline_ns - time.monotonic_ns()) / 1e6, 1e-3),
                )  # fmt: skip
                if by_words is None:
                    result = await searching
                else:
                    looked = asyncio.get_running_loop().run_in_executor(self._words, by_words.search, array)
                    result, words = await asyncio.gather(searching, looked)
                    result = fuse_keywords(result, words, asked.k, asked.hybrid)
                return list(self.registry.passages(collection, result))
            except CollectionReplaced:
                if not attempts:
                    raise
            except InvalidFilter:
                attempts += 1
                content = filter_bytes(asked.wanted)
                if time.monotonic_ns() > told_of_ns or not self.registry.has_attributes(collection, content):
                    raise
                self.client.look()
                await asyncio.sleep(_LOOK_S)

    async def _embed(self, collection: str, text: str) -> tuple[str, Vectors]:
        """A text's vector [dim], and the embedder that made it: that of the build that the pools serve now."""
        self.registry.follow(collection, self.client.identities(collection))
        embedder = self.registry.embedder(collection)
        loop = asyncio.get_running_loop()
        return embedder.name, (await loop.run_in_executor(self._threads(embedder), embedder.embed, [text]))[0]

    def _threads(self, embedder: Embedder) -> ThreadPoolExecutor:
        """One thread for all that compute here, some for each that waits for a server: as `EmbedThreads` has them."""
        name = embedder.name if embedder.max_concurrency > 1 else ""
        if name not in self._embedding:
            self._embedding[name] = ThreadPoolExecutor(embedder.max_concurrency, thread_name_prefix="embed")
        return self._embedding[name]

    # ---- the collections and their embedders

    def about(self, collection: str) -> CollectionSummary:
        """What a collection is. Raises `UnknownCollection`."""
        return self.registry.summary(collection)

    def embedders(self) -> Mapping[str, Embedder]:
        """Those of the collections, by the names that requests use."""
        return self.registry.embedders()

    async def embedded(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> tuple[Vectors, int]:
        """The texts' vectors [n, dim], and how many tokens they have; queries of searches take turns with them."""

        def embed() -> tuple[Vectors, int]:
            return embedder.embed(texts, kind), sum(map(embedder.count_tokens, texts))

        return await asyncio.get_running_loop().run_in_executor(self._threads(embedder), embed)

    def unavailable(self) -> dict[str, str]:
        """The collections that cannot be searched, and why."""
        return {**self.registry.unavailable, **self.client.unavailable}

    async def run(self) -> None:
        """Bring results to their callers until cancelled."""
        try:
            await self.client.run()
        finally:
            for threads in (self._words, *self._embedding.values()):
                threads.shutdown(wait=False, cancel_futures=True)
