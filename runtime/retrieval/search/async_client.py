"""The search client for asyncio (any event loop, uvloop too): an awaitable interface to `SearchClient`.

async with await AsyncSearchClient.connect("my-node") as client:
    result = await client.search(vector, k=10, collection="docs")
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Self, Unpack

from runtime.errors import TrinityError, Unavailable
from runtime.retrieval.search.batch_search import BatchSearch
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import (
    AcceptBuild,
    Query,
    SearchBatch,
    SearchOptions,
    SearchResult,
    SearchStatistics,
    deadline_after_ms,
)

_TICK_S = 0.02  # polling interval while queries are outstanding, in case a doorbell is missed
_IDLE_S = 0.25  # polling interval without queries: lost pools are attached again


class AsyncSearchClient:
    """A `SearchClient` for the tasks of one event loop. `run` must be running; `connect` and `async with` start it.

    Cancelling a task that awaits `search` or `search_batch` cancels its queries.
    """

    def __init__(self, client: SearchClient) -> None:
        self._client = client
        self._waiting: dict[int, asyncio.Future[SearchResult]] = {}
        self._batches: dict[BatchSearch, asyncio.Future[SearchBatch]] = {}
        self._readers: set[int] = set()
        self._running: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # once `run` runs
        self._armed = self._scheduled = False  # a doorbell, and a poll in the loop's next turn
        self._idle = True  # at the last tick
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] | None = None
        self._ended = False

    @classmethod
    async def connect(cls, node: str | Path, name: str = "client", timeout_s: float = 5.0) -> Self:
        """As `SearchClient.connect`. Raises `Unavailable` if no pool answers."""
        client = cls(await asyncio.to_thread(SearchClient.connect, node, name, timeout_s))
        client._running = asyncio.create_task(client.run())
        return client

    @property
    def live(self) -> bool:
        """Whether a pool is attached."""
        return self._client.live

    async def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        deadline_ms: float | None = None,
        accept: AcceptBuild | None = None,
        flow: int = 0,
        **options: Unpack[SearchOptions],
    ) -> SearchResult:
        """As `SearchClient.search` and `submit`. Queries wait while the rings are full, at most 1,024; more raise
        `Overloaded`."""
        self._check_open()
        deadline_ns = deadline_after_ms(deadline_ms)
        return await self.answer(
            self._client.query(vector, k, deadline_ns=deadline_ns, accept=accept, flow=flow, **options)
        )

    async def answer(self, query: Query) -> SearchResult:
        """Send a query that is complete, and wait for its result. Raises the error that ended it."""
        self._check_open()
        self._client.dispatcher.submit(query, wait_for_room=True)
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._waiting[query.ticket] = future
        if not self._armed or self._client.dispatcher.waiting:
            self.poll_now()
        try:
            return (await future).checked()
        finally:
            if self._waiting.pop(query.ticket, None) is not None:
                self._client.cancel(query.ticket)

    def poll_now(self) -> None:
        """Poll the pools in the event loop's next turn instead of at the next interval."""
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._poll)

    async def search_batch(
        self, vectors: Any, k: int = 10, *, deadline_ms: float | None = None, **options: Unpack[SearchOptions]
    ) -> SearchBatch:
        """As `SearchClient.search_batch`; other searches continue meanwhile."""
        self._check_open()
        batch = self._client.batch(vectors, k, deadline_ms, **options)
        batch.send()
        if batch.done:
            return batch.result()
        future: asyncio.Future[SearchBatch] = asyncio.get_running_loop().create_future()
        self._batches[batch] = future
        self.poll_now()
        try:
            return await future
        finally:
            if self._batches.pop(batch, None) is not None:
                batch.cancel()

    def _check_open(self) -> None:
        if self._ended:  # no result would be delivered
            raise Unavailable("the search client was closed")

    def identities(self, collection: str) -> tuple[str, ...]:
        """See `SearchClient.identities`."""
        return self._client.identities(collection)

    @property
    def unavailable(self) -> dict[str, str]:
        """See `SearchClient.unavailable`."""
        return self._client.unavailable

    def statistics(self) -> SearchStatistics:
        """See `SearchClient.statistics`."""
        return self._client.statistics()

    # ---- polling, in callbacks of the event loop: no task has to be woken for a result

    async def run(self) -> None:
        """Deliver results to their callers until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._failed = self._loop.create_future()
        try:
            self._tick()
            await self._failed
        finally:
            self._ended, self._loop = True, None
            self._cancel_timer()
            self._read_from(set())
            self._client.disarm()
            futures: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._batches.values()]
            for future in futures:
                self._resolve(future, Unavailable("the search client was closed"))

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._batches)

    def _tick(self) -> None:
        """Poll, also without a doorbell, and again after an interval."""
        self._cancel_timer()
        self._poll()
        if self._loop is not None:
            self._idle = not self._busy
            self._timer = self._loop.call_later(_IDLE_S if self._idle else _TICK_S, self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        """Deliver what has arrived, and ask for a doorbell if more is to come."""
        self._scheduled = False
        if self._loop is None or self._failed is None:
            return
        was_busy = self._busy
        try:
            self._client.disarm()
            self._deliver()
            self._armed = self._busy
            if self._armed:
                self._read_from(set(self._client.filenos()))
                if not self._client.arm():  # a result is there already
                    self._armed = False
                    self.poll_now()
            elif not was_busy:  # else the next query comes soon, most often
                self._read_from(set())
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            return
        if self._idle and self._busy:  # the next tick is far away
            self._idle = False
            self._loop.call_soon(self._tick)

    def _deliver(self) -> None:
        for result in self._client.poll():
            future = self._waiting.pop(result.ticket, None)
            if future is None:
                any(batch.add(result) for batch in self._batches)
            elif not future.done():
                future.set_result(result)
        for batch in list(self._batches):
            try:
                batch.send()
            except TrinityError as error:
                self._resolve(self._batches.pop(batch), error)
            else:
                if batch.done:
                    self._resolve(self._batches.pop(batch), batch.result())

    @staticmethod
    def _resolve(future: "asyncio.Future[Any]", outcome: SearchBatch | TrinityError) -> None:
        if future.done():
            return  # the caller was cancelled
        if isinstance(outcome, TrinityError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _read_from(self, descriptors: set[int]) -> None:
        """Let exactly these descriptors wake the loop."""
        if descriptors == self._readers:
            return
        loop = asyncio.get_running_loop()
        for descriptor in self._readers - descriptors:
            loop.remove_reader(descriptor)
        for descriptor in descriptors - self._readers:
            loop.add_reader(descriptor, self._poll)
        self._readers = descriptors

    async def close(self) -> None:
        """Close the sessions. Outstanding and later queries end with `Unavailable`."""
        self._ended = True
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        self._client.close()

    async def __aenter__(self) -> Self:
        if self._running is None:
            self._running = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
