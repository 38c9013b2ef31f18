"""The planned events of a simulated node, in one heap: those that compiled code processes, and calls of Python."""

from pathlib import Path

import ipc
import runtime.pool
from ipc.native.compiled import compiler_for
from ipc.native.records import Array, Record, record, record_at

compiled = compiler_for(*(Path(str(package.__file__)).parent for package in (ipc, runtime.pool)), Path(__file__).parent)

# Kinds of events. Their subjects are queries (it reaches its pool, its answer the caller), a pool, Python's call, a
# decode worker and rows (a probe's vector is ready, or it is over).
QUERY, ANSWER, EXTENDS_END, CALL, STEPS_END, VECTOR, TIMEOUT = range(7)
# Reasons why compiled code returns to Python.
NO_EVENT, CALLED, ANSWERED, BETWEEN_STEPS, OUT_OF_CAPACITY = range(5)
_RANK = 1 << 48


@record
class Event(Record):
    """A planned event. `stamp`: the state of its subject for which it was planned."""

    when_ns: int
    order: int  # among the events of that time
    kind: int
    subject: int
    stamp: int


@record
class Schedule(Record):
    """A heap of events. Of one time, queries arrive first, then answers, then pools' extends end; the others happen in
    the order in which they were planned."""

    now_ns: int
    planned: int  # so far
    count: int
    capacity: int
    events: Array[Event]


schedule_at = record_at(Schedule)


@compiled
def is_full(schedule: Schedule) -> bool:
    """Return whether the heap must grow before the next event is processed."""
    return 2 * schedule.count > schedule.capacity


@compiled
def plan(schedule: Schedule, when_ns: int, kind: int, subject: int, stamp: int) -> None:
    """Push an event."""
    schedule.planned += 1
    order = schedule.planned + min(kind, CALL) * _RANK
    position = schedule.count
    schedule.count += 1
    while position:
        above = (position - 1) >> 1
        if not _precedes(when_ns, order, schedule.events[above]):
            break
        _move(schedule.events[above], schedule.events[position])
        position = above
    event = schedule.events[position]
    event.when_ns, event.order, event.kind, event.subject, event.stamp = when_ns, order, kind, subject, stamp


@compiled
def pop(schedule: Schedule) -> tuple[int, int, int]:
    """Pop the next event and advance the clock to it: (kind, subject, stamp)."""
    first = schedule.events[0]
    schedule.now_ns = first.when_ns
    popped = first.kind, first.subject, first.stamp
    schedule.count -= 1
    last = schedule.events[schedule.count]
    position = 0
    while True:
        below = 2 * position + 1
        if below >= schedule.count:
            break
        next_to = schedule.events[below + 1]
        if below + 1 < schedule.count and _precedes(next_to.when_ns, next_to.order, schedule.events[below]):
            below += 1
        if not _precedes(schedule.events[below].when_ns, schedule.events[below].order, last):
            break
        _move(schedule.events[below], schedule.events[position])
        position = below
    _move(last, schedule.events[position])
    return popped


@compiled
def _precedes(when_ns: int, order: int, event: Event) -> bool:
    return when_ns < event.when_ns or (when_ns == event.when_ns and order < event.order)


@compiled
def _move(event: Event, to: Event) -> None:
    to.when_ns, to.order, to.kind, to.subject, to.stamp = (
        event.when_ns,
        event.order,
        event.kind,
        event.subject,
        event.stamp,
    )


@compiled
def plan_call(address: int, when_ns: int) -> int:
    """Plan a call of Python. Return its number, or 0 if the heap must grow first."""
    schedule = schedule_at(address)
    if is_full(schedule):
        return 0
    plan(schedule, max(when_ns, schedule.now_ns), CALL, schedule.planned + 1, 0)
    return schedule.planned
