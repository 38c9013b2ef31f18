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
does not use. While prefill uses all of it, its threads embed a text of theirs now and then.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from runtime.errors import (
    DeadlineExceeded,
    DeviceFailed,
    EmbedderUnreachable,
    ModelError,
    Overloaded,
    TrinityError,
    Unavailable,
)
from runtime.retrieval.embedding.embedder import COMPUTED, Embedder, TextKind, Turn, Vectors
from runtime.retrieval.embedding.text_queue import Part, TextQueue, Texts, Waiting, size_of
from runtime.retrieval.embedding.vector_cache import VectorCache

MAX_WAITING = 1024
_PREFILL, _OTHERS = "prefill", "others"  # lanes of embedders that compute
_TURNS = 8
"""Of prefill, after which a text of the others is embedded while texts of prefill wait all the time."""
_NICENESS, _RECENT_NS = 19, 2_000_000_000
"""Of the others' threads, for so long after a text of prefill: 1.4% of a core that prefill keeps busy. With 10, a tenth
of it, two texts of prefill were put on one core beside one of the others on the next, and its p99 was 1.9 times as
long. Threads without it embed at other times, since any other process goes before niced ones too."""


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
        self._lanes: dict[str, _Lane] = {}
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

    def _lane(self, embedder: Embedder, part: Part, now: int) -> "_Lane":
        shared = self._lock, self._limit, self._clock, self._end
        if (turn := embedder.turn) != COMPUTED:
            if embedder.name not in self._lanes:
                self._lanes[embedder.name] = _Lane(embedder.max_concurrency, turn, *shared)
            return self._lanes[embedder.name]
        if _PREFILL not in self._lanes:
            others = _Lane(self._threads, COMPUTED, *shared, is_niced=self._is_prefill_near)
            self._lanes |= {_OTHERS: others, _PREFILL: _Lane(self._threads, COMPUTED, *shared, behind=others)}
        if part == "prefill":
            self._prefill_ns = now
        return self._lanes[_PREFILL if part == "prefill" else _OTHERS]

    def _is_prefill_near(self) -> bool:
        return self._prefill_ns is not None and self._clock() < self._prefill_ns + _RECENT_NS

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


class _Lane:
    """A queue and its threads; `lock` protects the queue and the sums. `on_end` is called without it.

    `is_niced`: whether niced threads embed at present; there are as many of these as others. `behind`: the lane of
    which this one's threads embed a text after `_TURNS` turns that left texts waiting.
    """

    def __init__(
        self,
        count: int,
        turn: Turn,
        lock: threading.Lock,
        limit: int,
        clock: Callable[[], int],
        on_end: Callable[[Texts, BaseException | None, int], None],
        *,
        is_niced: Callable[[], bool] | None = None,
        behind: "_Lane | None" = None,
    ) -> None:
        self.queue = TextQueue()
        self.embedded = self.batches = self.busy_ns = self.waited_ns = 0
        self._count, self._turn, self._limit, self._clock, self._on_end = count, turn, limit, clock, on_end
        self._changed = threading.Condition(lock)
        self._open: set[Texts] = set()
        self._threads: list[threading.Thread] = []
        self._ends: dict[int, float] = {}  # by thread: when its batch is expected to end, in ns
        self._is_niced, self._behind = is_niced, behind
        self._leaving = 0  # turns in succession that left texts waiting
        self._closed = False

    # ---- with the lock

    def check_room(
        self, flow: int, part: Part, texts: Sequence[str], deadline_ns: int, now: int, max_wait_ns: int
    ) -> None:
        """Raise `Overloaded` if too many wait, if the texts would wait too long, or could not be embedded by their
        deadline."""
        if len(self._open) >= self._limit and sum(one.begin_ns < 0 for one in self._open) >= self._limit:
            raise Overloaded(f"{self._limit} requests wait for embedding, the limit; try again later")
        wait_ns = self.queue.wait_ns(flow, part, sum(map(size_of, texts)), self._count)
        expected = f"{len(self.queue)} texts wait for embedding, so this one would take about {wait_ns / 1e9:.2g} s"
        if len(self.queue) and 0 < max_wait_ns < wait_ns:
            raise Overloaded(f"{expected}; the limit is {max_wait_ns / 1e9:.2g} s; try again later")
        if now < deadline_ns < now + wait_ns:  # one that is late already ends so when its turn comes
            raise Overloaded(f"{expected}, and its request has {(deadline_ns - now) / 1e9:.2g} s left; try again later")

    def add(self, texts: Texts) -> None:
        self.queue.push(texts)
        self._open.add(texts)
        if not self._threads:
            for number in range(self._count if self._is_niced is None else 2 * self._count):
                arguments = (number >= self._count,)
                thread = threading.Thread(target=self._run, args=arguments, name=f"embedding_{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        if self._is_niced is None:
            self._changed.notify(len(texts.texts))
        else:
            self._changed.notify_all()  # of either kind

    def close(self) -> list[Texts]:
        """Stop the threads; return what has not ended."""
        self._closed = True
        self._changed.notify_all()
        return list(self._open)

    # ---- without it

    def join(self, until: float | None) -> bool:
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, niced: bool) -> None:
        if niced:
            os.nice(_NICENESS)  # on Linux, of this thread
        while True:
            with self._changed:
                while not (self._closed or (len(self.queue) and self._is_turn_of(niced))):
                    self._changed.wait(_RECENT_NS / 1e9 if len(self.queue) else None)  # then it is its turn again
                if self._closed:
                    return
                new = self.queue.take_new(*self._turn)
            _tokenize(new)
            with self._changed:
                if self._behind is not None and self._leaving >= _TURNS and len(self._behind.queue):
                    self._leaving, lane = 0, self._behind
                    taken, ended = lane.take(1)
                else:
                    lane, (taken, ended) = self, self.take(self._turn[0])
                    self._leaving = self._leaving + 1 if len(self.queue) else 0
            begin = self._clock()
            if taken:
                lane.embed(taken, ended)
            lane.finish(taken, ended, begin, self._clock())
            del taken, ended  # nothing is kept alive while the thread waits

    def _is_turn_of(self, niced: bool) -> bool:
        return self._is_niced is None or self._is_niced() is niced

    def take(self, most: int) -> tuple[list[Waiting], dict[Texts, TrinityError | None]]:
        """Remove the texts of a turn; return them, and what has ended: cancelled, or too late. With the lock."""
        characters = self._turn[1]
        taken: list[Waiting] = []
        ended: dict[Texts, TrinityError | None] = {}
        now = self._clock()
        size, share = 0, self._share(now)
        while len(taken) < most and size < share and (one := self.queue.pop(taken, characters)) is not None:
            texts = one.texts
            if not texts.wanted:
                ended[texts] = None
            elif texts.deadline_ns and texts.deadline_ns <= now and texts.begin_ns < 0:
                ended[texts] = DeadlineExceeded("its text was not embedded in time")
            else:
                texts.begin_ns = now if texts.begin_ns < 0 else texts.begin_ns
                self.queue.begun(one)
                taken.append(one)
                size += one.size
                characters -= len(one.text)
                self.waited_ns += now - texts.submitted_ns
        self._ends[threading.get_ident()] = now + self.queue.ns_of(one.size for one in taken)
        return taken, ended

    def _share(self, now: int) -> float:
        """Return the size of waiting texts that a thread takes, so that all threads end at about the same time."""
        busy_ns = sum(max(end - now, 0.0) for end in self._ends.values())
        busy_size = busy_ns / self.queue.ns_per_size if self.queue.ns_per_size else 0.0
        return (self.queue.size + busy_size) / self._count

    def embed(self, group: list[Waiting], ended: dict[Texts, TrinityError | None]) -> None:
        """Embed texts of one embedder and kind together; record the `Texts` that ended with an error."""
        embedder, kind = group[0].texts.embedder, group[0].texts.kind
        try:
            vectors = _embed(group, embedder, kind)
            for one, vector in zip(group, vectors, strict=True):
                one.texts.vectors[one.number] = vector
        except Exception as raised:  # of a library we do not know: the next text may be fine
            callers = list(dict.fromkeys(one.texts for one in group))
            fails_all = isinstance(raised, EmbedderUnreachable | DeviceFailed)
            if len(callers) > 1 and not fails_all:  # it may be the fault of one
                for caller in callers:
                    self.embed([one for one in group if one.texts is caller], ended)
                return
            error = raised if isinstance(raised, TrinityError) else None
            ended.update(dict.fromkeys(callers, error or ModelError(f"the embedder {embedder.name} failed: {raised}")))

    def finish(self, taken: list[Waiting], ended: dict[Texts, TrinityError | None], begin_ns: int, now_ns: int) -> None:
        counts = [_count(one) if one.texts.counted else 0 for one in taken]
        with self._changed:
            self._ends.pop(threading.get_ident())
            for one, tokens in zip(taken, counts, strict=True):
                one.texts.tokens += tokens
                one.texts.missing -= 1
                if not one.texts.missing:
                    ended.setdefault(one.texts, None)
            if taken:
                self.queue.measured(taken, now_ns - begin_ns)
                self.embedded += len(taken)
                self.batches += 1
                self.busy_ns += now_ns - begin_ns
            self._open.difference_update(ended)
            if self._is_niced is not None:
                self._changed.notify_all()  # it may be the turn of the other kind
        for texts, error in ended.items():
            self._on_end(texts, error, now_ns)


def _tokenize(new: Sequence[Waiting]) -> None:
    """Set the tokens of texts whose embedder has any. Errors are those of `embed`, which says whose text it is."""
    for _, group in itertools.groupby(new, key=lambda one: (id(one.texts.embedder), one.texts.kind)):
        texts = list(group)
        with contextlib.suppress(Exception):
            tokenizing = texts[0].texts.embedder.tokenizing
            if tokenizing is not None:
                found = tokenizing.tokenize([one.text for one in texts], texts[0].texts.kind)
                for one, tokens in zip(texts, found, strict=True):
                    one.set_tokens(tokens, tokenizing)


def _embed(group: Sequence[Waiting], embedder: Embedder, kind: TextKind) -> Vectors:
    """Embed texts by their tokens, if these are known."""
    tokens = [one.tokens for one in group if one.tokens is not None]
    tokenizing = group[0].tokenizing
    if tokenizing is None or len(tokens) < len(group):
        return embedder.embed([one.text for one in group], kind)
    return tokenizing.embed_tokens(tokens)


def _count(one: Waiting) -> int:
    """Return the number of a text's own tokens."""
    if one.tokenizing is None or one.tokens is None:
        return one.texts.embedder.count_tokens(one.text)
    return one.tokenizing.count(one.text, one.tokens, one.texts.kind)
