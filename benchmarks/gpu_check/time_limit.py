"""How a section ends early: what it needs is not there, or its time is over, so that the others have theirs."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Skipped(Exception):
    """This cannot be done here; the message says why."""


class OutOfTime(Exception):
    """A section is not done within its time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread where the block is not done in time: after the call that is under way then."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"not done within {seconds:.0f} s")

    before, begin = signal.signal(signal.SIGALRM, end), time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's alarm
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 1e-3), every)
