"""Scheduling priority of benchmark processes, and measurement of CPU time that other processes took from them."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_FIRST = -20  # lowest nice value of Linux


def raise_priority() -> None:
    """Give this process, and those that it starts, the highest nice priority, where permitted.

    With Linux's autogroup a nice value only counts within a session; the process therefore gets a session of its own,
    whose nice value is set.
    """
    with suppress(OSError):
        os.setsid()
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_FIRST))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)


def stolen_ns(pids: Sequence[int]) -> int:
    """Return the time so far in which these processes' main threads were runnable while others had their cores, plus
    the host's steal time; 0 where the system does not report it."""
    stolen = 0
    with suppress(OSError):
        for pid in pids:
            stolen += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        stolen += int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) * _TICK_NS
    return stolen


class UndisturbedRun(NamedTuple, Generic[T]):
    """Result of the selected run, the share of its time that other processes took, and the number of tries."""

    result: T
    stolen_share: float
    tries: int


def run_undisturbed(
    run: Callable[[], T],
    pids: Sequence[int],
    *,
    most: float,
    tries: int,
    stolen: Callable[[Sequence[int]], int] = stolen_ns,
    clock: Callable[[], int] = time.monotonic_ns,
) -> UndisturbedRun[T]:
    """Repeat `run` until other processes took at most `most` of its time, at most `tries` times. Returns the least
    disturbed run, whatever its result."""
    runs: list[tuple[float, T]] = []
    while not runs or (runs[-1][0] > most and len(runs) < tries):
        begin, before = clock(), stolen(pids)
        result = run()
        runs.append(((stolen(pids) - before) / (clock() - begin), result))
    share, result = min(runs, key=lambda one: one[0])
    return UndisturbedRun(result, share, len(runs))
