"""Compiled batch of a simulated decode worker, which advances all its rows together, step by step.

Rows join and leave only between *runs*. While nothing changes, many steps are one event: a run is planned up to the
next row's last step, and `interrupt` ends it with the step in progress.
"""

from typing import Any

from runtime.pool.tables import NEVER_NS
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages.pool_core import compiled


@compiled
def join(s: Any, d: int, row: int, steps: int) -> None:
    """Add a row for `steps` ≥ 1 steps. Only between runs."""
    worker, one = s.workers[d], s.rows[row]
    worker[at.JOINED] += 1
    one[at.ENDS], one[at.ORDER], one[at.ROW_STEPS] = worker[at.TAKEN] + steps, worker[at.JOINED], steps
    at.append(s, d, at.MEMBERS, row)


@compiled
def remove(s: Any, d: int, row: int) -> Any:
    """Remove a row before its steps are done. Return how many it has taken. Only between runs."""
    worker, one, members = s.workers[d], s.rows[row], s.lists[5 * d + at.MEMBERS]
    taken = one[at.ROW_STEPS] - one[at.ENDS] + worker[at.TAKEN]
    place = 0
    while members[place] != row:
        place += 1
    worker[at.LISTS + at.MEMBERS] -= 1
    members[place] = members[worker[at.LISTS + at.MEMBERS]]
    one[at.ENDS] = -1
    return taken


@compiled
def boundary_ns(s: Any, d: int, now: int) -> Any:
    """Return the end of the step in progress; now without one."""
    worker = s.workers[d]
    if worker[at.STEPS] == 0:
        return now
    passed = now - worker[at.BEGIN] - worker[at.FIRST]
    steps = 0 if passed <= 0 else -(-passed // worker[at.EACH])
    return worker[at.BEGIN] + worker[at.FIRST] + steps * worker[at.EACH]


@compiled
def interrupt(s: Any, d: int, now: int) -> None:
    """End the current run with the step in progress."""
    worker = s.workers[d]
    if worker[at.IDLE]:
        worker[at.IDLE], worker[at.STEPS], worker[at.END] = 0, 0, now
        at.plan(s, now, at.RUN_ENDS, d, 0)
        return
    if worker[at.STEPS] <= 1:
        return
    passed = now - worker[at.BEGIN] - worker[at.FIRST]
    steps = 1 if passed <= 0 else 1 - (-passed // worker[at.EACH])
    if steps < worker[at.STEPS]:
        worker[at.STEPS] = steps
        worker[at.END] = worker[at.BEGIN] + worker[at.FIRST] + (steps - 1) * worker[at.EACH]
        at.plan(s, worker[at.END], at.RUN_ENDS, d, 0)


@compiled
def end_run(s: Any, d: int, now: int) -> Any:
    """End the current run and return its number of steps. An event at a time other than END belongs to a replaced
    plan."""
    worker = s.workers[d]
    steps, worker[at.STEPS], worker[at.END] = worker[at.STEPS], 0, -1
    if steps:
        worker[at.BUSY] += now - worker[at.BEGIN]
        worker[at.TAKEN] += steps
    return steps


@compiled
def next_done(s: Any, d: int) -> Any:
    """Remove and return the row that is done and joined first; -1 without one."""
    worker, members, found, there = s.workers[d], s.lists[5 * d + at.MEMBERS], -1, -1
    for place in range(worker[at.LISTS + at.MEMBERS]):
        row = members[place]
        sooner = found < 0 or s.rows[row, at.ORDER] < s.rows[found, at.ORDER]
        if s.rows[row, at.ENDS] <= worker[at.TAKEN] and sooner:
            found, there = row, place
    if found >= 0:
        worker[at.LISTS + at.MEMBERS] -= 1
        members[there] = members[worker[at.LISTS + at.MEMBERS]]
        s.rows[found, at.ENDS] = -1
    return found


@compiled
def begin_run(s: Any, d: int, now: int, most: int, each_ns: int, extra_ns: int) -> None:
    """Plan the next run of at most `most` steps of `each_ns`; the first one takes `extra_ns` longer."""
    worker = s.workers[d]
    if worker[at.LISTS + at.MEMBERS] == 0:
        worker[at.IDLE] = 1
        return
    ends = NEVER_NS
    for place in range(worker[at.LISTS + at.MEMBERS]):
        ends = min(ends, s.rows[s.lists[5 * d + at.MEMBERS, place], at.ENDS])
    steps = max(min(ends - worker[at.TAKEN], most), 1)
    worker[at.BEGIN], worker[at.STEPS], worker[at.EACH], worker[at.FIRST] = now, steps, each_ns, each_ns + extra_ns
    worker[at.END] = now + extra_ns + steps * each_ns
    at.plan(s, worker[at.END], at.RUN_ENDS, d, 0)
