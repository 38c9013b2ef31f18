"""A batch that advances all its members together, step by step: the pool's extends, and decode's tokens.

Members join and leave between *runs* only. While nothing changes, many steps are one event: the batch plans up to the
next member's last step, and whoever wants in earlier (`poke`) ends the run with the step that is under way.
"""

import heapq
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from runtime.simulator.events import Action, Events

T = TypeVar("T", bound=Hashable)


class StepBatch(Generic[T]):
    """`between(done, steps)` is called between two runs with the members whose steps are over (they have left) and the
    steps that the run took; it may `join` and `leave`, and returns the most steps to take before it is called again,
    the time of each, and what the first of them costs beside it. An empty batch notices a `poke` only `wake_ns` later.
    """

    def __init__(
        self,
        events: Events,
        between: Callable[[list[T], int], tuple[int, int, int]],
        wake_ns: int = 0,
    ) -> None:
        self._wake_ns = wake_ns
        self._events, self._between = events, between
        self._end: Action = self._run_ends  # bound once
        self._ends: dict[T, int] = {}  # member → the step count at which its steps are over
        self._heap: list[tuple[int, int, T]] = []
        self._joined = 0
        self._taken = 0
        self._end_ns = -1  # of the run under way; events for any other moment are of plans that were replaced
        self._begin_ns = self._first_ns = self._each_ns = self._steps = 0
        self._resting = True
        self.busy_ns = 0
        self.member_steps = 0

    @property
    def members(self) -> Collection[T]:
        return self._ends

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

    def boundary_ns(self) -> int:
        """When the step under way ends: now, if there is none."""
        now = self._events.now_ns
        if self._steps == 0:
            return now
        passed = now - self._begin_ns - self._first_ns
        steps = 0 if passed <= 0 else -(-passed // self._each_ns)
        return self._begin_ns + self._first_ns + steps * self._each_ns

    def poke(self) -> None:
        """Something has changed: have `between` called as soon as the step under way ends."""
        now = self._events.now_ns
        if self._resting:
            self._resting = False
            self._steps, self._end_ns = 0, now + self._wake_ns
            self._events.at(self._end_ns, self._end)
            return
        if self._steps <= 1:
            return
        passed = now - self._begin_ns - self._first_ns
        steps = 1 if passed <= 0 else 1 - (-passed // self._each_ns)
        if steps < self._steps:
            self._steps = steps
            self._end_ns = self._begin_ns + self._first_ns + (steps - 1) * self._each_ns
            self._events.at(self._end_ns, self._end)

    def _run_ends(self) -> None:
        now, steps, ends, heap = self._events.now_ns, self._steps, self._ends, self._heap
        if now != self._end_ns:
            return
        if steps:
            self.busy_ns += now - self._begin_ns
            self.member_steps += steps * len(ends)
            self._taken += steps
        taken, done = self._taken, []
        self._steps, self._end_ns = 0, -1
        while heap and heap[0][0] <= taken:
            end, _, member = heapq.heappop(heap)
            if ends.get(member) == end:  # else it left early
                del ends[member]
                done.append(member)
        most, each_ns, extra_ns = self._between(done, steps)
        if not ends:
            self._resting = True
            return
        while ends.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        steps = min(heap[0][0] - taken, most)
        self._steps = steps if steps > 1 else 1
        self._begin_ns, self._each_ns, self._first_ns = now, each_ns, each_ns + extra_ns
        self._end_ns = now + extra_ns + self._steps * each_ns
        self._events.at(self._end_ns, self._end)
