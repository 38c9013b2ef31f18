"""A limit of time for many short tasks."""

import asyncio
from collections import deque
from types import TracebackType


class TimeLimit:
    """As `asyncio.timeout`, for tasks that all have the same limit: one timer of the loop serves them, for a quarter of
    the time that a timer each takes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._limited: deque[_Limited] = deque()  # by when they are due; also some that have ended
        self._timer: asyncio.TimerHandle | None = None

    def limit(self) -> "_Limited":
        """Return a context in which the current task is cancelled if it takes too long; it raises TimeoutError then."""
        task = asyncio.current_task()
        assert task is not None, "used in a task"
        loop, limited = task.get_loop(), self._limited
        while limited and limited[0].task is None:
            limited.popleft()
        one = _Limited(task, loop.time() + self.seconds)
        limited.append(one)
        if self._timer is None:
            self._timer = loop.call_at(one.due_s, self._expire, loop)
        return one

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now, limited = loop.time(), self._limited
        while limited and (limited[0].task is None or limited[0].due_s <= now):
            limited.popleft().expire()
        self._timer = loop.call_at(limited[0].due_s, self._expire, loop) if limited else None


class _Limited:
    """The part of a task that is limited. `task` is None once it has ended."""

    __slots__ = ("_cancelling", "_expired", "due_s", "task")

    def __init__(self, task: "asyncio.Task[object]", due_s: float) -> None:
        self.task: asyncio.Task[object] | None = task
        self.due_s, self._cancelling, self._expired = due_s, task.cancelling(), False

    def expire(self) -> None:
        """Cancel the task if it has not ended."""
        if self.task is not None:
            self._expired = True
            self.task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self.task = self.task, None
        own = self._expired and task is not None and task.uncancel() <= self._cancelling
        if own and kind is asyncio.CancelledError:
            raise TimeoutError from error
