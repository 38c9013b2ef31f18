"""Q_pre and Q_dec, and the queries in them."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ipc import Stage
from runtime.pool.estimate import Kind

T = TypeVar("T")
NEVER_NS = 1 << 62


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """A query as the scheduler sees it: waiting, running or paused. Times are monotonic ns.

    stage, arrival_ns, kind; deadline_ns: after it the answer is worth nothing (NEVER_NS: no such time); query: whatever
    the caller keeps of it. The rest is the scheduler's own: when it ought to be answered (`due_ns`), by when it must
    have a slot for that (`start_by_ns`), its expected extends, the extend count at which it began, and its pauses.
    """

    stage: Stage
    deadline_ns: int
    arrival_ns: int
    query: T
    kind: Kind
    due_ns: int = NEVER_NS
    start_by_ns: int = NEVER_NS
    extends: float = 0.0
    began: int = 0
    pauses: int = 0


@dataclass(slots=True)
class PrefillQueue(Generic[T]):
    """Q_pre: the least slack first. Slack shrinks alike for all that wait, so the order is that of `start_by_ns`."""

    _heap: list[tuple[int, int, Entry[T]]] = field(default_factory=list)
    _count: int = 0  # keeps equal ones in the order of their arrival

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def front(self) -> Entry[T]:
        return self._heap[0][2]

    def push(self, entry: Entry[T]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (entry.start_by_ns, self._count, entry))

    def pop(self) -> Entry[T]:
        return heapq.heappop(self._heap)[2]

    def remove(self, matches: Callable[[T], bool]) -> Entry[T] | None:
        for i, (_, _, entry) in enumerate(self._heap):
            if matches(entry.query):
                self._heap[i] = self._heap[-1]
                self._heap.pop()
                heapq.heapify(self._heap)
                return entry
        return None


@dataclass(slots=True)
class DecodeQueue(Generic[T]):
    """Q_dec: first come, first served. `work` is the sum of the extends that its queries are expected to take."""

    _entries: deque[Entry[T]] = field(default_factory=deque)
    work: float = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def front(self) -> Entry[T]:
        return self._entries[0]

    def push(self, entry: Entry[T]) -> None:
        self._entries.append(entry)
        self.work += entry.extends

    def pop(self) -> Entry[T]:
        entry = self._entries.popleft()
        self.work = self.work - entry.extends if self._entries else 0.0  # no rounding errors pile up
        return entry

    def remove(self, matches: Callable[[T], bool]) -> Entry[T] | None:
        for i, entry in enumerate(self._entries):
            if matches(entry.query):
                del self._entries[i]
                self.work -= entry.extends
                return entry
        return None
