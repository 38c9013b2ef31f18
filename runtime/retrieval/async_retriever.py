"""Retrieval for asyncio: the frontend's searches and embeddings."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from runtime.errors import CollectionReplaced, InvalidFilter, InvalidRequest
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.collection_registry import CollectionRegistry, KeywordQuery
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.fair_gate import FairGate
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import (
    MAX_BUILD_ATTEMPTS,
    NEW_ATTRIBUTE_WAIT_NS,
    AcceptBuild,
    PassageQuery,
    SearchResult,
    deadline_after_ms,
)

T = TypeVar("T")
_ATTRIBUTE_POLL_S = 0.01
_DOCUMENT_THREADS = 4


class _Embedding(NamedTuple):
    """The threads of embedders, and whose turn it is there."""

    threads: ThreadPoolExecutor
    turns: FairGate


class AsyncRetriever:
    """Retrieval for the tasks of one event loop. Embedding, keyword search and reading documents run on threads.

    Embeddings and keyword searches take turns by API key (`PassageQuery.flow`), as filters that are new to the pools do
    there.
    """

    def __init__(self, registry: CollectionRegistry, client: SearchClient) -> None:
        self.registry = registry
        self.client = AsyncSearchClient(client)
        self._embedding: dict[str, _Embedding] = {}
        self._keywords = ThreadPoolExecutor(1, thread_name_prefix="keywords")
        self._documents = ThreadPoolExecutor(_DOCUMENT_THREADS, thread_name_prefix="documents")
        self._keyword_turns = FairGate(1)

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
                await self._follow(request.collection)
                if request.query is None:
                    vector = np.asarray(request.vector, dtype=np.float32)
                else:
                    embedder, vector = await self._embed_query(request.collection, request.query, request.flow)
                if not embedded:
                    on_embedded()
                    embedded = True
                if request.hybrid and request.query is not None:
                    keywords = self.registry.keyword_query(
                        request.collection, request.query, request.k, content, deadline_ns
                    )
                accept = self.registry.accept(request.collection, embedder, keywords.identity if keywords else "")
                k = keywords.depth if keywords else request.k
                search = self._search_pools(request, vector, k, content, accept, deadline_ns)
                if keywords is None:
                    result = await search
                else:
                    result, found = await asyncio.gather(search, self._search_keywords(keywords, vector, request.flow))
                    fuse = partial(  # reads the log of a live collection
                        self.registry.fuse, request.collection, result, found, request.k, request.hybrid
                    )
                    result = await self._read(fuse)
                lookup = self.registry.lookup(request.collection, result)
                documents = await self._read(partial(lookup.read, on_read))
                return list(self.registry.found(request.collection, result, lookup, documents))
            except CollectionReplaced:
                attempts += 1
                if attempts == MAX_BUILD_ATTEMPTS:
                    raise
            except InvalidFilter:
                known = partial(self.registry.has_attributes, request.collection, content)
                if time.monotonic_ns() > attributes_until_ns or not await self._read(known):
                    raise
                self.client.poll_now()
                await asyncio.sleep(_ATTRIBUTE_POLL_S)

    async def _search_pools(
        self, request: PassageQuery, vector: Vectors, k: int, content: bytes, accept: AcceptBuild, deadline_ns: int
    ) -> SearchResult:
        return await self.client.search(
            vector, k, collection=request.collection, stage=request.stage, filter=content, accept=accept,
            flow=request.flow, deadline_ms=max((deadline_ns - time.monotonic_ns()) / 1e6, 1e-3),
        )  # fmt: skip

    async def _search_keywords(self, keywords: KeywordQuery, vector: Vectors, flow: int) -> Neighbors:
        async with self._keyword_turns.place(flow):
            return await asyncio.get_running_loop().run_in_executor(self._keywords, keywords.search, vector)

    async def _read(self, read: Callable[[], T]) -> T:
        """Read documents on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._documents, read)

    async def _follow(self, collection: str) -> None:
        """Follow the builds that the pools serve, and wait for one that is being opened."""
        self.registry.follow(collection, self.client.identities(collection))
        while (opening := self.registry.opening(collection)) is not None:
            await self._read(opening.join)
            self.registry.follow(collection, self.client.identities(collection))

    async def _embed_query(self, collection: str, text: str, flow: int) -> tuple[str, Vectors]:
        """Embed a text with the embedder of the build that is served now; return its name and the vector [dim]."""
        embedder = self.registry.embedder(collection)
        return embedder.name, (await self._embed(embedder, flow, partial(embedder.embed, [text])))[0]

    async def _embed(self, embedder: Embedder, flow: int, embed: Callable[[], T]) -> T:
        """Embed on the embedder's threads, as in `EmbeddingThreads`: one for all that compute in this process."""
        name = embedder.name if embedder.max_concurrency > 1 else ""
        if name not in self._embedding:
            threads = ThreadPoolExecutor(embedder.max_concurrency, thread_name_prefix="embed")
            self._embedding[name] = _Embedding(threads, FairGate(embedder.max_concurrency))
        found = self._embedding[name]
        async with found.turns.place(flow):
            return await asyncio.get_running_loop().run_in_executor(found.threads, embed)

    # ---- collections and embedders

    def summary(self, collection: str) -> CollectionSummary:
        """Return the size and properties of a collection. Raises `UnknownCollection`."""
        return self.registry.summary(collection)

    def embedders(self) -> Mapping[str, Embedder]:
        """Return the collections' embedders, by the names that requests use."""
        return self.registry.embedders()

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        """Return the texts' vectors [n, dim] and their number of tokens; shares threads with searches."""

        def run() -> tuple[Vectors, int]:
            return embedder.embed(texts, kind), sum(map(embedder.count_tokens, texts))

        return await self._embed(embedder, flow, run)

    def unavailable(self) -> dict[str, str]:
        """Return the collections that cannot be searched, with reasons."""
        return {**self.registry.unavailable, **self.client.unavailable}

    async def run(self) -> None:
        """Deliver results to their callers until cancelled."""
        try:
            await self.client.run()
        finally:
            embedding = [found.threads for found in self._embedding.values()]
            for threads in (self._keywords, self._documents, *embedding):
                threads.shutdown(wait=False, cancel_futures=True)
