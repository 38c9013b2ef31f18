"""Scheduling policy of the vector pool: which queries are active in the next extend. docs/scheduler.md explains it.

Compiled functions over `Tables`, called by production's loop, the simulator and the tests. They use no clock, engine
or ring: the caller passes the time. `schedule` applies these rules in order, for N slots:

- Late: a query that can no longer meet its caller's deadline is rejected. Missed: a prefill query that has waited so
  long that its request misses its TTFT is demoted behind all others that arrive within `_MISSED_DELAY` times that wait.
- Aging: if no decode query was active for `aging`, a waiting one gets the next free slot. So a decode query with `p`
  others ahead of it is answered, whatever prefill does, within (p + 1)·(aging + the rest of one prefill query + the
  longest decode query + an extend) of its arrival, where a query's time is its extends with N active.
- Yield: until its first query has waited for τ_pre, or while that one is missed, prefill gets what decode leaves free.
- Reserve: otherwise ⌈rN⌉ slots, all N while it has credit (the share of r that it left to decode before). Without a
  free slot a decode query is paused: with credit at once, without credit only for a query without slack.
- Keep: on a GPU decode leaves those ⌈rN⌉ slots free while prefill is present and does not yield, used or not.
- Burst: with credit, where fewer active slots waste little, no decode query is active beside prefill's.
- Virtual deadlines: a decode query's is its arrival plus `_STRETCH` times what one of its size class takes alone.
  Queries of a size class are FIFO; shorter ones pass longer ones, and preempt them.

`paper` omits missed, keep, credit, bursts and virtual deadlines.
"""

import math

from runtime.pool.batch import can_admit, can_start_decode, has_decode_slot, longest_remaining, pause_one, start
from runtime.pool.compiled import compiled
from runtime.pool.estimates import class_of, extend_ns, learn_cost, learn_extends
from runtime.pool.queues import append, pop, push, release
from runtime.pool.tables import DECODE, FREE, PREFILL, TRINITY, WAITING, Entry, Tables, active_count

ACCEPTED, OVERLOADED, TOO_LATE = range(3)
_STRETCH = 6.0
_MISSED_DELAY = 64
_BURST_COST = 1.15  # largest cost of a query in a smaller batch, relative to its cost in a full one


# ---- arrivals and completions


@compiled
def add(t: Tables, number: int, now: int) -> int:
    """Enqueue a query. Return ACCEPTED; or OVERLOADED or TOO_LATE, and it is not enqueued.

    Decode queries may fill three quarters of the queue: a decode flood cannot exclude prefill queries.
    """
    entry = t.entries[number]
    decode = entry.stage == DECODE
    if t.queues[PREFILL].count + t.queues[DECODE].count >= t.queue or (
        decode and t.queues[DECODE].count >= t.decode_queue
    ):
        return OVERLOADED
    if entry.deadline_ns <= now:
        return TOO_LATE
    entry.query_class = class_of(t, entry)
    entry.extends = max(1, round(t.classes[entry.query_class].mean_extends))
    entry.state, entry.missed, entry.aged = WAITING, False, False
    t.last_serial += 1
    entry.serial = t.last_serial
    entry.start_by_ns = entry.arrival_ns
    if not decode:
        due = min(entry.deadline_ns, entry.arrival_ns + t.target_ns)
        entry.start_by_ns = due - int(entry.extends * extend_ns(t.cost, t.slots))
    elif t.rules == TRINITY:
        entry.start_by_ns = _virtual_deadline(t, entry)
    push(t, t.queues[entry.stage], number)
    return ACCEPTED


@compiled
def _virtual_deadline(t: Tables, entry: Entry) -> int:
    """Return a decode query's virtual deadline. It never decreases within a size class (bits of expected extends)."""
    bits = 0
    while entry.extends >> bits:
        bits += 1
    due = entry.arrival_ns + int(_STRETCH * (1 << bits) * extend_ns(t.cost, 1))
    t.virtual_deadlines_ns[bits] = max(due, t.virtual_deadlines_ns[bits])
    return t.virtual_deadlines_ns[bits]


@compiled
def finish(t: Tables, number: int, extends: int) -> None:
    """Free the slot of a query that has completed after `extends` extends; 0: its vector was refused."""
    if extends > 0:
        learn_extends(t.classes[t.entries[number].query_class], extends)
    release(t, number)


@compiled
def advance(t: Tables, prefill: int, active: int, extends: int, took_ns: int) -> None:
    """Account for `extends` extends of `active` queries, `prefill` of them prefill's, which took `took_ns` in all.

    `took_ns` includes the loop's own time.
    """
    t.total_extends += extends
    learn_cost(t.cost, active, took_ns / extends)
    if t.rules == TRINITY and (prefill < active or t.queues[DECODE].count or t.paused.count):
        earned = (t.reserve - prefill / active) * took_ns
        t.credit_ns = min(max(t.credit_ns + earned, 0.0), float(t.aging_ns))


# ---- the next batch


@compiled
def schedule(t: Tables, now: int) -> None:
    """Assign the slots of the next extend, and list the queries `admitted`, `preempted`, `resumed` and `late`."""
    t.admitted.count = t.preempted.count = t.resumed.count = t.late.count = 0
    _reject_late(t, now)
    if t.rules == TRINITY:
        _demote_missed(t, now)
    pending = t.queues[DECODE].count or t.paused.count
    if t.active[DECODE].count or not pending or t.decode_ran_ns < 0:
        t.decode_ran_ns = now
    aged = now - t.decode_ran_ns >= t.aging_ns
    if aged and active_count(t) < t.slots and can_start_decode(t):
        t.entries[start(t, DECODE)].aged = True
    yields = _prefill_yields(t, now)
    quota, credit = math.ceil(t.reserve * t.slots), t.credit_ns > 0.0
    keeps = t.keep_reserve and t.rules == TRINITY and not yields
    present = t.queues[PREFILL].count + t.active[PREFILL].count
    size = min(present, t.slots)
    cheap = extend_ns(t.cost, size) * t.slots <= _BURST_COST * extend_ns(t.cost, t.slots) * size
    t.burst = not yields and credit and cheap and (present > quota or (t.burst and present > 0))
    decode_slots = max(t.slots - quota, 1) if keeps and present else t.slots
    if credit:
        quota = t.slots
    while not yields and can_admit(t, PREFILL) and t.active[PREFILL].count < quota:
        if active_count(t) >= t.slots:
            urgent = credit or t.entries[t.queues[PREFILL].numbers[0]].start_by_ns <= now
            if not urgent or not pause_one(t):
                break
        start(t, PREFILL)
    if t.burst and t.active[PREFILL].count:
        while pause_one(t):
            pass
    else:
        while has_decode_slot(t, decode_slots) and can_start_decode(t):
            start(t, DECODE)
    while active_count(t) < t.slots and can_admit(t, PREFILL):
        start(t, PREFILL)
    if t.rules == TRINITY and (yields or not t.queues[PREFILL].count):
        _preempt_longer(t, decode_slots)


@compiled
def _prefill_yields(t: Tables, now: int) -> bool:
    """Return whether prefill leaves the slots to decode queries: its first query has not waited for τ_pre yet and its
    caller's deadline is further away than τ_pre; or all of its queries are missed."""
    if not t.queues[PREFILL].count or not (t.queues[DECODE].count or t.paused.count):
        return False
    first, flush = t.entries[t.queues[PREFILL].numbers[0]], t.flush_prefill_ns
    missed = first.missed and first.start_by_ns > now
    return missed or now < min(first.arrival_ns + flush, first.deadline_ns - flush)


@compiled
def _demote_missed(t: Tables, now: int) -> None:
    """Move prefill queries whose requests miss their TTFT behind those that can still meet it."""
    queue = t.queues[PREFILL]
    while queue.count:
        first = t.entries[queue.numbers[0]]
        if first.missed or now - first.arrival_ns < t.missed_ns:
            return
        number = pop(t, queue)
        first.missed, first.start_by_ns = True, first.arrival_ns + _MISSED_DELAY * t.missed_ns
        push(t, queue, number)


@compiled
def _preempt_longer(t: Tables, decode_slots: int) -> None:
    """Preempt decode queries for much shorter ones with an earlier virtual deadline."""
    while not has_decode_slot(t, decode_slots) and can_admit(t, DECODE):
        number = longest_remaining(t)
        if number < 0:
            return
        longest, shorter = t.entries[number], t.entries[t.queues[DECODE].numbers[0]]
        left = longest.extends + longest.began - t.total_extends
        if longest.start_by_ns <= shorter.start_by_ns or left < 2 * shorter.extends:
            return
        pause_one(t)
        start(t, DECODE)


@compiled
def _reject_late(t: Tables, now: int) -> None:
    """Reject queries at the front that could not meet their deadlines even with a slot now."""
    for stage in range(2):
        queue = t.queues[stage]
        while queue.count:
            front = t.entries[queue.numbers[0]]
            others = t.active[PREFILL].count
            if stage == DECODE:
                others = min(active_count(t), t.slots - 1)
            if front.deadline_ns > now + int(front.extends * extend_ns(t.cost, others + 1)):
                break
            front.state = FREE
            append(t.late, pop(t, queue))
