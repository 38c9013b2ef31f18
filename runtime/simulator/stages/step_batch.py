"""A batch that advances all its members together, step by step: the pool's extends, and decode's tokens.

Members join and leave between *runs* only. While nothing changes, many steps are one event: the batch plans up to the
next member's last step, and whoever wants in earlier (`poke`) ends the run with the step that is under way.
"""

import heapq
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from runtime.simulator.events import Events

T = TypeVar("T", bound=Hashable)


class StepBatch(Generic[T]):
    """`between(done, steps)` is called between two runs with the members whose steps are over (they have left) and the
    steps that the run took; it may `join` and `leave`, and returns the most steps to take before it is called again.
    `step_ns()` is then asked for the time of one step, and `extra_ns()` for what the run's first step costs beside it.
    An empty batch notices a `poke` only `wake_ns` later.
    """

    def __init__(
        self,
        events: Events,
        between: Callable[[list[T], int], int],
        step_ns: Callable[[], int],
        extra_ns: Callable[[], int] = lambda: 0,
        wake_ns: int = 0,
    ) -> None:
        self._wake_ns = wake_ns
        self._events, self._between, self._step_ns, self._extra_ns = events, between, step_ns, extra_ns
        self._ends: dict[T, int] = {}  # member → the step count at which its steps are over
        self._heap: list[tuple[int, int, T]] = []
        self._joined = 0
        self._taken = 0
        self._run = 0  # the run under way, to know a planned end that was replaced by an earlier one
        self._begin_ns = self._first_ns = self._each_ns = self._steps = 0
        self._resting = True
        self.busy_ns = 0
        self.member_steps = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, member: T) -> bool:
        return member in self._ends

    def join(self, member: T, steps: int) -> None:
        """Let a member take `steps` ≥ 1 steps. Only between runs."""
        self._joined += 1
        self._ends[member] = self._taken + steps
        heapq.heappush(self._heap, (self._taken + steps, self._joined, member))

    def left(self, member: T) -> int:
        """How many of its steps a member has not taken yet. Only between runs."""
        return self._ends[member] - self._taken

    def leave(self, member: T) -> int:
        """Take a member out before its steps are over; how many were left. Only between runs."""
        return self._ends.pop(member) - self._taken

    def poke(self) -> None:
        """Something has changed: have `between` called as soon as the step under way ends."""
        now = self._events.now_ns
        if self._resting:
            self._resting = False
            self._plan(now + self._wake_ns, 0)
            return
        if self._steps <= 1:
            return
        passed = now - self._begin_ns - self._first_ns
        steps = 1 if passed <= 0 else 1 - (-passed // self._each_ns)
        if steps < self._steps:
            self._steps = steps
            self._plan(self._begin_ns + self._first_ns + (steps - 1) * self._each_ns, steps)

    def _plan(self, end_ns: int, steps: int) -> None:
        self._run += 1
        run = self._run
        self._steps = steps
        self._events.at(end_ns, partial(self._end, run))

    def _end(self, run: int) -> None:
        if run != self._run:
            return
        now, steps, ends, heap = self._events.now_ns, self._steps, self._ends, self._heap
        if steps:
            self.busy_ns += now - self._begin_ns
            self.member_steps += steps * len(ends)
            self._taken += steps
        taken, done = self._taken, []
        self._steps = 0
        while heap and heap[0][0] <= taken:
            end, _, member = heapq.heappop(heap)
            if ends.get(member) == end:  # else it left early
                del ends[member]
                done.append(member)
        most = self._between(done, steps)
        if not ends:
            self._resting = True
            return
        extra_ns = self._extra_ns()
        self._begin_ns, self._each_ns = now, max(self._step_ns(), 1)
        self._first_ns = self._each_ns + extra_ns
        while ends.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        steps = max(min(heap[0][0] - taken, most), 1)
        self._plan(now + self._first_ns + (steps - 1) * self._each_ns, steps)
