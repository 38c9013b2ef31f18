"""Embeds texts on threads of its own: a worker's loop goes on meanwhile.

Embedders that compute here share one thread, as they share the worker's cores; their libraries let go of the
interpreter's lock. One that waits for a server has threads of its own, so that it holds up nobody else.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.errors import ModelError, Overloaded, TrinityError
from runtime.retrieval.embedding.embedder import Embedder

MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class Embedded:
    """A text's vector float32 [dim], or the error that ended it, and when (monotonic ns)."""

    ticket: int
    at_ns: int
    vector: npt.NDArray[np.float32] | None = None
    error: TrinityError | None = None


@dataclass(slots=True)
class _Text:
    ticket: int
    embedder: Embedder
    text: str
    cancelled: bool = False


class _Lane:
    """Texts that wait for some threads, and these."""

    def __init__(self, limit: int, threads: int, run: Callable[["_Lane"], None]) -> None:
        self.waiting: queue.Queue[_Text | None] = queue.Queue(limit)
        self.threads = [threading.Thread(target=run, args=(self,), name="embed", daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()


class EmbedThreads:
    """`put` texts, `poll` vectors. An error ends its text and no other; a text that hangs holds up those behind it,
    where the embedder computes here.

    `fileno` becomes readable when there is something to poll. At most `limit` texts wait for a thread; the end waits
    `end_s` for those that are being embedded.
    """

    def __init__(
        self, *, limit: int = MAX_WAITING, clock: Callable[[], int] = time.monotonic_ns, end_s: float = 1.0
    ) -> None:
        self._end_s = end_s
        self._clock = clock
        self._limit = limit
        self._lanes: dict[str, _Lane] = {}
        self._open: dict[int, _Text] = {}  # the asking thread's
        self._done: deque[Embedded] = deque()
        self._ended = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._bell

    def put(self, ticket: int, embedder: Embedder, text: str) -> None:
        """Have a text embedded. Raises `Overloaded` when as many wait as may."""
        asked = _Text(ticket, embedder, text)
        try:
            self._lane(embedder).waiting.put_nowait(asked)
        except queue.Full:
            raise Overloaded(f"{self._limit} texts wait to be embedded, the limit; try again later") from None
        self._open[ticket] = asked

    def cancel(self, ticket: int) -> None:
        """It is not wanted any more, and does not come from `poll`. Unknown tickets are ignored."""
        asked = self._open.pop(ticket, None)
        if asked is not None:
            asked.cancelled = True

    def poll(self) -> list[Embedded]:
        """What has come since the last call, each ticket once. Never waits."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        found = []
        while self._done:  # the bell was read first: what comes behind it rings again
            embedded = self._done.popleft()
            if self._open.pop(embedded.ticket, None) is not None:
                found.append(embedded)
        return found

    def close(self) -> None:
        """End the threads, or leave those that hang to the process's end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        threads = [thread for lane in self._lanes.values() for thread in lane.threads]
        for lane in self._lanes.values():
            for _ in lane.threads:
                with contextlib.suppress(queue.Full):  # then they look at `_ended`, after the text that they have
                    lane.waiting.put_nowait(None)
        until = time.monotonic() + self._end_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            os.close(self._bell)

    def _lane(self, embedder: Embedder) -> _Lane:
        name = embedder.name if embedder.at_once > 1 else ""
        if name not in self._lanes:
            self._lanes[name] = _Lane(self._limit, embedder.at_once, self._run)
        return self._lanes[name]

    def _run(self, lane: _Lane) -> None:
        while (asked := lane.waiting.get()) is not None and not self._ended:
            if asked.cancelled:
                continue
            try:
                vector = asked.embedder.embed([asked.text])[0]
                self._done.append(Embedded(asked.ticket, self._clock(), vector))
            except TrinityError as error:
                self._done.append(Embedded(asked.ticket, self._clock(), error=error))
            except Exception as error:  # of a library we do not know: the next text may be fine
                failed = ModelError(f"the embedder {asked.embedder.name} failed: {error}")
                self._done.append(Embedded(asked.ticket, self._clock(), error=failed))
            os.eventfd_write(self._bell, 1)
