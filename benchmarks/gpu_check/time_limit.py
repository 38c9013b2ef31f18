"""Early ends of a section: a missing prerequisite, or its time limit."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Skipped(Exception):
    """A prerequisite is missing; the message gives the reason."""


class OutOfTime(Exception):
    """A section has exceeded its time limit."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after `seconds`, once the current call returns."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"not finished within {seconds:.0f} s")

    before, begin = signal.signal(signal.SIGALRM, end), time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # restore an earlier alarm
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 1e-3), every)
