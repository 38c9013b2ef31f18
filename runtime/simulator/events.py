"""Virtual clock: a heap of planned events. Uses neither a real clock nor random numbers."""

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

Action = Callable[[], None]
NEVER_NS = 1 << 62
PLANNED, NEXT = range(2)  # words of `Events.clock`


class EventSource(Protocol):
    """A source of events of its own on the same clock, such as compiled code."""

    def run(self, until_ns: int, planned: int) -> bool:
        """Process its events before the planned event (`until_ns`, `planned`), or up to one that calls Python.

        Sets `now_ns` to the time of that one, and `clock` to the time of its next event. Returns False if it has no
        event before the planned one.
        """


class Events:
    """Planned events by time; events of the same time run in the order in which they were planned.

    `clock` is shared with `source`: the number of events planned so far, and the time of the source's next event.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.processed = 0
        self.clock = array("q", (0, NEVER_NS))
        self._heap: list[tuple[int, int, Action]] = []
        self._stopped = False
        self.source: EventSource | None = None

    def at(self, when_ns: int, action: Action) -> None:
        """Plan `action` for a time that is not in the past."""
        clock = self.clock
        planned = clock[PLANNED] = clock[PLANNED] + 1
        heappush(self._heap, (when_ns if when_ns > self.now_ns else self.now_ns, planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def expect(self, when_ns: int) -> None:
        """Announce an event of the source at that time or later."""
        self.clock[NEXT] = min(self.clock[NEXT], when_ns)

    def run(self) -> None:
        """Process events until none is planned or `stop` is called."""
        heap, pop, clock, source = self._heap, heappop, self.clock, self.source
        self._stopped = False
        while not self._stopped:
            when, planned = heap[0][:2] if heap else (NEVER_NS, 0)
            if source is not None and clock[NEXT] <= when and clock[NEXT] < NEVER_NS and source.run(when, planned):
                continue
            if not heap:
                return
            self.now_ns, _, action = pop(heap)
            self.processed += 1
            action()

    def stop(self) -> None:
        """End `run` after the current event; planned events stay planned."""
        self._stopped = True


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
