"""The virtual clock: a heap of what will happen. Nothing here looks at a real clock or draws a random number."""

from array import array
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Action = Callable[[], None]
NEVER_NS = 1 << 62
PLANNED, NEXT = range(2)  # words of a clock


class Beside(Protocol):
    """What has events of its own on this clock."""

    def run(self, until_ns: int, planned: int) -> bool:
        """Let them happen that come before a planned event (its moment, and its number among those planned), or up to
        one that others see: `now_ns` is set to that one's. `clock` has then when the next one happens. False if nothing
        happens before that event."""


class Events:
    """What will happen, by time; what happens at the same moment does so in the order in which it was planned.

    `clock` is shared with who is `beside`: how many events were planned so far, and when the first one there happens.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.happened = 0
        self.clock = array("q", (0, NEVER_NS))
        self._heap: list[tuple[int, int, Action]] = []
        self._stopped = False
        self.beside: Beside | None = None

    def at(self, when_ns: int, action: Action) -> None:
        """Plan `action` for a moment that is not in the past."""
        clock = self.clock
        planned = clock[PLANNED] = clock[PLANNED] + 1
        heappush(self._heap, (when_ns if when_ns > self.now_ns else self.now_ns, planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def expect(self, when_ns: int) -> None:
        """Something happens beside, at that moment or later."""
        self.clock[NEXT] = min(self.clock[NEXT], when_ns)

    def run(self) -> None:
        """Let everything happen, until nothing is planned or `stop` is called."""
        heap, pop, clock, beside = self._heap, heappop, self.clock, self.beside
        self._stopped = False
        while not self._stopped:
            when, planned = heap[0][:2] if heap else (NEVER_NS, 0)
            if beside is not None and clock[NEXT] <= when and clock[NEXT] < NEVER_NS and beside.run(when, planned):
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
