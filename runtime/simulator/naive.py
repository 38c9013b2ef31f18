"""Schedulers to compare with: FIFO, prefill first, decode first. The same shape as production's, none of its ideas."""

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from ipc import Stage
from runtime.errors import Overloaded
from runtime.pool.pace import Queues
from runtime.pool.policy import CROWD
from runtime.pool.queues import Entry
from runtime.pool.scheduler import Round

Order = Literal["fifo", "prefill-first", "decode-first"]
T = TypeVar("T")


class PoolScheduler(Queues, Protocol[T]):
    """What the simulated pool asks of a scheduler; `runtime.pool.scheduler.Scheduler` is one."""

    @property
    def waiting(self) -> dict[Stage, int]: ...
    def add(self, entry: Entry[T], now_ns: int) -> None: ...
    def next(self, now_ns: int) -> Round[T]: ...
    def held_until(self, now_ns: int) -> int | None: ...
    def advanced(self, extends: int) -> None: ...
    def finished(self, entry: Entry[T], extends: int) -> None: ...
    def remove(self, matches: Callable[[T], bool]) -> T | None: ...


class NaiveScheduler(PoolScheduler[T]):
    """`slots` places, given to one stage before the other or to whoever came first; nobody waits for company."""

    def __init__(self, order: Order, slots: int, queue: int) -> None:
        self._order, self._slots, self._queue = order, slots, queue
        self._queues: dict[Stage, deque[Entry[T]]] = {"prefill": deque(), "decode": deque()}
        self._running = 0

    @property
    def waiting(self) -> dict[Stage, int]:
        return {stage: len(queue) for stage, queue in self._queues.items()}

    @property
    def held_back(self) -> bool:
        return any(self._queues.values())

    @property
    def crowded(self) -> bool:
        return sum(map(len, self._queues.values())) >= CROWD

    def add(self, entry: Entry[T], now_ns: int) -> None:
        waiting = sum(map(len, self._queues.values()))
        if waiting >= self._queue:
            raise Overloaded(f"the pool's queue is full: {waiting} queries wait, and {self._queue} may")
        self._queues[entry.stage].append(entry)

    def next(self, now_ns: int) -> Round[T]:
        changes = Round[T]()
        while self._running < self._slots and (queue := self._first()):
            entry = queue.popleft()
            if entry.deadline_ns <= now_ns:
                changes.late.append(entry)
            else:
                self._running += 1
                changes.admitted.append(entry)
        return changes

    def _first(self) -> deque[Entry[T]]:
        prefill, decode = self._queues["prefill"], self._queues["decode"]
        if self._order == "fifo" and prefill and decode:
            return prefill if prefill[0].arrival_ns <= decode[0].arrival_ns else decode
        return (prefill or decode) if self._order != "decode-first" else (decode or prefill)

    def held_until(self, now_ns: int) -> int | None:
        return None

    def advanced(self, extends: int) -> None:
        """Learns nothing."""

    def finished(self, entry: Entry[T], extends: int) -> None:
        self._running -= 1

    def remove(self, matches: Callable[[T], bool]) -> T | None:
        for queue in self._queues.values():
            for entry in queue:
                if matches(entry.query):
                    queue.remove(entry)
                    return entry.query
        return None
