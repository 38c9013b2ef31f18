"""Compiled batch of a simulated decode worker, which advances all its rows together, step by step.

Rows join and leave only between *runs*. While nothing changes, many steps are one event: a run is planned up to the
next row's last step, and `interrupt` ends it with the step in progress.
"""

from runtime.pool.tables import NEVER_NS
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages.decode_tables import State, Worker, state_at
from runtime.simulator.stages.schedule import STEPS_END, compiled, plan


@compiled
def join(s: State, worker: Worker, number: int, steps: int) -> None:
    """Add a row for `steps` ≥ 1 steps. Only between runs."""
    row = s.rows[number]
    worker.joined += 1
    row.ends, row.order, row.steps = worker.taken + steps, worker.joined, steps
    at.append(worker.members, number)


@compiled
def boundary_ns(decodes: int, number: int) -> int:
    """Return the end of a worker's step in progress; now without one."""
    s = state_at(decodes)
    worker, now = s.workers[number], s.schedule[0].now_ns
    if worker.steps == 0:
        return now
    passed = now - worker.begin_ns - worker.first_ns
    steps = 0 if passed <= 0 else -(-passed // worker.each_ns)
    return worker.begin_ns + worker.first_ns + steps * worker.each_ns


@compiled
def interrupt(decodes: int, number: int) -> None:
    """End a worker's current run with the step in progress."""
    s, end_ns = state_at(decodes), boundary_ns(decodes, number)
    worker = s.workers[number]
    if worker.idle:
        worker.idle, worker.steps, worker.end_ns = False, 0, end_ns
        plan(s.schedule[0], end_ns, STEPS_END, number, 0)
    elif end_ns < worker.end_ns:
        worker.steps = 1 + (end_ns - worker.begin_ns - worker.first_ns) // worker.each_ns
        worker.end_ns = end_ns
        plan(s.schedule[0], end_ns, STEPS_END, number, 0)


@compiled
def end_run(worker: Worker, now: int) -> int:
    """End the current run and return its number of steps. An event at a time other than `end_ns` belongs to a replaced
    plan."""
    steps, worker.steps, worker.end_ns = worker.steps, 0, -1
    if steps:
        worker.busy_ns += now - worker.begin_ns
        worker.taken += steps
    return steps


@compiled
def next_done(s: State, worker: Worker) -> int:
    """Remove and return the row that is done and joined first; -1 without one."""
    members, done, there = worker.members, -1, -1
    for position in range(members.count):
        number = members.rows[position]
        sooner = done < 0 or s.rows[number].order < s.rows[done].order
        if s.rows[number].ends <= worker.taken and sooner:
            done, there = number, position
    if done >= 0:
        members.count -= 1
        members.rows[there] = members.rows[members.count]
        s.rows[done].ends = -1
    return done


@compiled
def begin_run(s: State, worker: Worker, now: int, most: int, each_ns: int, extra_ns: int) -> None:
    """Plan the next run of at most `most` steps of `each_ns`; the first one takes `extra_ns` longer."""
    members = worker.members
    if members.count == 0:
        worker.idle = True
        return
    ends = NEVER_NS
    for position in range(members.count):
        ends = min(ends, s.rows[members.rows[position]].ends)
    steps = max(min(ends - worker.taken, most), 1)
    worker.begin_ns, worker.steps, worker.each_ns, worker.first_ns = now, steps, each_ns, each_ns + extra_ns
    worker.end_ns = now + extra_ns + steps * each_ns
    plan(s.schedule[0], worker.end_ns, STEPS_END, worker.number, 0)
