"""Resolution of filters on a thread beside the pool's loop, so that no filter delays a query that does not have it.

```
  loop:    request ──▶ waiting, by flow ──────────────────────────▶ finish: parts, or evaluate again, or an error
                            │                                         ▲
  thread:                   └─▶ the flow that has used least ─▶ evaluate, pass by pass ─┐
                                            ▲      between two passes                   │
                                            └─── a flow that has used less goes first ◀─┘
```
A flow is a client's session and API key, its long filters apart from its short ones. A filter that nobody waits for any
more, because its queries were cancelled or have expired, is not evaluated, or its evaluation ends before the next pass.
The thread evaluates over what does not change; `finish` (in the loop) applies what has changed since.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from runtime.errors import DeadlineExceeded, InternalError, Overloaded, TrinityError
from runtime.pool.collections.scopes import FilterableCollection, Finish
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.fair_queue import FairQueue
from runtime.retrieval.fair_threads import start_thread

NEVER_NS = 1 << 62
_QUANTUM_NS = 2_000_000  # a flow that has used so much less goes first, in the middle of an evaluation
_MOST_NESTED = 4  # evaluations that are interrupted by others
W = TypeVar("W")
log = logging.getLogger("filters")


@dataclass(eq=False)
class Resolution(Generic[W]):
    """A filter of a collection that is being resolved, for the requests that wait for it.

    `outcome`: set when it is evaluated: `Finish`, or the error. `shared`: also later requests may wait for it.
    """

    collection: int
    encoded: bytes
    flow: Hashable
    filterable: FilterableCollection
    waiting: list[W]
    deadline_ns: int
    begun: bool = False
    cancelled: bool = False
    shared: bool = True
    outcome: Finish | TrinityError | None = None


class FilterResolver(Generic[W]):
    """The thread, and the resolutions in progress. All methods are the loop's; `wake` is called by the thread.

    The thread starts with the first filter. start: False for tests, which call `run_next`.
    """

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], int] = time.monotonic_ns, *, start: bool = True
    ) -> None:
        self._wake, self._clock, self._start = wake, clock, start
        self._open: dict[tuple[int, bytes], Resolution[W]] = {}
        self._unfinished: set[Resolution[W]] = set()
        self._queue: FairQueue[Hashable, Resolution[W]] = FairQueue()
        self._changed = threading.Condition()  # of the queue
        self._done: deque[Resolution[W]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._nested = 0

    # ---- the loop

    @property
    def unfinished(self) -> Sequence[Resolution[W]]:
        """All resolutions that `take_done` has not returned yet."""
        return tuple(self._unfinished)

    def wait_for(
        self,
        collection: int,
        encoded: bytes,
        filterable: FilterableCollection,
        flow: Hashable,
        waiting: Sequence[W],
        deadline_ns: int,
    ) -> None:
        """Let requests wait for a filter, until a deadline."""
        resolution = self._open.get((collection, encoded))
        if resolution is None or resolution.cancelled or resolution.filterable is not filterable:
            resolution = Resolution(collection, encoded, flow, filterable, [], deadline_ns)
            self._open[collection, encoded] = resolution
            self._unfinished.add(resolution)
            with self._changed:
                self._queue.push(flow, resolution)
                self._changed.notify()
            if self._start and self._thread is None:
                self._start_thread(resolution)
        resolution.waiting += waiting
        resolution.deadline_ns = max(resolution.deadline_ns, deadline_ns)

    def _start_thread(self, first: Resolution[W]) -> None:
        """Start the thread, or end the first resolution with the error."""
        try:
            self._thread = start_thread(self._serve, "filters")
        except Overloaded as error:
            first.outcome = error
            with self._changed:
                self._queue.remove(first.flow, first)
            self._done.append(first)
            self._wake()

    def changed(self, collection: int) -> None:
        """A collection has changed: later requests do not wait for evaluations that have begun."""
        for key, resolution in tuple(self._open.items()):
            if key[0] == collection and resolution.begun:
                resolution.shared = False
                del self._open[key]

    def abandon(self, resolution: Resolution[W]) -> None:
        """End a resolution for which no request waits."""
        resolution.cancelled = True
        if self._open.get((resolution.collection, resolution.encoded)) is resolution:
            del self._open[resolution.collection, resolution.encoded]
        with self._changed:
            waited = self._queue.remove(resolution.flow, resolution)
        if waited:
            self._unfinished.discard(resolution)

    def take_done(self) -> list[Resolution[W]]:
        """Return the resolutions that have an outcome, each once."""
        done = []
        while self._done:
            resolution = self._done.popleft()
            if self._open.get((resolution.collection, resolution.encoded)) is resolution:
                del self._open[resolution.collection, resolution.encoded]
            self._unfinished.discard(resolution)
            done.append(resolution)
        return done

    def close(self) -> None:
        """Stop the thread after its current pass. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # ---- the thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not len(self._queue):
                    self._changed.wait()
                if self._closed:
                    return
            self.run_next()

    def run_next(self, below: float = float("inf")) -> bool:
        """Evaluate the filter of the flow that has used least, if that is less than `below`. Return whether any was."""
        with self._changed:
            turn = self._queue.pop(below)
        if turn is None:
            return False
        resolution = turn[1]
        resolution.begun = True
        begin_ns = self._clock()

        def account() -> None:
            nonlocal begin_ns
            now_ns = self._clock()
            with self._changed:
                self._queue.charge(resolution.flow, now_ns - begin_ns)
            begin_ns = now_ns

        def check() -> None:
            nonlocal begin_ns
            account()
            if self._nested < _MOST_NESTED:
                self._nested += 1
                with self._changed:
                    below = self._queue.used(resolution.flow) - _QUANTUM_NS
                while self.run_next(below):
                    pass
                self._nested -= 1
                begin_ns = self._clock()
            self._check_wanted(resolution, begin_ns)

        try:
            self._check_wanted(resolution, begin_ns)
            resolution.outcome = resolution.filterable.evaluate(resolution.encoded, Work(check))
        except TrinityError as error:
            resolution.outcome = error
        except Exception as error:  # the thread serves all others
            log.exception("a filter could not be evaluated")
            resolution.outcome = InternalError(f"the filter could not be evaluated: {error!r}")
        account()
        self._done.append(resolution)
        self._wake()
        return True

    def _check_wanted(self, resolution: Resolution[W], now_ns: int) -> None:
        """Raise `DeadlineExceeded` if no request waits for a filter any more."""
        if self._closed or resolution.cancelled or now_ns >= resolution.deadline_ns:
            raise DeadlineExceeded("no query waits for this filter any more")
