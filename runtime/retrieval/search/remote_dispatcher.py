"""Dispatch of a client's queries to collections on other nodes: HTTP requests from an event loop in a thread."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from runtime.errors import InternalError, Overloaded, TrinityError
from runtime.node.remote_config import RemoteSection
from runtime.retrieval.remote_collections import RemoteCollections
from runtime.retrieval.search.query import Query, SearchResult, failed_result
from runtime.retrieval.search.vectors import Vectors

_BATCH_CONCURRENCY = 64  # nodes refuse more concurrent searches than they support
_CLOSE_S = 5.0


class RemoteDispatcher:
    """`QueryTransport` to collections on other nodes.

    For one calling thread; `fileno` is readable when there is something to collect. The thread of the event loop starts
    with the first query.
    """

    def __init__(self, sections: Sequence[RemoteSection], limit: int) -> None:
        """At most `limit` queries are outstanding. Raises `ConfigError` for a key that cannot be read."""
        self._remote, self._limit = RemoteCollections(sections), limit
        self._outstanding: set[int] = set()
        self._ended: deque[SearchResult] = deque()
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="remote", daemon=True)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the loop's
        self._stopped = asyncio.Event()  # the loop's

    def fileno(self) -> int:
        return self._doorbell

    @property
    def busy(self) -> bool:
        """Whether a query is outstanding."""
        return bool(self._outstanding)

    def submit(self, query: Query, wait_for_room: bool = False) -> None:
        """Accept a query. Raises `Overloaded` if it is not accepted."""
        if len(self._outstanding) >= self._limit:
            raise Overloaded(f"{len(self._outstanding)} queries wait for other nodes, the limit is {self._limit}")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
        self._outstanding.add(query.ticket)
        self._loop.call_soon_threadsafe(self._begin, query)

    def submit_many(self, queries: Sequence[Query], rows: Vectors) -> int:
        """Accept as many as may be outstanding together, from the first on; return how many."""
        room = max(_BATCH_CONCURRENCY - len(self._outstanding), 0)
        for query in queries[:room]:
            self.submit(query)
        return min(room, len(queries))

    def wait_error(self, query: Query, since_ns: int, now_ns: int) -> TrinityError | None:
        """None: an accepted query ends by its nodes' timeout."""
        return None

    @staticmethod
    def clock() -> int:
        return time.monotonic_ns()

    def cancel(self, ticket: int) -> None:
        """Cancel a query: it is not returned by `collect`."""
        if ticket in self._outstanding and self._loop is not None:
            self._outstanding.remove(ticket)
            self._loop.call_soon_threadsafe(self._drop, ticket)

    def collect(self) -> list[SearchResult]:
        """Return what has ended since the last call. Never blocks."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)
        found = []
        while self._ended:  # after reading the doorbell: a later result rings again
            result = self._ended.popleft()
            if result.ticket in self._outstanding:
                self._outstanding.remove(result.ticket)
                found.append(result)
        return found

    def close(self) -> None:
        """Stop the thread; outstanding queries never end. Idempotent."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_CLOSE_S)
        if self._doorbell >= 0 and not self._thread.is_alive():
            os.close(self._doorbell)
            self._doorbell = -1

    # ---- the loop's thread

    def _run(self) -> None:
        assert self._loop is not None, "it is made before the thread starts"
        loop = self._loop
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        probing = asyncio.create_task(self._remote.run())
        await self._stopped.wait()
        for task in (probing, *self._tasks.values()):
            task.cancel()
        await asyncio.gather(probing, *self._tasks.values(), return_exceptions=True)

    def _begin(self, query: Query) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(query))
        self._tasks[query.ticket] = task
        task.add_done_callback(lambda _: self._tasks.pop(query.ticket, None))

    def _drop(self, ticket: int) -> None:
        if (task := self._tasks.get(ticket)) is not None:
            task.cancel()

    async def _answer(self, query: Query) -> None:
        spec = query.spec
        timeout_s = (spec.deadline_ns - time.monotonic_ns()) / 1e9 if spec.deadline_ns else float("inf")
        try:
            found = await self._remote.search(query, timeout_s)
            result = SearchResult(
                query.ticket,
                np.full(len(found), -1, np.int64),
                np.array([passage.distance for passage in found], np.float32),
                passages=tuple(found),
                partial=found.partial,
            )
        except TrinityError as error:
            result = failed_result(query.ticket, error)
        except Exception as error:  # of a library: the query ends nevertheless
            result = failed_result(query.ticket, InternalError(f"the search on other nodes failed: {error!r}"))
        self._ended.append(result)
        os.eventfd_write(self._doorbell, 1)
