"""Retrieval for asyncio: the frontend's searches and embeddings."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from runtime.errors import DeadlineExceeded
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.fair_threads import Threads
from runtime.retrieval.passages import FoundPassages, OnRead
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.retrieval_steps import PAUSE_MS, Read, RetrievalSteps, Step, Until
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import Query

_DOCUMENT_THREADS = 4
S = TypeVar("S")
R = TypeVar("R")


async def run_steps(steps: Generator[S, Any, R], outcome: Callable[[S], Awaitable[Any]]) -> R:
    """Run a generator to its end, sending it the outcome of what it yields; return its value. Raises what it raises."""
    try:
        step = next(steps)
        while True:
            try:
                sent = await outcome(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(sent)
    except StopIteration as end:
        value: R = end.value
        return value


async def wait_until(step: Until) -> Any:
    """Return the result of a future, or raise its error. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout((step.until_ns - time.monotonic_ns()) / 1e9):
            return await asyncio.wrap_future(step.future)
    except TimeoutError:
        raise DeadlineExceeded("it took longer than its limit") from None


class ThreadResults:
    """Results of threads for the tasks of one event loop, which wake it once for all that end together, as the texts of
    a batch do."""

    def __init__(self) -> None:
        self._ended: deque[tuple[asyncio.Future[None], Future[Any]]] = deque()
        self._woken = False  # whether `_deliver` is going to be called

    async def of(self, future: Future[R]) -> R:
        """Return a future's result, or raise its error; as `asyncio.wrap_future`, also if either is cancelled."""
        if future.done():
            return future.result()
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(partial(self._end, loop, waiting))
        try:
            await waiting
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    def _end(self, loop: asyncio.AbstractEventLoop, waiting: "asyncio.Future[None]", future: Future[Any]) -> None:
        """Called by the thread."""
        self._ended.append((waiting, future))
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what ends from now on is found below, or calls again
        while self._ended:
            waiting, future = self._ended.popleft()
            if waiting.done():
                continue  # the task was cancelled
            if future.cancelled():
                waiting.cancel()
            else:
                waiting.set_result(None)


class AsyncRetriever:
    """Retrieval for the tasks of one event loop. Embedding, keyword search and reading documents run on threads, except
    for documents that were read lately.

    Embeddings and keyword searches take turns by API key (`SearchSpec.flow`), as filters that are new to the pools do
    there.
    """

    def __init__(
        self,
        registry: CollectionRegistry,
        client: SearchClient,
        threads: int = 1,
        max_wait_s: float = 0.0,
        reranking: Reranking | None = None,
    ) -> None:
        """`threads`: of embedding. `max_wait_s`: a text that would wait longer for it is refused (0: none)."""
        self.registry = registry
        self.client = AsyncSearchClient(client)
        self._reranking = reranking
        self._steps = RetrievalSteps(registry, client, threads=threads, max_wait_ns=int(max_wait_s * 1e9))
        self._threads = ThreadResults()
        self._tickets = client.dispatcher.tickets
        self._documents = Threads(_DOCUMENT_THREADS, "documents")

    def missing(self) -> list[str]:
        """Return ["pool"] while no pool is attached."""
        return [] if self.client.live else ["pool"]

    async def search(
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> FoundPassages:
        """Return the passages, nearest first, or reranked if the query wants it. Raises `TrinityError`.

        `on_embedded` is called once, when the query's vector is ready, and `on_read` with the size of the passages. The
        pool's deadline is what is left of `timeout_s`.
        """
        spec = replace(query.spec, deadline_ns=time.monotonic_ns() + int(timeout_s * 1e9))
        query = replace(query, spec=spec, ticket=next(self._tickets))
        retrieve = partial(self._steps.retrieve, on_embedded=on_embedded, on_read=on_read)
        steps = retrieve(query) if self._reranking is None else self._reranking.retrieve(query, retrieve)
        retrieved = await run_steps(steps, self._outcome)
        return FoundPassages(retrieved.passages, ranking=retrieved.ranking, times=retrieved.times)

    async def _outcome(self, step: Step) -> Any:
        match step:
            case Query():
                return await self.client.answer(step)
            case Future():
                return await self._threads.of(step)
            case Until():
                return await wait_until(step)
            case Read():
                return await self._threads.of(self._documents.submit(step.run))
            case _:
                self.client.poll_now()
                return await asyncio.sleep(PAUSE_MS / 1e3)

    # ---- collections and embedders

    def summary(self, collection: str) -> CollectionSummary:
        """Return the size and properties of a collection. Raises `UnknownCollection`."""
        return self.registry.summary(collection)

    def documents(self, collection: str) -> CollectionDocuments:
        """Return the open documents of a collection. Raises `UnknownCollection`, `Unavailable`."""
        return self.registry.current(collection)

    def embedders(self) -> Mapping[str, Embedder]:
        """Return the collections' embedders, by the names that requests use."""
        return self.registry.embedders()

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        """Return the texts' vectors [n, dim] and their number of tokens; shares threads with searches."""
        embedded = await self._threads.of(
            self._steps.embedding.submit(embedder, texts, kind, flow=flow, count_tokens=True)
        )
        return embedded.vectors, embedded.tokens

    def report(self, table: WorkerTable) -> None:
        """Set the metrics of embedding."""
        self._steps.report(table)

    def unavailable(self) -> dict[str, str]:
        """Return the collections that cannot be searched, with reasons."""
        return {**self.registry.unavailable, **self.client.unavailable}

    async def run(self) -> None:
        """Deliver results to their callers until cancelled."""
        try:
            await self.client.run()
        finally:
            self._steps.close(0.0)
            self._documents.shutdown(wait=False, cancel_futures=True)
