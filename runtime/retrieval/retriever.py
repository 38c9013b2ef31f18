"""Non-blocking retrieval for the loops of model workers: runs the steps of many retrievals at once."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ipc import IpcError, SearchSpec
from runtime.errors import DeadlineExceeded, TrinityError, Unavailable
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.retrieval_steps import NO_DEADLINE, PAUSE_MS, Read, RetrievalResult, RetrievalSteps, Steps, Until
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import Query

if TYPE_CHECKING:
    import zmq

_WARM_UP_NS = 5_000_000_000


@dataclass(slots=True, eq=False)
class _Retrieval:
    """A retrieval in progress. `future`: of a thread that it waits for, until `until_ns`; None: it waits for the
    pools."""

    ticket: int
    deadline_ns: int
    steps: Steps
    future: Future[Any] | None = None
    until_ns: int = NO_DEADLINE


class Retriever:
    """Runs many retrievals at once without blocking: `submit` returns a ticket, `poll` returns what has ended.

    A text that is not embedded by its deadline ends then. Tickets are the client's: a retrieval and its query have the
    same. Files are read in the calling loop. `close` waits `end_s` for the threads.
    """

    def __init__(
        self,
        registry: CollectionRegistry,
        client: SearchClient,
        clock: Callable[[], int] = time.monotonic_ns,
        end_s: float = 1.0,
        threads: int = 1,
        reranking: Reranking | None = None,
    ) -> None:
        """`threads`: of embedding."""
        self.registry = registry
        self.client = client
        self._clock, self._end_s = clock, end_s
        self._steps, self._reranking = RetrievalSteps(registry, client, clock, threads), reranking
        self._running: dict[int, _Retrieval] = {}  # by ticket
        self._paused: list[_Retrieval] = []
        self._ended: list[RetrievalResult] = []
        self._done: deque[tuple[_Retrieval, Future[Any]]] = deque()  # whose threads have finished
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def warm_up(self) -> None:
        """Use every embedder and search every collection once, so that no user's request pays for first uses (compiled
        code, files, the session).

        Ends without warm-up if no pool answers the first attempt to attach: a pool may start much later than its
        clients, which do other work meanwhile.
        """
        self.registry.warm_up()
        end = self._clock() + _WARM_UP_NS
        queries = [
            Query(SearchSpec(name, 1, "decode", deadline_ns=end), np.ones(max(dim, 1), np.float32))
            for name, dim in self.registry.dims.items()
        ]
        waiting = set()
        for query in queries:
            with suppress(TrinityError):  # it may become searchable later
                waiting.add(self.submit(query))
        while self._clock() < end:
            waiting -= {result.ticket for result in self.poll()}
            if not (waiting and self.client.reachable):
                break
            self.sleep((), 10)
        for ticket in waiting:
            self.cancel(ticket)

    def submit(self, query: Query, build: str = "") -> int:
        """Start a retrieval of the passages nearest to a text or vector; return its ticket.

        `build`: accept results of this build only. Raises `Overloaded` if too many texts wait to be embedded,
        `UnknownCollection`, `Unavailable`, and `InvalidRequest` for a collection without texts.
        """
        ticket = next(self.client.dispatcher.tickets)
        query, retrieve = replace(query, ticket=ticket), partial(self._steps.retrieve, build=build)
        steps = retrieve(query) if self._reranking is None else self._reranking.retrieve(query, retrieve)
        retrieval = _Retrieval(ticket, query.spec.deadline_ns or NO_DEADLINE, steps)
        self._running[ticket] = retrieval
        self._advance(retrieval)
        if self._ended and self._ended[-1].ticket == ticket and (error := self._ended[-1].error) is not None:
            self._ended.pop()
            raise error
        return ticket

    def poll(self) -> list[RetrievalResult]:
        """Return what has ended since the last call; every ticket exactly once, unless it was cancelled."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)
        while self._done:  # after reading the doorbell: a later one rings again
            retrieval, future = self._done.popleft()
            if retrieval.future is future and retrieval.ticket in self._running:  # else it has stopped waiting for it
                retrieval.future = None
                failure = future.exception()
                self._advance(retrieval, failure, None if failure is not None else future.result())
        paused, self._paused = self._paused, []
        for retrieval in paused:
            if retrieval.ticket in self._running:
                self._advance(retrieval)
        now = self._clock()
        for retrieval in [one for one in self._running.values() if one.future is not None and one.deadline_ns <= now]:
            self.cancel(retrieval.ticket)
            late = DeadlineExceeded("its text was not embedded in time")
            self._ended.append(RetrievalResult(retrieval.ticket, error=late))
        for retrieval in list(self._running.values()):
            if retrieval.future is not None and retrieval.until_ns <= now:
                retrieval.future.cancel()
                retrieval.future = None
                self._advance(retrieval, DeadlineExceeded("it took longer than its limit"))
        for result in self.client.poll():
            if (running := self._running.get(result.ticket)) is not None:  # else it was cancelled, and answered
                self._advance(running, result.error, result)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, retrieval: _Retrieval, error: BaseException | None = None, outcome: object = None) -> None:
        """Go on with a retrieval, with the error or the outcome of its last step, until it waits again or ends."""
        while True:
            try:
                step = retrieval.steps.send(outcome) if error is None else retrieval.steps.throw(error)
            except StopIteration as end:
                self._end(end.value)
                return
            except TrinityError as failure:
                self._end(RetrievalResult(retrieval.ticket, error=failure))
                return
            error = outcome = None
            try:
                match step:
                    case Read():
                        outcome = step.run()
                        continue
                    case Query():
                        self.client.dispatcher.submit(step)
                    case Future():
                        self._wait(retrieval, step)
                    case Until():
                        self._wait(retrieval, step.future, step.until_ns)
                    case _:
                        self._paused.append(retrieval)
                return
            except TrinityError as failure:
                error = failure
            except IpcError as failure:
                error = Unavailable(str(failure))

    def _end(self, result: RetrievalResult) -> None:
        del self._running[result.ticket]
        self._ended.append(result)

    def _wait(self, retrieval: _Retrieval, future: Future[Any], until_ns: int = NO_DEADLINE) -> None:
        retrieval.future, retrieval.until_ns = future, until_ns
        future.add_done_callback(partial(self._wake, retrieval))

    def _wake(self, retrieval: _Retrieval, future: Future[Any]) -> None:
        """Called by a thread that has finished, and for a future that is cancelled."""
        self._done.append((retrieval, future))
        os.eventfd_write(self._doorbell, 1)

    def cancel(self, ticket: int) -> None:
        """Drop a retrieval: `poll` does not return it."""
        retrieval = self._running.pop(ticket, None)
        if retrieval is None:
            return
        future, retrieval.future = retrieval.future, None
        if future is not None:
            future.cancel()
        else:
            self.client.cancel(ticket)
        retrieval.steps.close()

    def sleep(self, sockets: "Sequence[zmq.Socket[bytes]]", timeout_ms: int) -> None:
        """Wait until there may be something to `poll`, one of `sockets` is readable, or the timeout is over."""
        if self._paused:
            timeout_ms = min(timeout_ms, PAUSE_MS)
        until_ns = min((one.until_ns for one in self._running.values() if one.future is not None), default=NO_DEADLINE)
        timeout_ms = max(0, min(timeout_ms, (until_ns - self._clock()) // 1_000_000 + 1))
        self.client.sleep((*sockets, self._doorbell), timeout_ms)

    def report(self, table: WorkerTable) -> None:
        """Set the metrics of embedding."""
        self._steps.report(table)

    def close(self) -> None:
        """Stop the threads and close the client; outstanding retrievals never end. Idempotent."""
        if self._reranking is not None:
            self._reranking.close()
        if self._doorbell >= 0 and self._steps.close(self._end_s):
            os.close(self._doorbell)
            self._doorbell = -1
        self.client.close()
