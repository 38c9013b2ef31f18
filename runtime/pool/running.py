"""The queries that have a slot in the engine: active ones by stage, and paused ones."""

from collections import deque
from typing import Generic, TypeVar

from runtime.pool.queues import Entry

T = TypeVar("T")


class RunningBatch(Generic[T]):
    """Who is active and who is paused. Prefill queries are never paused."""

    def __init__(self, max_pauses: int) -> None:
        self._max_pauses = max_pauses
        self.prefill: dict[Entry[T], None] = {}
        self.decode: dict[Entry[T], None] = {}  # in the order of their turns
        self.paused: deque[Entry[T]] = deque()  # the first to go on first
        self.active = 0  # queries in the next extend
        self.held = 0  # engine slots in use

    def admit(self, entry: Entry[T], began: int) -> None:
        entry.began = began
        self.active += 1
        self.held += 1
        (self.prefill if entry.stage == "prefill" else self.decode)[entry] = None

    def leave(self, entry: Entry[T]) -> None:
        """It is finished or cancelled. Raises ValueError if it has no slot."""
        group = self.prefill if entry.stage == "prefill" else self.decode
        if entry in group:
            del group[entry]
            self.active -= 1
        elif entry in self.paused:
            self.paused.remove(entry)
        else:
            raise ValueError("the query has no slot")
        self.held -= 1

    def pause_youngest(self) -> Entry[T] | None:
        """Pause the decode query that came last and may still be paused; None if there is none."""
        for entry in reversed(self.decode):
            if entry.pauses < self._max_pauses:
                del self.decode[entry]
                self.active -= 1
                entry.pauses += 1
                self.paused.appendleft(entry)  # those paused before it came after it
                return entry
        return None

    def resume(self) -> Entry[T]:
        entry = self.paused.popleft()
        self.decode[entry] = None
        self.active += 1
        return entry

    def settle(self, entry: Entry[T]) -> None:
        """This query is not paused any more."""
        entry.pauses = self._max_pauses
