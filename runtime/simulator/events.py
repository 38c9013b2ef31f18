"""The virtual clock: a heap of what will happen. Nothing here looks at a real clock or draws a random number."""

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Action = Callable[[], None]
_NEVER_NS = 1 << 62


class Beside(Protocol):
    """What has events of its own on this clock: the next one is at `next_ns`."""

    next_ns: int

    def run(self, until_ns: int) -> None:
        """Let them happen up to a moment, or to one that others see: `now_ns` is set to that one's."""


class Events:
    """What will happen, by time; what happens at the same moment does so in the order in which it was planned."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.happened = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._planned = 0
        self._stopped = False
        self.beside: Beside | None = None

    def at(self, when_ns: int, action: Action) -> None:
        """Plan `action` for a moment that is not in the past."""
        self._planned += 1
        heappush(self._heap, (when_ns if when_ns > self.now_ns else self.now_ns, self._planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def run(self) -> None:
        """Let everything happen, until nothing is planned or `stop` is called."""
        heap, pop, beside = self._heap, heappop, self.beside
        self._stopped = False
        while not self._stopped:
            when = heap[0][0] if heap else _NEVER_NS
            if beside is not None and beside.next_ns <= when:
                if beside.next_ns == _NEVER_NS:
                    return
                beside.run(when)
                continue
            if not heap:
                return
            self.now_ns, _, action = pop(heap)
            self.happened += 1
            action()

    def stop(self) -> None:
        """Let `run` end after what is happening now; what is planned stays planned."""
        self._stopped = True


class Timeouts(Generic[T]):
    """Many things that are each due the same time after they began, of which few are still wanted by then: one event
    at a time instead of one each."""

    def __init__(self, events: Events, delay_ns: int, due: Callable[[T], None]) -> None:
        self._events, self._delay_ns, self._due = events, delay_ns, due
        self._begun: dict[T, int] = {}  # and when they are due, the first one first
        self._planned = False

    def begin(self, what: T) -> int:
        """It is due in `delay_ns`, if it is not ended before; when that is."""
        due_ns = self._begun[what] = self._events.now_ns + self._delay_ns
        self._plan(due_ns)
        return due_ns

    def end(self, what: T) -> None:
        """It is not due any more."""
        self._begun.pop(what, None)

    def _plan(self, when_ns: int) -> None:
        if not self._planned:
            self._planned = True
            self._events.at(when_ns, self._look)

    def _look(self) -> None:
        self._planned = False
        while self._begun:
            what, due_ns = next(iter(self._begun.items()))
            if due_ns > self._events.now_ns:
                self._plan(due_ns)
                return
            del self._begun[what]
            self._due(what)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
