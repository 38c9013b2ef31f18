"""A worker's start: where its seconds went, which it logs when it is ready, and work on a thread beside it."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth: the interpreter's own start is part of it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5) starttime, the 22nd field: since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class StartupTimer:
    """The parts of a start, one after the other. `clock` in seconds; `age_s`: how long it has gone on already."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, age_s: float = 0.0) -> None:
        self._clock = clock
        self._begin = self._last = clock() - age_s
        self._parts: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        """All since the last part was `name`."""
        now = self._clock()
        self._parts.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        """As "2.31 s: imports 0.42, model 1.60, session 0.29"."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts)
        return f"{self._last - self._begin:.2f} s" + (f": {parts}" if parts else "")


# ---- work on a thread of its own while a worker starts: what waits for files or needs no interpreter's lock


T = TypeVar("T")


def run_in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Begin `work` on a thread of its own. What is returned waits for it, and returns or raises what it did."""
    threads = ThreadPoolExecutor(1, "start")
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future.result
