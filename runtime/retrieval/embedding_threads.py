"""Threads that embed texts for a loop that never waits, and search for their words.

All embedders that compute in this process share one thread, as they share the worker's cores; their libraries release
the GIL. An embedder that waits for a server has threads of its own, so it delays no other. Keyword searches, whose
filters may take long, have one. Texts and searches wait in turns by flow (API key).
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from runtime.errors import InternalError, ModelError, Overloaded, TrinityError
from runtime.retrieval.collection_registry import KeywordQuery
from runtime.retrieval.embedding.embedder import Embedder, Vectors
from runtime.retrieval.fair_queue import FairQueue
from runtime.retrieval.neighbors import Neighbors

T = TypeVar("T")
MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """A text's vector float32 [dim], or the error that ended it, and the time (monotonic ns); the results of its
    keyword search, if one was requested."""

    ticket: int
    at_ns: int
    vector: Vectors | None = None
    error: TrinityError | None = None
    keyword_results: Neighbors | None = None


@dataclass(slots=True)
class _EmbeddingJob:
    ticket: int
    embedder: Embedder
    text: str
    keywords: KeywordQuery | None
    flow: int
    cancelled: bool = False


class _Turns(Generic[T]):
    """What threads take, in turns by flow (`FairQueue`); `put` refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._waiting: FairQueue[int, T] = FairQueue()
        self._limit, self._closed, self._changed = limit, False, threading.Condition()

    def put(self, flow: int, job: T) -> bool:
        with self._changed:
            if len(self._waiting) >= self._limit:
                return False
            self._waiting.push(flow, job)
            self._changed.notify()
        return True

    def take(self) -> tuple[int, T] | None:
        """Wait for the next job; return it with its flow, None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._waiting))
            return None if self._closed else self._waiting.pop()

    def charge(self, flow: int, used_ns: int) -> None:
        with self._changed:
            self._waiting.charge(flow, used_ns)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _WorkerGroup:
    """Waiting texts and the threads that embed them."""

    def __init__(self, limit: int, threads: int, run: Callable[["_WorkerGroup"], None]) -> None:
        self.waiting: _Turns[_EmbeddingJob] = _Turns(limit)
        self.threads = [threading.Thread(target=run, args=(self,), name="embed", daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()


class EmbeddingThreads:
    """Threads that embed texts, and then search for their words if requested: `submit` texts, `poll` vectors.

    An error ends only its own text. A text that hangs delays those behind it if the embedder computes in this process.
    `fileno` becomes readable when there is something to poll. At most `limit` texts wait for a thread; `close` waits
    `end_s` for those that are being embedded.
    """

    def __init__(
        self, *, limit: int = MAX_WAITING, clock: Callable[[], int] = time.monotonic_ns, end_s: float = 1.0
    ) -> None:
        self._end_s = end_s
        self._clock = clock
        self._limit = limit
        self._groups: dict[str, _WorkerGroup] = {}
        self._embedded: _Turns[tuple[_EmbeddingJob, EmbeddingResult]] = _Turns(limit)  # to search for words
        self._keyword_thread: threading.Thread | None = None
        self._open: dict[int, _EmbeddingJob] = {}  # used by the submitting thread alone
        self._done: deque[EmbeddingResult] = deque()
        self._closed = False
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._doorbell

    def submit(
        self, ticket: int, embedder: Embedder, text: str, keywords: KeywordQuery | None = None, flow: int = 0
    ) -> None:
        """Queue a text for embedding, followed by its keyword search. Raises `Overloaded` if the queue is full."""
        job = _EmbeddingJob(ticket, embedder, text, keywords, flow)
        if keywords is not None and self._keyword_thread is None:
            self._keyword_thread = threading.Thread(target=self._search_keywords, name="keywords", daemon=True)
            self._keyword_thread.start()
        if not self._group(embedder).waiting.put(flow, job):
            raise Overloaded(f"{self._limit} texts wait to be embedded, the limit; try again later")
        self._open[ticket] = job

    def cancel(self, ticket: int) -> None:
        """Drop a text: `poll` does not return it. Unknown tickets are ignored."""
        job = self._open.pop(ticket, None)
        if job is not None:
            job.cancelled = True

    def poll(self) -> list[EmbeddingResult]:
        """Return what has finished since the last call, each ticket once. Never blocks."""
        try:
            os.eventfd_read(self._doorbell)
        except BlockingIOError:
            return []
        finished = []
        while self._done:  # after reading the doorbell: a later result rings again
            result = self._done.popleft()
            if self._open.pop(result.ticket, None) is not None:
                finished.append(result)
        return finished

    def close(self) -> None:
        """Stop the threads; those that hang end with the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        threads = [thread for group in self._groups.values() for thread in group.threads]
        for group in self._groups.values():
            group.waiting.close()
        self._embedded.close()
        threads += [self._keyword_thread] if self._keyword_thread is not None else []
        until = time.monotonic() + self._end_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            os.close(self._doorbell)

    def _group(self, embedder: Embedder) -> _WorkerGroup:
        name = embedder.name if embedder.max_concurrency > 1 else ""
        if name not in self._groups:
            self._groups[name] = _WorkerGroup(self._limit, embedder.max_concurrency, self._run)
        return self._groups[name]

    def _run(self, group: _WorkerGroup) -> None:
        while (taken := group.waiting.take()) is not None:
            flow, job = taken
            if job.cancelled:
                continue
            begin_ns = time.monotonic_ns()
            try:
                vector = job.embedder.embed([job.text])[0]
            except TrinityError as error:
                self._end(EmbeddingResult(job.ticket, self._clock(), error=error))
            except Exception as error:  # of a library we do not know: the next text may be fine
                failed = ModelError(f"the embedder {job.embedder.name} failed: {error}")
                self._end(EmbeddingResult(job.ticket, self._clock(), error=failed))
            else:
                embedded = EmbeddingResult(job.ticket, self._clock(), vector)
                if job.keywords is None:
                    self._end(embedded)
                elif not self._embedded.put(job.flow, (job, embedded)):
                    full = Overloaded(f"{self._limit} keyword searches wait, the limit; try again later")
                    self._end(EmbeddingResult(job.ticket, embedded.at_ns, error=full))

            group.waiting.charge(flow, time.monotonic_ns() - begin_ns)

    def _search_keywords(self) -> None:
        while (taken := self._embedded.take()) is not None:
            flow, (job, embedded) = taken
            if job.cancelled or job.keywords is None or embedded.vector is None:
                continue
            begin_ns = time.monotonic_ns()
            try:
                results = job.keywords.search(embedded.vector)
            except TrinityError as error:
                self._end(EmbeddingResult(job.ticket, embedded.at_ns, error=error))
            except Exception as error:  # the thread serves all others
                failed = InternalError(f"the keyword search failed: {error!r}")
                self._end(EmbeddingResult(job.ticket, embedded.at_ns, error=failed))
            else:
                self._end(replace(embedded, keyword_results=results))
            self._embedded.charge(flow, time.monotonic_ns() - begin_ns)

    def _end(self, result: EmbeddingResult) -> None:
        self._done.append(result)
        os.eventfd_write(self._doorbell, 1)
