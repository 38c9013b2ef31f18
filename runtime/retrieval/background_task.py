"""Background tasks of a worker: a thread beside its event loop, for example to reopen a collection or verify checksums.

The thread keeps the priority of the loop: a thread of lower priority that is preempted while it holds the interpreter's
lock would block the loop for as long as other processes keep the cores busy. `throttle` leaves the loop its share.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpu import GpuError
from runtime.errors import TrinityError
from runtime.retrieval.fair_threads import start_thread

READ_BYTES_S = 128 << 20
_T = TypeVar("_T")


class TaskCancelled(Exception):
    """Raised inside a task that was cancelled."""


class BackgroundTask(Generic[_T]):
    """One function on a thread of its own, started at once. When it is `done`, either `result` or `error` is set.

    Raises `Overloaded` if the system permits no more threads.
    """

    def __init__(self, name: str, work: Callable[["BackgroundTask[_T]"], _T]) -> None:
        """`work` receives this task, for `throttle` or `check_cancelled`."""
        self._work = work
        self._cancelled = threading.Event()
        self.result: _T | None = None
        self.error: Exception | None = None
        self._thread = start_thread(self._run, name)

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def error_message(self) -> str:
        """The message of the error; "" if there is no error."""
        if self.error is None:
            return ""
        return str(self.error) if isinstance(self.error, TrinityError | GpuError) else repr(self.error)

    def throttle(self, read_bytes: int) -> None:
        """Sleep to keep reads below `READ_BYTES_S`. Raises `TaskCancelled`."""
        if self._cancelled.wait(read_bytes / READ_BYTES_S):
            raise TaskCancelled

    def check_cancelled(self, read_bytes: int) -> None:
        """Raise `TaskCancelled` if the task is cancelled; for tasks that a caller waits for, in place of `throttle`."""
        if self._cancelled.is_set():
            raise TaskCancelled

    def cancel(self) -> None:
        """Request the task to stop at its next call of `throttle` or `check_cancelled`."""
        self._cancelled.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the task is done."""
        self._thread.join(timeout_s)
