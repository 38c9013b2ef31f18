"""Scheduling policy of the vector pool: which queries are active in the next extend. docs/scheduler.md explains it.

Compiled functions over `Tables`, called by production's loop, the simulator and the tests. They use no clock, engine
or ring: the caller passes the time. `schedule` applies these rules in order, for N slots:

- Late: a query that can no longer meet its caller's deadline is rejected. Missed: a prefill query that has waited so
  long that its request misses its TTFT is demoted behind all others that arrive within `_MISSED_DELAY` times that wait.
- Hold: while fewer queries wait than slots are free, and none has reached its flush timeout, none is admitted.
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

`paper` omits missed, keep, credit, bursts and virtual deadlines. `fifo` is one queue by arrival, `static` the same in
whole batches.
"""

import math
from typing import Any

from runtime.pool import tables
from runtime.pool.compiled import compiled

ACCEPTED, OVERLOADED, TOO_LATE = range(3)
_STRETCH = 6.0
_MISSED_DELAY = 64
_BURST_COST = 1.15  # largest cost of a query in a smaller batch, relative to its cost in a full one


# ---- arrivals and completions


@compiled
def add(t: Any, entry: int, now: int) -> Any:
    """Enqueue a query. Return ACCEPTED; or OVERLOADED or TOO_LATE, and it is not enqueued.

    Decode queries may fill three quarters of the queue: a decode flood cannot exclude prefill queries.
    """
    e, w = t.entries[entry], t.words
    decode = e[tables.STAGE] == tables.DECODE
    if w[tables.QUEUED_PREFILL] + w[tables.QUEUED_DECODE] >= w[tables.QUEUE] or (
        decode and w[tables.QUEUED_DECODE] >= w[tables.DECODE_QUEUE]
    ):
        return OVERLOADED
    if e[tables.DEADLINE] <= now:
        return TOO_LATE
    e[tables.CLASS] = tables.class_row(t, e[tables.CLASS_A], e[tables.CLASS_B])
    e[tables.EXTENDS] = max(1, round(t.means[e[tables.CLASS], 0]))
    e[tables.PAUSES], e[tables.STATE] = 0, tables.WAITING
    e[tables.SERIAL] = w[tables.SERIALS] = w[tables.SERIALS] + 1
    e[tables.START_BY] = e[tables.ARRIVAL]
    if not decode and w[tables.RULES] < tables.FIFO:
        due = min(e[tables.DEADLINE], e[tables.ARRIVAL] + w[tables.TARGET_NS])
        e[tables.START_BY] = due - int(e[tables.EXTENDS] * tables.extend_ns(t, w[tables.SLOTS]))
    if decode and w[tables.RULES] == tables.TRINITY:
        e[tables.START_BY] = _virtual_deadline(t, e)
    tables.push(t, tables.queue_of(t, entry), entry)
    return ACCEPTED


@compiled
def _virtual_deadline(t: Any, e: Any) -> Any:
    """Return a decode query's virtual deadline. It never decreases within a size class (bits of expected extends)."""
    bits = 0
    while e[tables.EXTENDS] >> bits:
        bits += 1
    due = e[tables.ARRIVAL] + int(_STRETCH * (1 << bits) * tables.extend_ns(t, 1))
    due = t.words[tables.LAST_VIRTUAL_DEADLINE + bits] = max(due, t.words[tables.LAST_VIRTUAL_DEADLINE + bits])
    return due


@compiled
def finish(t: Any, entry: int, extends: int) -> None:
    """Free the slot of a query that has completed after `extends` extends; 0: its vector was refused."""
    if extends > 0:
        tables.learn_extends(t, t.entries[entry, tables.CLASS], extends)
    tables.release(t, entry)


@compiled
def advance(t: Any, prefill: int, active: int, extends: int, took_ns: int) -> None:
    """Account for `extends` extends of `active` queries, `prefill` of them prefill's, which took `took_ns` in all.

    `took_ns` includes the loop's own time.
    """
    w, f = t.words, t.floats
    w[tables.TOTAL_EXTENDS] += extends
    tables.learn_cost(t, active, took_ns / extends)
    if w[tables.RULES] == tables.TRINITY and (prefill < active or w[tables.QUEUED_DECODE] or w[tables.PAUSED_COUNT]):
        earned = (f[tables.RESERVE] - prefill / active) * took_ns
        f[tables.CREDIT] = min(max(f[tables.CREDIT] + earned, 0.0), float(w[tables.AGING_NS]))


# ---- the next batch


@compiled
def schedule(t: Any, now: int) -> None:
    """Assign the slots of the next extend; `changes` lists the queries admitted, preempted, resumed and rejected."""
    w = t.words
    w[tables.CHANGED : tables.CHANGED + 4] = 0
    _reject_late(t, now)
    if w[tables.RULES] == tables.TRINITY:
        _demote_missed(t, now)
    slots = w[tables.SLOTS]
    if w[tables.RULES] >= tables.FIFO:
        if w[tables.RULES] == tables.FIFO or _active(t) == 0:
            while _active(t) < slots and w[tables.QUEUED_DECODE]:
                _start(t, tables.DECODE)
        return
    pending = w[tables.QUEUED_DECODE] or w[tables.PAUSED_COUNT]
    if w[tables.ACTIVE_DECODE] or not pending or w[tables.DECODE_RAN_NS] < 0:
        w[tables.DECODE_RAN_NS] = now
    hold = held_until(t, now) > now
    aged = now - w[tables.DECODE_RAN_NS] >= w[tables.AGING_NS]
    if aged and _active(t) < slots and _can_start(t, tables.DECODE, hold):
        t.entries[_start(t, tables.DECODE), tables.PAUSES] = w[tables.MAX_PAUSES]
    yields = _prefill_yields(t, now)
    quota, credit = math.ceil(t.floats[tables.RESERVE] * slots), t.floats[tables.CREDIT] > 0.0
    keeps = w[tables.KEEP_RESERVE] and w[tables.RULES] == tables.TRINITY and not yields
    present = w[tables.QUEUED_PREFILL] + w[tables.ACTIVE_PREFILL]
    size = min(present, slots)
    cheap = tables.extend_ns(t, size) * slots <= _BURST_COST * tables.extend_ns(t, slots) * size
    w[tables.BURST] = not yields and credit and cheap and (present > quota or (w[tables.BURST] and present > 0))
    decode_slots = max(slots - quota, 1) if keeps and present else slots
    if credit:
        quota = slots
    while not yields and _can_start(t, tables.PREFILL, hold) and w[tables.ACTIVE_PREFILL] < quota:
        if _active(t) >= slots:
            urgent = credit or t.entries[t.queues[tables.PREFILL, 0], tables.START_BY] <= now
            if not urgent or not _pause_one(t):
                break
        _start(t, tables.PREFILL)
    if w[tables.BURST] and w[tables.ACTIVE_PREFILL]:
        while _pause_one(t):
            pass
    else:
        while _has_decode_slot(t, decode_slots) and _can_start(t, tables.DECODE, hold):
            _start(t, tables.DECODE)
    while _active(t) < slots and _can_start(t, tables.PREFILL, hold):
        _start(t, tables.PREFILL)
    if w[tables.RULES] == tables.TRINITY and (yields or not w[tables.QUEUED_PREFILL]) and not hold:
        _preempt_longer(t, decode_slots)


@compiled
def _prefill_yields(t: Any, now: int) -> Any:
    """Return whether prefill leaves the slots to decode queries: its first query has not waited for τ_pre yet and its
    caller's deadline is further away than τ_pre; or all of its queries are missed."""
    w = t.words
    if not w[tables.QUEUED_PREFILL] or not (w[tables.QUEUED_DECODE] or w[tables.PAUSED_COUNT]):
        return False
    first, flush = t.entries[t.queues[tables.PREFILL, 0]], w[tables.FLUSH_PREFILL_NS]
    missed = first[tables.START_BY] == first[tables.ARRIVAL] + _MISSED_DELAY * w[tables.MISSED_NS] > now
    return missed or now < min(first[tables.ARRIVAL] + flush, first[tables.DEADLINE] - flush)


@compiled
def _demote_missed(t: Any, now: int) -> None:
    """Move prefill queries whose requests miss their TTFT behind those that can still meet it."""
    w = t.words
    while w[tables.QUEUED_PREFILL]:
        first = t.entries[t.queues[tables.PREFILL, 0]]
        demoted = first[tables.ARRIVAL] + _MISSED_DELAY * w[tables.MISSED_NS]
        if first[tables.START_BY] == demoted or now - first[tables.ARRIVAL] < w[tables.MISSED_NS]:
            return
        entry = tables.pop(t, tables.PREFILL)
        first[tables.START_BY] = demoted
        tables.push(t, tables.PREFILL, entry)


@compiled
def _preempt_longer(t: Any, decode_slots: int) -> None:
    """Preempt decode queries for much shorter ones with an earlier virtual deadline."""
    w = t.words
    while not _has_decode_slot(t, decode_slots) and _can_admit(t, tables.DECODE):
        longest, shorter = _longest_remaining(t), t.queues[tables.DECODE, 0]
        if longest < 0 or t.entries[longest, tables.START_BY] <= t.entries[shorter, tables.START_BY]:
            return
        left = t.entries[longest, tables.EXTENDS] + t.entries[longest, tables.BEGAN] - w[tables.TOTAL_EXTENDS]
        if left < 2 * t.entries[shorter, tables.EXTENDS]:
            return
        _pause_one(t)
        _start(t, tables.DECODE)


@compiled
def held_until(t: Any, now: int) -> Any:
    """Return until when waiting queries are held back; NEVER_NS if none waits, `now` or earlier if none is held."""
    w, until = t.words, tables.NEVER_NS
    waiting = w[tables.QUEUED_PREFILL] + w[tables.QUEUED_DECODE]
    if w[tables.RULES] >= tables.FIFO or waiting == 0 or waiting >= w[tables.SLOTS] - _active(t):
        return now if waiting else tables.NEVER_NS
    if w[tables.QUEUED_PREFILL]:
        first = t.queues[tables.PREFILL, 0]
        flush = min(w[tables.FLUSH_PREFILL_NS], w[tables.FLUSH_NS])
        until = min(t.entries[first, tables.ARRIVAL] + flush, t.entries[first, tables.START_BY])
    if w[tables.QUEUED_DECODE]:
        until = min(until, t.entries[t.queues[tables.DECODE, 0], tables.ARRIVAL] + w[tables.FLUSH_NS])
    return until


@compiled
def _active(t: Any) -> Any:
    return t.words[tables.ACTIVE_PREFILL] + t.words[tables.ACTIVE_DECODE]


@compiled
def _has_decode_slot(t: Any, decode_slots: int) -> Any:
    """Return whether a slot is free for a decode query, of which `decode_slots` may be active."""
    return _active(t) < t.words[tables.SLOTS] and t.words[tables.ACTIVE_DECODE] < decode_slots


@compiled
def _can_start(t: Any, stage: int, hold: bool) -> Any:
    if stage == tables.DECODE and t.words[tables.PAUSED_COUNT]:
        return True
    return not hold and _can_admit(t, stage)


@compiled
def _can_admit(t: Any, stage: int) -> Any:
    """Return whether a query of a stage waits and the engine has a slot for it."""
    w = t.words
    return w[tables.QUEUED + stage] > 0 and _active(t) + w[tables.PAUSED_COUNT] < w[tables.ENGINE_SLOTS]


@compiled
def _start(t: Any, stage: int) -> Any:
    """Activate the next query of a stage, a waiting or a paused one, and return it."""
    w, entry = t.words, -1
    if stage == tables.DECODE and w[tables.PAUSED_COUNT]:
        entry = t.lists[tables.PAUSED_LIST, 0]
        for i in range(1, w[tables.PAUSED_COUNT]):
            if tables.precedes(t.entries, t.lists[tables.PAUSED_LIST, i], entry):
                entry = t.lists[tables.PAUSED_LIST, i]
        room = _active(t) + w[tables.PAUSED_COUNT] < w[tables.ENGINE_SLOTS]
        if w[tables.QUEUED_DECODE] and room and tables.precedes(t.entries, t.queues[tables.DECODE, 0], entry):
            entry = -1
    if entry >= 0:
        tables.remove_from_list(t, tables.PAUSED_LIST, entry)
        tables.record_change(t, tables.RESUMED, entry)
    else:
        entry = tables.pop(t, stage)
        t.entries[entry, tables.BEGAN] = 0
        tables.record_change(t, tables.ADMITTED, entry)
    t.entries[entry, tables.BEGAN] += w[tables.TOTAL_EXTENDS]
    t.entries[entry, tables.STATE] = tables.ACTIVE
    tables.add_to_list(t, t.entries[entry, tables.STAGE], entry)
    return entry


@compiled
def _pause_one(t: Any) -> Any:
    """Pause the decode query that `_longest_remaining` finds. Return whether there was one."""
    found = _longest_remaining(t)
    if found < 0:
        return False
    tables.remove_from_list(t, tables.DECODE, found)
    t.entries[found, tables.BEGAN] -= t.words[tables.TOTAL_EXTENDS]  # while paused: minus its completed extends
    t.entries[found, tables.PAUSES] += 1
    t.entries[found, tables.STATE] = tables.PAUSED
    tables.add_to_list(t, tables.PAUSED_LIST, found)
    tables.record_change(t, tables.PREEMPTED, found)
    return True


@compiled
def _longest_remaining(t: Any) -> Any:
    """Return the active decode query with most extends left among those that may still be paused, or -1."""
    found, most = -1, -1
    for i in range(t.words[tables.ACTIVE_DECODE]):
        entry = t.lists[tables.DECODE, i]
        left = t.entries[entry, tables.EXTENDS] + t.entries[entry, tables.BEGAN]
        if t.entries[entry, tables.PAUSES] < t.words[tables.MAX_PAUSES] and (found < 0 or left > most):
            found, most = entry, left
    return found


@compiled
def _reject_late(t: Any, now: int) -> None:
    """Reject queries at the front that could not meet their deadlines even with a slot now."""
    for queue in range(2):
        while t.words[tables.QUEUED + queue]:
            front = t.queues[queue, 0]
            others = t.words[tables.ACTIVE_PREFILL]
            if queue == tables.DECODE:
                others = min(_active(t), t.words[tables.SLOTS] - 1)
            if t.entries[front, tables.DEADLINE] > now + int(
                t.entries[front, tables.EXTENDS] * tables.extend_ns(t, others + 1)
            ):
                break
            t.entries[tables.pop(t, queue), tables.STATE] = tables.FREE
            tables.record_change(t, tables.LATE, front)
