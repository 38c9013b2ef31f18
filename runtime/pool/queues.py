"""Q_pre and Q_dec, and the queries in them."""

import heapq
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
    the caller keeps of it, and slot: the engine's slot that it has, written by the caller (-1: none yet). The rest is
    the scheduler's own: when it ought to be answered (`due_ns`), by when it ought to have a slot (`start_by_ns`; of two
    equal ones the smaller `number` goes first), its expected extends, the extend count at which it began, or would have
    without its pauses, and how many those were.
    """

    stage: Stage
    deadline_ns: int
    arrival_ns: int
    query: T
    kind: Kind
    slot: int = -1
    due_ns: int = NEVER_NS
    start_by_ns: int = NEVER_NS
    number: int = 0
    extends: float = 0.0
    began: int = 0
    pauses: int = 0


class Queue(list[tuple[int, int, Entry[T]]]):
    """Q_pre or Q_dec, a heap: whoever ought to have a slot first is first, and of equal ones who came first."""

    _count = 0

    @property
    def front(self) -> Entry[T]:
        return self[0][2]

    def push(self, entry: Entry[T]) -> None:
        self._count = entry.number = self._count + 1
        heapq.heappush(self, (entry.start_by_ns, entry.number, entry))

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


@dataclass(slots=True)
class _Size:
    """What waits of one size, and the last place in the queue that one of it was given."""

    waiting: int = 0
    work: float = 0.0
    last_ns: int = 0


class DecodeQueue(Queue[T]):
    """Q_dec. Queries are alike whose expected extends have as many bits: among those it is first come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, _Size] = {}

    @property
    def oldest_ns(self) -> int:
        """When the one that waits longest came."""
        return min(entry.arrival_ns for _, _, entry in self)

    def place(self, entry: Entry[T], wait_ns: float) -> None:
        """Its turn is `wait_ns` after its arrival for each extend that its size stands for; never before its like's."""
        bits = _bits(entry)
        size = self._sizes.setdefault(bits, _Size())
        size.last_ns = entry.start_by_ns = max(entry.arrival_ns + int(wait_ns * (1 << bits)), size.last_ns)

    def work_before(self, entry: Entry[T]) -> float:
        """Extends that those who wait are expected to take, without those of longer queries than this one."""
        return sum(size.work for bits, size in self._sizes.items() if bits <= _bits(entry))

    def push(self, entry: Entry[T]) -> None:
        super().push(entry)
        size = self._sizes.setdefault(_bits(entry), _Size())
        size.waiting += 1
        size.work += entry.extends

    def take(self) -> Entry[T]:
        return self._without(super().take())

    def take_out(self, matches: Callable[[T], bool]) -> Entry[T] | None:
        found = super().take_out(matches)
        return self._without(found) if found else None

    def _without(self, entry: Entry[T]) -> Entry[T]:
        size = self._sizes[_bits(entry)]
        size.waiting -= 1
        size.work = size.work - entry.extends if size.waiting else 0.0  # no rounding errors pile up
        return entry


def _bits(entry: Entry[T]) -> int:
    return int(entry.extends).bit_length()
