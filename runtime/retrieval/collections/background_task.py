"""Work beside a worker's loop, on a thread of its own: opening a collection anew, comparing its checksums.

The thread has the loop's own priority: a nicer one, put off the processor while it holds the interpreter's lock, would
keep the loop waiting for as long as others keep the cores busy. `throttle` is what leaves the loop its time.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpu import GpuError
from runtime.errors import TrinityError

READ_BYTES_S = 128 << 20
_T = TypeVar("_T")


class TaskCancelled(Exception):
    """The work is not wanted any more."""


class BackgroundTask(Generic[_T]):
    """One piece of work, begun at once: `done` tells when it has ended, with a `result` or an `error`."""

    def __init__(self, name: str, work: Callable[["BackgroundTask[_T]"], _T]) -> None:
        """`work` is given this, for its `throttle`."""
        self._work = work
        self._cancelled = threading.Event()
        self.result: _T | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
        """Why it failed, in words; "" if it did not."""
        if self.error is None:
            return ""
        return str(self.error) if isinstance(self.error, TrinityError | GpuError) else repr(self.error)

    def throttle(self, read_bytes: int) -> None:
        """Reads no more than `READ_BYTES_S` of it. Raises `TaskCancelled`."""
        if self._cancelled.wait(read_bytes / READ_BYTES_S):
            raise TaskCancelled

    def check_cancelled(self, read_bytes: int) -> None:
        """`throttle` for work that somebody waits for. Raises `TaskCancelled`."""
        if self._cancelled.is_set():
            raise TaskCancelled

    def cancel(self) -> None:
        """Have it end soon, without a result that anybody wants."""
        self._cancelled.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)
