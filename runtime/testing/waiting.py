"""Waiting for conditions in tests. The timeouts only end tests that would hang."""

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], do: Callable[[], object] | None = None, within_s: float = 240.0, what: str = "it"
) -> None:
    """Call `do` repeatedly until `condition` holds; without it, look less often the longer it takes."""
    begin = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begin
        assert waited_s < within_s, f"waited {within_s:.0f} s for {what}"
        if do is not None:
            do()
        # Never without a pause: two polling threads can starve a third of the GIL for minutes.
        time.sleep(0.0002 if do is not None else min(max(waited_s / 10, 0.0002), 0.02))


def pause_s(waited_s: float) -> float:
    """Return a tenth of the time waited so far, from 5 to 100 ms: a look at a node's metrics takes it 15 ms of a core
    that what is waited for needs too."""
    return min(max(waited_s / 10, 0.005), 0.1)


def eventually(condition: Callable[[], object], within_s: float, what: str) -> None:
    """Poll until `condition` holds, of something that happens in other threads or processes."""
    begin = time.monotonic()
    until(condition, lambda: time.sleep(pause_s(time.monotonic() - begin)), within_s, what)
