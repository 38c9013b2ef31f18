"""Startup of a process: the timer whose report is logged when it is ready, and background loading."""

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


def core_wait_s() -> float:
    """Return the seconds that this process's main thread has waited for a core; 0 if the kernel does not count them.

    The rest of its age is what its start would take with a core for every process.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class StartupTimer:
    """Timer of consecutive startup phases. `clock` in seconds; `age_s`: time that has passed before; `core_wait`:
    seconds that this process has waited for a core."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        age_s: float = 0.0,
        core_wait: Callable[[], float] = core_wait_s,
    ) -> None:
        self._clock, self._core_wait = clock, core_wait
        self._started = self._last = clock() - age_s
        self._waited_before = core_wait() if not age_s else 0.0
        self._waited = 0.0
        self._phases: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        """Attribute the time since the previous mark to `name`."""
        now = self._clock()
        self._phases.append((name, now - self._last))
        self._last, self._waited = now, self._core_wait() - self._waited_before

    def __str__(self) -> str:
        """Format as "2.31 s (0.40 waiting for a core): imports 0.42, model 1.60, session 0.29"."""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._phases)
        waited = f" ({self._waited:.2f} waiting for a core)" if self._waited >= 0.005 else ""
        return f"{self._last - self._started:.2f} s{waited}" + (f": {phases}" if phases else "")


# ---- loading in the background: file I/O, and work that releases the GIL


T = TypeVar("T")


def run_in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Run `work` in a new thread. The returned function waits for it and returns its result or raises its error."""
    threads = ThreadPoolExecutor(1, "start")
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future.result


def run_early(work: Callable[[], T], *, captures: bool) -> Callable[[], T]:
    """Run `work` in the background, or now if it `captures` graphs, while nothing else may use its GPU. The returned
    function returns its result."""
    if not captures:
        return run_in_background(work)
    result = work()
    return lambda: result
