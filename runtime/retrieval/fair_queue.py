"""Fair queue: of several flows (clients, keys) the one that has used least goes first, its jobs in order.

A flow's use is a virtual time (start-time fair queueing): a flow that comes back after a pause begins where the others
are, so that a pause earns nothing, and a flow that has used much waits for those that have not.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[F, T]):
    """Jobs by flow. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[F, deque[T]] = {}
        self._used: dict[F, float] = {}
        self._now = 0.0  # use of the flow that was served last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, flow: F, job: T) -> None:
        """Append a job to its flow."""
        if flow not in self._waiting:
            self._waiting[flow] = deque()
            self._used[flow] = max(self._used.get(flow, 0.0), self._now)
        self._waiting[flow].append(job)

    def turn(self) -> F | None:
        """Return the flow whose job is next; None if none waits."""
        return min(self._waiting, key=self._used.__getitem__, default=None)

    def pop(self, below: float = float("inf")) -> tuple[F, T] | None:
        """Remove the next job; return it with its flow. None if no waiting flow has used less than `below`."""
        flow = self.turn()
        if flow is None or self._used[flow] >= below:
            return None
        jobs = self._waiting[flow]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[flow]
        self._now = max(self._now, self._used[flow])
        for old in [other for other, used in self._used.items() if used < self._now and other not in self._waiting]:
            if old != flow:
                del self._used[old]
        return flow, job

    def remove(self, flow: F, job: T) -> bool:
        """Remove a job that waits. Return False if it does not."""
        jobs = self._waiting.get(flow, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[flow]
        return True

    def charge(self, flow: F, used: float) -> None:
        """Record what a job of a flow has used, in any unit; several times for a long one."""
        self._used[flow] = self._used.get(flow, self._now) + used

    def used(self, flow: F) -> float:
        """Return what a flow has used, comparable with that of the others."""
        return self._used.get(flow, self._now)
