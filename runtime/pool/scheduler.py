"""Which waiting query gets the next free slot. Pure: no clock, no engine, no ring; the simulator can run it as it is.

Two queues. Q_pre holds prefill queries, the earliest deadline first; Q_dec holds decode queries, first come first
served. Of N slots ⌈rN⌉ are owed to Q_pre: while prefill holds fewer and its queries wait, every slot that comes free is
theirs; beyond that the older query goes first. A share that one queue cannot fill goes to the other at once.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ipc import Stage
from runtime.errors import Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Queued(Generic[T]):
    """A waiting query: its stage, its deadline and arrival (monotonic ns), and whatever the caller keeps of it."""

    stage: Stage
    deadline_ns: int
    arrival_ns: int
    query: T


class Scheduler(Generic[T]):
    """Q_pre and Q_dec over `slots` slots with a reserved share `reserve` in [0, 1]; at most `capacity` queries wait."""

    def __init__(self, slots: int, reserve: float, capacity: int) -> None:
        self._slots = slots
        self._capacity = capacity
        self._reserved = math.ceil(reserve * slots)
        self._prefill: list[tuple[int, int, Queued[T]]] = []  # a heap by deadline; the count keeps ties in order
        self._decode: deque[Queued[T]] = deque()
        self._running: dict[Stage, int] = {"prefill": 0, "decode": 0}
        self._count = 0

    @property
    def waiting(self) -> dict[Stage, int]:
        return {"prefill": len(self._prefill), "decode": len(self._decode)}

    @property
    def running(self) -> dict[Stage, int]:
        return dict(self._running)

    def add(self, queued: Queued[T]) -> None:
        """Let a query wait. Raises `Overloaded` when `capacity` queries wait already."""
        waiting = len(self._prefill) + len(self._decode)
        if waiting >= self._capacity:
            raise Overloaded(f"the pool's queue is full: {waiting} queries wait, and {self._capacity} may")
        if queued.stage == "prefill":
            self._count += 1
            heapq.heappush(self._prefill, (queued.deadline_ns, self._count, queued))
        else:
            self._decode.append(queued)

    def next(self, now_ns: int) -> tuple[list[Queued[T]], list[Queued[T]]]:
        """The queries that take the free slots now, and those found too late for their deadline: both leave the queues.

        A decode query that waits behind others is found late only when it comes to the front.
        """
        expired = self._drop_expired(now_ns)
        free = self._slots - self._running["prefill"] - self._running["decode"]
        chosen: list[Queued[T]] = []
        while free > len(chosen) and (self._prefill or self._decode):
            chosen.append(self._take(self._choose()))
            expired += self._drop_expired(now_ns)
        return chosen, expired

    def finished(self, stage: Stage) -> None:
        """A running query of this stage has left its slot."""
        self._running[stage] -= 1

    def remove(self, matches: Callable[[T], bool]) -> T | None:
        """Take the waiting query that `matches` out (it was cancelled, or its client is gone); None if none does."""
        for i, (_, _, queued) in enumerate(self._prefill):
            if matches(queued.query):
                self._prefill[i] = self._prefill[-1]
                self._prefill.pop()
                heapq.heapify(self._prefill)
                return queued.query
        for i, queued in enumerate(self._decode):
            if matches(queued.query):
                del self._decode[i]
                return queued.query
        return None

    def _choose(self) -> Stage:
        if not self._decode:
            return "prefill"
        if not self._prefill:
            return "decode"
        # Both wait. Prefill is owed its reserve; decode may hold what is left of the slots.
        return "prefill" if self._running["prefill"] < self._reserved else self._older()

    def _older(self) -> Stage:
        """Beyond the reserve neither stage goes before the other: whoever arrived first."""
        return "prefill" if self._prefill[0][2].arrival_ns <= self._decode[0].arrival_ns else "decode"

    def _take(self, stage: Stage) -> Queued[T]:
        self._running[stage] += 1
        return heapq.heappop(self._prefill)[2] if stage == "prefill" else self._decode.popleft()

    def _drop_expired(self, now_ns: int) -> list[Queued[T]]:
        expired = []
        while self._prefill and self._prefill[0][0] <= now_ns:
            expired.append(heapq.heappop(self._prefill)[2])
        while self._decode and self._decode[0].deadline_ns <= now_ns:
            expired.append(self._decode.popleft())
        return expired
