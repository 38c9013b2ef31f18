"""Q_pre and Q_dec, and the queries in them."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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


class PrefillQueue(list[tuple[int, int, Entry[T]]]):
    """Q_pre, a heap: the least slack first. Slack shrinks alike for all that wait, so the order is by `start_by_ns`."""

    _count = 0  # keeps equal ones in the order of their arrival

    @property
    def front(self) -> Entry[T]:
        return self[0][2]

    def push(self, entry: Entry[T]) -> None:
        self._count += 1
        heapq.heappush(self, (entry.start_by_ns, self._count, entry))

    def take(self) -> Entry[T]:
        return heapq.heappop(self)[2]

    def take_out(self, matches: Callable[[T], bool]) -> Entry[T] | None:
        """The entry of the query that `matches`, wherever it stands."""
        for i, (_, _, entry) in enumerate(self):
            if matches(entry.query):
                self[i] = self[-1]
                self.pop()
                heapq.heapify(self)
                return entry
        return None


class DecodeQueue(deque[Entry[T]]):
    """Q_dec: first come, first served. `work` is the sum of the extends that its queries are expected to take."""

    work = 0.0

    @property
    def front(self) -> Entry[T]:
        return self[0]

    def push(self, entry: Entry[T]) -> None:
        self.append(entry)
        self.work += entry.extends

    def take(self) -> Entry[T]:
        entry = self.popleft()
        self.work = self.work - entry.extends if self else 0.0  # no rounding errors pile up
        return entry

    def take_out(self, matches: Callable[[T], bool]) -> Entry[T] | None:
        """The entry of the query that `matches`, wherever it stands."""
        for i, entry in enumerate(self):
            if matches(entry.query):
                del self[i]
                self.work -= entry.extends
                return entry
        return None
