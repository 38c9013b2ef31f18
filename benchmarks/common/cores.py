"""Whether a benchmark's processes had their cores, which others want too."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_FIRST = -20  # of Linux's nice values


def raise_priority() -> None:
    """This process, and those that it starts, have a core before other processes do, where that is allowed.

    Where Linux shares cores out by session first (autogroup), a process's own nice value says nothing to another
    session's; so this has a session of its own, whose nice value is set.
    """
    with suppress(OSError):
        os.setsid()
    raise_priority_of(os.getpid())


def raise_priority_of(pid: int) -> None:
    """As `raise_priority`, of a process with a session of its own."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(_FIRST))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _FIRST)


def use_realtime_priority() -> bool:
    """This process, not those that it starts, has a core before all that have no real-time priority. If allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return False
    return True


def stolen_ns(pids: Sequence[int]) -> int:
    """For how long so far these processes' main threads could have run while others had their cores, and the host had
    any core; 0 where the system does not say."""
    taken = 0
    with suppress(OSError):
        for pid in pids:
            taken += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        taken += int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) * _TICK_NS
    return taken


class UndisturbedRun(NamedTuple, Generic[T]):
    """What was found in the `tries`, the share of its time that the one which counts had `lost`."""

    found: T
    lost: float
    tries: int


def run_undisturbed(
    run: Callable[[], T],
    pids: Sequence[int],
    *,
    most: float,
    tries: int,
    taken: Callable[[Sequence[int]], int] = stolen_ns,
    clock: Callable[[], int] = time.monotonic_ns,
) -> UndisturbedRun[T]:
    """`run` until others had its processes' cores for no more than `most` of the time, at most `tries` times; the try
    counts in which they had them least, whatever it found."""
    had: list[tuple[float, T]] = []
    while not had or (had[-1][0] > most and len(had) < tries):
        begin, before = clock(), taken(pids)
        found = run()
        had.append(((taken(pids) - before) / (clock() - begin), found))
    lost, found = min(had, key=lambda one: one[0])
    return UndisturbedRun(found, lost, len(had))
