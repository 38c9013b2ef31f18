"""Work beside a worker's loop, on a thread of its own: opening a collection anew, comparing its checksums.

The thread has the loop's own priority: a nicer one, put off the processor while it holds the interpreter's lock, would
keep the loop waiting for as long as others keep the cores busy. `pace` is what leaves the loop its time.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpu import GpuError
from runtime.errors import TrinityError

READ_BYTES_S = 128 << 20
_T = TypeVar("_T")


class Stopped(Exception):
    """The work is not wanted any more."""


class Beside(Generic[_T]):
    """One piece of work, begun at once: `over` tells when it has ended, with a `result` or an `error`."""

    def __init__(self, name: str, work: Callable[["Beside[_T]"], _T]) -> None:
        """`work` is given this, for its `pace`."""
        self._work = work
        self._stopped = threading.Event()
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
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def trouble(self) -> str:
        """Why it failed, in words; "" if it did not."""
        if self.error is None:
            return ""
        return str(self.error) if isinstance(self.error, TrinityError | GpuError) else repr(self.error)

    def pace(self, read_bytes: int) -> None:
        """Reads no more than `READ_BYTES_S` of it. Raises `Stopped`."""
        if self._stopped.wait(read_bytes / READ_BYTES_S):
            raise Stopped

    def hurry(self, read_bytes: int) -> None:
        """`pace` for work that somebody waits for. Raises `Stopped`."""
        if self._stopped.is_set():
            raise Stopped

    def stop(self) -> None:
        """Have it end soon, without a result that anybody wants."""
        self._stopped.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)
