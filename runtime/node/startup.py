"""Startup of a worker: the timer whose report is logged when the worker is ready, and background loading."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar


def process_age_s() -> float:
    """Return the seconds since this process was started, to a hundredth, including the interpreter's start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5) starttime, field 22, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class StartupTimer:
    """Timer of consecutive startup phases. `clock` in seconds; `age_s`: time that has passed before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, age_s: float = 0.0) -> None:
        self._clock = clock
        self._started = self._last = clock() - age_s
        self._phases: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        """Attribute the time since the previous mark to `name`."""
        now = self._clock()
        self._phases.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        """Format as "2.31 s: imports 0.42, model 1.60, session 0.29"."""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._phases)
        return f"{self._last - self._started:.2f} s" + (f": {phases}" if phases else "")


# ---- loading in the background: file I/O, and work that releases the GIL


T = TypeVar("T")


def run_in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Run `work` in a new thread. The returned function waits for it and returns its result or raises its error."""
    threads = ThreadPoolExecutor(1, "start")
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future.result
