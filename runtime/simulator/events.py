"""The virtual clock: a heap of what will happen. Nothing here looks at a real clock or draws a random number."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """What will happen, by time; what happens at the same moment does so in the order in which it was planned."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.happened = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._planned = 0

    def at(self, when_ns: int, action: Action) -> None:
        """Plan `action` for a moment that is not in the past."""
        self._planned += 1
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), self._planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def run(self, while_: Callable[[], bool] = lambda: True) -> None:
        """Let everything happen, until nothing is planned or `while_` says no."""
        while self._heap and while_():
            self.now_ns, _, action = heapq.heappop(self._heap)
            self.happened += 1
            action()


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
