"""The embedding stage of a process: texts of all its requests, embedded in batches of what has arrived.

```
submit ──▶ cache ──▶ TextQueue ──▶ a free thread finds the tokens of what is new, ──▶ embeds these ──▶ futures
            │ hit                  and takes its share of what waits (at most a              └──▶ cache
            ▼                      turn, so that keys alternate)
          future
```
None waits for company: a text that arrives at an idle thread is embedded alone. Embedders that compute in this process
share its threads, as they share its cores; their libraries release the GIL. One that waits for a server, or for a GPU,
has threads of its own, so that it delays no other.

Texts of prefill have threads of their own. While they come, those of probes and documents are embedded by niced
threads: the kernel interrupts a batch of theirs when a text of prefill arrives, and leaves them the time that prefill
does not use, besides a core while texts of prefill come fast. While prefill uses all of it, its threads embed a text of
theirs now and then.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from runtime.errors import DeviceFailed, Unavailable
from runtime.retrieval.embedding.embedder import COMPUTED, Embedder, TextKind, Vectors
from runtime.retrieval.embedding.lane import BUSY_NS, RECENT_NS, Lane
from runtime.retrieval.embedding.text_queue import Part, Texts
from runtime.retrieval.embedding.vector_cache import VectorCache

MAX_WAITING = 1024
_PREFILL, _OTHERS = "prefill", "others"  # lanes of embedders that compute


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors [n, dim] of texts, their number of tokens if that was asked for, and when the first batch began and the
    last ended, in ns; both are the same if they were in the cache."""

    vectors: Vectors
    tokens: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Texts that wait, and sums since the start: texts embedded, and found in the cache or among those that wait;
    batches, the threads' time in them, and the texts' time before. `cache_bytes`: what the cache holds."""

    waiting: int
    embedded: int
    reused: int
    batches: int
    busy_s: float
    waited_s: float
    cache_bytes: int


class EmbeddingStage:
    """`threads` threads embed texts of prefill at once, and as many the others. They start with the first text.
    Thread-safe.

    More than `limit` waiting callers are refused, and a query that would wait longer than `max_wait_ns` behind others
    (0: any time). A call of an embedder that hangs occupies its thread. `clock` returns monotonic ns.
    """

    def __init__(
        self,
        threads: int = 1,
        *,
        limit: int = MAX_WAITING,
        max_wait_ns: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
        cache: VectorCache | None = None,
    ) -> None:
        self._threads, self._limit, self._max_wait_ns, self._clock = threads, limit, max_wait_ns, clock
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._cache = VectorCache() if cache is None else cache
        self._asked: dict[tuple[int, tuple[str, str]], Texts] = {}  # by key: one that waits or is being embedded
        self._prefill_ns: int | None = None  # when a text of prefill came last
        self._closed = False
        self._reused = 0
        self._failed: DeviceFailed | None = None

    def submit(
        self,
        embedder: Embedder,
        texts: Sequence[str],
        kind: TextKind = "query",
        *,
        flow: int = 0,
        part: Part = "bulk",
        deadline_ns: int = 0,
        count_tokens: bool = False,
    ) -> Future[Embedded]:
        """Queue texts of the API key `flow`; cancelling the future drops those that are not being embedded.

        A query's text (of a `part` besides "bulk") is looked up in the cache, and the same text of the same key is
        embedded once. The future raises `DeadlineExceeded` for texts that were not begun by `deadline_ns` (0: none),
        `ModelError`, and the errors of `Embedder.embed`. Raises `Overloaded` at once if they cannot be embedded by
        then, if they would wait too long, or if too many wait; `Unavailable` when closed.
        """
        future: Future[Embedded] = Future()
        now = self._clock()
        key = (f"{embedder.name}\n{kind}", texts[0]) if part != "bulk" and len(texts) == 1 else None
        with self._lock:
            if self._closed:
                raise Unavailable("the node is stopping")
            if not texts:
                future.set_result(Embedded(np.empty((0, embedder.dim), np.float32), 0, now, now))
                return future
            if key is not None:
                if (vector := self._cache.find(key)) is not None:
                    self._reused += 1
                    future.set_result(Embedded(vector[None], 0, now, now))
                    return future
                asked = self._asked.get((flow, key))
                if asked is not None and asked.wanted:
                    asked.futures.append(future)
                    asked.deadline_ns = max(asked.deadline_ns, deadline_ns) if asked.deadline_ns and deadline_ns else 0
                    self._reused += 1
                    return future
            lane = self._lane(embedder, part, now)
            lane.check_room(flow, part, texts, deadline_ns, now, 0 if part == "bulk" else self._max_wait_ns)
            lane.start()
            wanted = Texts(embedder, list(texts), kind, flow, part, deadline_ns, now, [future], key, count_tokens)
            if key is not None:
                self._asked[flow, key] = wanted
            lane.add(wanted)
        return future

    def statistics(self) -> StageStatistics:
        """Return the state and the sums since the start. Raises `DeviceFailed` if a GPU has failed an embedder, which
        ends the worker."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            lanes = list(self._lanes.values())
            return StageStatistics(
                sum(len(lane.queue) for lane in lanes), sum(lane.embedded for lane in lanes), self._reused,
                sum(lane.batches for lane in lanes), sum(lane.busy_ns for lane in lanes) / 1e9,
                sum(lane.waited_ns for lane in lanes) / 1e9, self._cache.size_bytes,
            )  # fmt: skip

    def close(self, timeout_s: float | None = None) -> bool:
        """Drop what waits and stop; return whether all threads have ended in time. Those that hang end with the
        process. Idempotent."""
        with self._lock:
            self._closed = True
            dropped = [texts for lane in self._lanes.values() for texts in lane.close()]
        for texts in dropped:
            for future in texts.futures:
                future.cancel()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return all([lane.join(until) for lane in self._lanes.values()])

    def _lane(self, embedder: Embedder, part: Part, now: int) -> Lane:
        shared = self._lock, self._limit, self._clock, self._end
        if (turn := embedder.turn) != COMPUTED:
            if embedder.name not in self._lanes:
                self._lanes[embedder.name] = Lane(embedder.max_concurrency, turn, *shared)
            return self._lanes[embedder.name]
        if _PREFILL not in self._lanes:
            others = Lane(self._threads, COMPUTED, *shared, niced=self._niced)
            self._lanes |= {_OTHERS: others, _PREFILL: Lane(self._threads, COMPUTED, *shared, behind=others)}
        if part == "prefill":
            self._prefill_ns = now
        return self._lanes[_PREFILL if part == "prefill" else _OTHERS]

    def _niced(self) -> int:
        """Return how many niced threads embed what is not prefill's at present; 0: those that are not niced do."""
        if self._prefill_ns is None or (passed_ns := self._clock() - self._prefill_ns) >= RECENT_NS:
            return 0
        return max(self._threads - (passed_ns < BUSY_NS), 1)

    def _end(self, texts: Texts, error: BaseException | None, now_ns: int) -> None:
        """Give the callers the vectors, or an error."""
        with self._lock:
            if texts.ended:  # another batch of it failed
                return
            texts.ended = True
            if isinstance(error, DeviceFailed):
                self._failed = error
            if texts.key is not None:
                if self._asked.get((texts.flow, texts.key)) is texts:
                    del self._asked[texts.flow, texts.key]
                if error is None and texts.begin_ns >= 0:
                    self._cache.put(texts.key, texts.vectors[0])
        for future in texts.futures:
            if not future.set_running_or_notify_cancel():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(Embedded(texts.vectors, texts.tokens, texts.begin_ns, now_ns))
