"""Waiting for what must come. The bounds only end a test that would hang."""

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], do: Callable[[], object] = lambda: None, within_s: float = 60.0, what: str = "it"
) -> None:
    """Do something again and again until `condition` holds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"waited {within_s:.0f} s for {what}"
        do()
        time.sleep(0.0002)  # two threads that only ever look keep a third from the interpreter's lock for minutes


def eventually(condition: Callable[[], object], within_s: float, what: str) -> None:
    """Look from time to time until `condition` holds, of something that others do."""
    until(condition, lambda: time.sleep(0.02), within_s, what)
