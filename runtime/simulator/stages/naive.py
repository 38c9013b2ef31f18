"""Orders to compare with: prefill first, decode first. The same shape as production's policy, none of its ideas."""

from collections import deque
from typing import Literal, Protocol, TypeVar

from ipc import Stage
from runtime.errors import Overloaded
from runtime.pool.scheduler import Changes, Entry

Order = Literal["prefill-first", "decode-first"]
T = TypeVar("T")


class PoolScheduler(Protocol[T]):
    """What the simulated pool asks of a policy; `runtime.pool.scheduler.Scheduler` is production's."""

    @property
    def waiting(self) -> dict[Stage, int]: ...
    def add(self, entry: Entry[T], now_ns: int) -> None: ...
    def next(self, now_ns: int) -> Changes[T]: ...
    def held_until(self, now_ns: int) -> int | None: ...
    def advanced(self, extends: int, took_ns: float) -> None: ...
    def finished(self, entry: Entry[T], extends: int) -> None: ...
    def left(self, entry: Entry[T]) -> None: ...


class NaiveScheduler(PoolScheduler[T]):
    """`slots` places, given to one stage before the other; nobody is paused or held back."""

    def __init__(self, order: Order, slots: int, queue: int) -> None:
        self._first: Stage = "prefill" if order == "prefill-first" else "decode"
        self._slots, self._queue = slots, queue
        self._queues: dict[Stage, deque[Entry[T]]] = {"prefill": deque(), "decode": deque()}
        self._running = 0

    @property
    def waiting(self) -> dict[Stage, int]:
        return {stage: len(queue) for stage, queue in self._queues.items()}

    def add(self, entry: Entry[T], now_ns: int) -> None:
        waiting = sum(map(len, self._queues.values()))
        if waiting >= self._queue:
            raise Overloaded(f"the pool's queue is full: {waiting} queries wait, and {self._queue} may")
        self._queues[entry.stage].append(entry)

    def next(self, now_ns: int) -> Changes[T]:
        changes = Changes[T]()
        while self._running < self._slots and any(self._queues.values()):
            prefill, decode = self._queues["prefill"], self._queues["decode"]
            queue = (prefill or decode) if self._first == "prefill" else (decode or prefill)
            entry = queue.popleft()
            if entry.deadline_ns <= now_ns:
                changes.late.append(entry)
            else:
                self._running += 1
                changes.admitted.append(entry)
        return changes

    def held_until(self, now_ns: int) -> int | None:
        return None

    def advanced(self, extends: int, took_ns: float) -> None:
        """Learns nothing."""

    def finished(self, entry: Entry[T], extends: int) -> None:
        self._running -= 1

    def left(self, entry: Entry[T]) -> None:
        if entry in self._queues[entry.stage]:
            self._queues[entry.stage].remove(entry)
        else:
            self._running -= 1
