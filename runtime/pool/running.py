"""The queries that have a slot in the engine: active ones by stage, and paused ones."""

from bisect import insort
from typing import Generic, TypeVar

from runtime.pool.queues import Entry

T = TypeVar("T")


class RunningBatch(Generic[T]):
    """Who is active and who is paused. Prefill queries are never paused."""

    def __init__(self, max_pauses: int) -> None:
        self._max_pauses = max_pauses
        self.prefill: dict[Entry[T], None] = {}
        self.decode: list[Entry[T]] = []  # in the order of their turns
        self.paused: list[Entry[T]] = []  # the first to go on first
        self.active = 0  # queries in the next extend
        self.held = 0  # engine slots in use

    def admit(self, entry: Entry[T], began: int) -> None:
        entry.began = began
        self.active += 1
        self.held += 1
        if entry.stage == "prefill":
            self.prefill[entry] = None
        else:
            insort(self.decode, entry, key=turn)

    def leave(self, entry: Entry[T]) -> None:
        """It is finished or cancelled. Raises ValueError if it has no slot."""
        if entry in self.prefill:
            del self.prefill[entry]
            self.active -= 1
        elif entry in self.decode:
            self.decode.remove(entry)
            self.active -= 1
        elif entry in self.paused:
            self.paused.remove(entry)
        else:
            raise ValueError("the query has no slot")
        self.held -= 1

    def last(self) -> Entry[T] | None:
        """The active decode query whose turn came last, of those that may still be paused; None if there is none."""
        return next((entry for entry in reversed(self.decode) if entry.pauses < self._max_pauses), None)

    def pause(self, entry: Entry[T], done: int) -> None:
        self.decode.remove(entry)
        self.active -= 1
        entry.pauses += 1
        entry.began -= done  # extends that it has had, negative, until it goes on
        insort(self.paused, entry, key=turn)

    def resume(self, done: int) -> Entry[T]:
        entry = self.paused.pop(0)
        entry.began += done
        insort(self.decode, entry, key=turn)
        self.active += 1
        return entry

    def settle(self, entry: Entry[T]) -> None:
        """This query is not paused any more."""
        entry.pauses = self._max_pauses


def turn(entry: Entry[T]) -> tuple[int, int]:
    """Smaller goes first."""
    return entry.start_by_ns, entry.number
