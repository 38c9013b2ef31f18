"""A lane of the embedding stage: a queue of texts and the threads that embed them, a batch a turn."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence

from runtime.errors import DeadlineExceeded, DeviceFailed, EmbedderUnreachable, ModelError, Overloaded, TrinityError
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Turn, Vectors
from runtime.retrieval.embedding.text_queue import Part, TextQueue, Texts, Waiting, size_of
from runtime.retrieval.fair_threads import start_missing, start_thread

_TURNS = 8
"""Of prefill, after which a text of the others is embedded while texts of prefill wait all the time."""
_NICENESS, RECENT_NS = 19, 2_000_000_000
"""Of the others' threads, for so long after a text of prefill: 1.4% of a core that prefill keeps busy. With 10, a tenth
of it, two texts of prefill were put on one core beside one of the others on the next, and its p99 was 1.9 times as
long. Threads without it embed at other times, since any other process goes before niced ones too."""
BUSY_NS = 100_000_000
"""For so long after a text of prefill the others have a thread less, if they have several: with all cores busy, even
with niced threads, texts of prefill waited for the event loop and for the interpreter's lock, and their p99 was twice
that of prefill alone."""


class Lane:
    """A queue and its threads; `lock` protects the queue and the sums. `on_end` is called without it.

    `niced`: how many niced threads embed at present, at most `count`; 0: those that are not niced do. `behind`: the
    lane of which this one's threads embed a text after `_TURNS` turns that left texts waiting.
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
        niced: Callable[[], int] | None = None,
        behind: "Lane | None" = None,
    ) -> None:
        self.queue = TextQueue()
        self.embedded = self.batches = self.busy_ns = self.waited_ns = 0
        self._count, self._turn, self._limit, self._clock, self._on_end = count, turn, limit, clock, on_end
        self._changed = threading.Condition(lock)
        self._open: set[Texts] = set()
        self._threads: list[threading.Thread] = []
        self._ends: dict[int, float] = {}  # by thread: when its batch is expected to end, in ns
        self._niced, self._behind = niced, behind
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
        wait_ns = self.queue.wait_ns(flow, part, sum(map(size_of, texts)), self._embedding)
        expected = f"{len(self.queue)} texts wait for embedding, so this one would take about {wait_ns / 1e9:.2g} s"
        if len(self.queue) and 0 < max_wait_ns < wait_ns:
            raise Overloaded(f"{expected}; the limit is {max_wait_ns / 1e9:.2g} s; try again later")
        if now < deadline_ns < now + wait_ns:  # one that is late already ends so when its turn comes
            raise Overloaded(f"{expected}, and its request has {(deadline_ns - now) / 1e9:.2g} s left; try again later")

    def start(self) -> None:
        """Start the threads that do not run yet. Raises `Overloaded` if none can be."""

        def start(number: int) -> threading.Thread:
            return start_thread(self._run, f"embedding_{number}", number)

        start_missing(self._threads, self._count if self._niced is None else 2 * self._count, start)

    def add(self, texts: Texts) -> None:
        self.queue.push(texts)
        self._open.add(texts)
        if self._niced is None:
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

    def _run(self, number: int) -> None:
        if number >= self._count:
            os.nice(_NICENESS)  # on Linux, of this thread
        while True:
            with self._changed:
                while not (self._closed or (len(self.queue) and self._is_turn_of(number))):
                    self._changed.wait(RECENT_NS / 1e9 if len(self.queue) else None)  # then it is its turn again
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

    def _is_turn_of(self, number: int) -> bool:
        """Whether a thread embeds at present; the niced ones have the numbers from `count` on."""
        none_niced = len(self._threads) <= self._count  # the system permits no more
        if self._niced is None or none_niced:
            return True
        niced = self._niced()
        return self._count <= number < self._count + niced if niced else number < self._count

    @property
    def _embedding(self) -> int:
        """How many threads embed at present."""
        return (0 if self._niced is None else self._niced()) or self._count

    def take(self, most: int) -> tuple[list[Waiting], dict[Texts, TrinityError | None]]:
        """Remove the texts of a turn; return them, and what has ended: cancelled, or too late. With the lock."""
        characters = self._turn[1]
        taken: list[Waiting] = []
        ended: dict[Texts, TrinityError | None] = {}
        now = self._clock()
        size, share = 0, self._share(now)
        while len(taken) < most and size < share and (waiting := self.queue.pop(taken, characters)) is not None:
            texts = waiting.texts
            if not texts.wanted:
                ended[texts] = None
            elif texts.deadline_ns and texts.deadline_ns <= now and texts.begin_ns < 0:
                ended[texts] = DeadlineExceeded("its text was not embedded in time")
            else:
                texts.begin_ns = now if texts.begin_ns < 0 else texts.begin_ns
                self.queue.begun(waiting)
                taken.append(waiting)
                size += waiting.size
                characters -= len(waiting.text)
                self.waited_ns += now - texts.submitted_ns
        self._ends[threading.get_ident()] = now + self.queue.ns_of(waiting.size for waiting in taken)
        return taken, ended

    def _share(self, now: int) -> float:
        """Return the size of waiting texts that a thread takes, so that all threads end at about the same time."""
        busy_ns = sum(max(end - now, 0.0) for end in self._ends.values())
        busy_size = busy_ns / self.queue.ns_per_size if self.queue.ns_per_size else 0.0
        return (self.queue.size + busy_size) / self._embedding

    def embed(self, group: list[Waiting], ended: dict[Texts, TrinityError | None]) -> None:
        """Embed texts of one embedder and kind together; record the `Texts` that ended with an error."""
        embedder, kind = group[0].texts.embedder, group[0].texts.kind
        try:
            vectors = _embed(group, embedder, kind)
            for waiting, vector in zip(group, vectors, strict=True):
                waiting.texts.vectors[waiting.number] = vector
        except Exception as raised:  # of a library we do not know: the next text may be fine
            callers = list(dict.fromkeys(waiting.texts for waiting in group))
            fails_all = isinstance(raised, EmbedderUnreachable | DeviceFailed)
            if len(callers) > 1 and not fails_all:  # it may be the fault of one
                for caller in callers:
                    self.embed([waiting for waiting in group if waiting.texts is caller], ended)
                return
            error = raised if isinstance(raised, TrinityError) else None
            ended.update(dict.fromkeys(callers, error or ModelError(f"the embedder {embedder.name} failed: {raised}")))

    def finish(self, taken: list[Waiting], ended: dict[Texts, TrinityError | None], begin_ns: int, now_ns: int) -> None:
        counts = [_count(waiting) if waiting.texts.counted and waiting.texts not in ended else 0 for waiting in taken]
        with self._changed:
            self._ends.pop(threading.get_ident())
            for waiting, tokens in zip(taken, counts, strict=True):
                waiting.texts.tokens += tokens
                waiting.texts.missing -= 1
                if not waiting.texts.missing:
                    ended.setdefault(waiting.texts, None)
            if taken:
                self.queue.measured(taken, now_ns - begin_ns)
                self.embedded += len(taken)
                self.batches += 1
                self.busy_ns += now_ns - begin_ns
            self._open.difference_update(ended)
            if self._niced is not None:
                self._changed.notify_all()  # it may be the turn of the other kind
        for texts, error in ended.items():
            self._on_end(texts, error, now_ns)


def _tokenize(new: Sequence[Waiting]) -> None:
    """Set the tokens of texts whose embedder has any. Errors are those of `embed`, which says whose text it is."""
    for _, group in itertools.groupby(new, key=lambda waiting: (id(waiting.texts.embedder), waiting.texts.kind)):
        texts = list(group)
        with contextlib.suppress(Exception):
            tokenizing = texts[0].texts.embedder.tokenizing
            if tokenizing is not None:
                tokenized = tokenizing.tokenize([waiting.text for waiting in texts], texts[0].texts.kind)
                for waiting, tokens in zip(texts, tokenized, strict=True):
                    waiting.set_tokens(tokens, tokenizing)


def _embed(group: Sequence[Waiting], embedder: Embedder, kind: TextKind) -> Vectors:
    """Embed texts by their tokens, if these are known."""
    tokens = [waiting.tokens for waiting in group if waiting.tokens is not None]
    tokenizing = group[0].tokenizing
    if tokenizing is None or len(tokens) < len(group):
        return embedder.embed([waiting.text for waiting in group], kind)
    return tokenizing.embed_tokens(tokens)


def _count(waiting: Waiting) -> int:
    """Return the number of a text's own tokens."""
    if waiting.tokenizing is None or waiting.tokens is None:
        return waiting.texts.embedder.count_tokens(waiting.text)
    return waiting.tokenizing.count(waiting.text, waiting.tokens, waiting.texts.kind)
