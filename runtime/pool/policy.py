"""The pool's policy: which queries are active in the next extend. docs/scheduler.md has the rules and their reasons.

Compiled functions over `Tables`, which production's loop, the simulator and the tests call. No clock, no engine, no
ring: time is handed in. `schedule` goes through the rules in this order, for N slots:

- Late: what cannot make its caller's deadline any more is refused. Lost: a prefill query that has waited for so long
  that its request's TTFT is missed goes behind all others that come within `_LOST_TURN` times that.
- Hold: while fewer wait than slots are free, and none has waited for its flush timeout, none begins.
- Aging: decode queries of which none was active for `aging` have the next free slot. So one with `p` others before it
  is answered, whatever prefill does, no later than (p + 1)·(aging + the rest of one prefill query + the longest decode
  query + an extend) after it came, where a query's time is its extends with N active.
- Yield: until its first query has waited for τ_pre, and when that is lost, prefill has what decode leaves free.
- Reserve: from then on ⌈rN⌉ slots, all N while it has credit (what of r it left to decode before). Without a free one
  a decode query is paused: with credit at once, else for a query without slack.
- Burst: with credit, where fewer active slots waste little, no decode query is active beside prefill's.
- Turns: a decode query's turn is its arrival plus `_TURN` times what one of its size takes alone. Queries alike are
  first come, first served; shorter ones pass longer ones, and take their slots.

`paper` is without lost, credit, bursts and turns. `fifo` is one queue by arrival, `static` that in whole batches.
"""

import math
from typing import Any

from runtime.pool import tables as at
from runtime.pool.compiled import compiled

ACCEPTED, OVERLOADED, TOO_LATE = range(3)
_TURN = 6.0
_LOST_TURN = 64
_BURST_COST = 1.15  # how many times what it takes of a full batch a query may take of a smaller one


# ---- queries come and go


@compiled
def add(t: Any, entry: int, now: int) -> Any:
    """Let a query wait: ACCEPTED; or OVERLOADED or TOO_LATE, and it does not.

    Decode queries leave a quarter of the queue free, so that there is room for prefill queries however many come.
    """
    e, w = t.entries[entry], t.words
    decode = e[at.STAGE] == at.DECODE
    if w[at.QUEUED] + w[at.QUEUED + 1] >= w[at.QUEUE] or (decode and w[at.QUEUED + at.DECODE] >= w[at.DECODE_QUEUE]):
        return OVERLOADED
    if e[at.DEADLINE] <= now:
        return TOO_LATE
    e[at.KIND] = at.row_of_kind(t, e[at.KIND_A], e[at.KIND_B])
    e[at.EXTENDS] = max(1, round(t.means[e[at.KIND], 0]))
    e[at.PAUSES], e[at.STATE] = 0, at.WAITING
    e[at.SERIAL] = w[at.SERIALS] = w[at.SERIALS] + 1
    e[at.START_BY] = e[at.ARRIVAL]
    if not decode and w[at.RULES] < at.FIFO:
        due = min(e[at.DEADLINE], e[at.ARRIVAL] + w[at.TARGET_NS])
        e[at.START_BY] = due - int(e[at.EXTENDS] * at.extend_ns(t, w[at.SLOTS]))
    if decode and w[at.RULES] == at.TRINITY:
        e[at.START_BY] = _turn(t, e)
    at.push(t, at.queue_of(t, entry), entry)
    return ACCEPTED


@compiled
def _turn(t: Any, e: Any) -> Any:
    """When a decode query's turn is: of two whose expected extends have as many bits, never the later one's first."""
    bits = 0
    while e[at.EXTENDS] >> bits:
        bits += 1
    turn = e[at.ARRIVAL] + int(_TURN * (1 << bits) * at.extend_ns(t, 1))
    turn = t.words[at.LAST_TURN + bits] = max(turn, t.words[at.LAST_TURN + bits])
    return turn


@compiled
def finished(t: Any, entry: int, extends: int) -> None:
    """A query is answered, after so many extends, and has left its slot."""
    at.learn_extends(t, t.entries[entry, at.KIND], extends)
    at.leave(t, entry)


@compiled
def advanced(t: Any, prefill: int, active: int, extends: int, took_ns: int) -> None:
    """So many extends of `active` queries, `prefill` of them prefill's, took so long in all, the loop included."""
    w, f = t.words, t.floats
    w[at.DONE] += extends
    at.learn_cost(t, active, took_ns / extends)
    if w[at.RULES] == at.TRINITY and (prefill < active or w[at.QUEUED + at.DECODE] or w[at.LISTED + at.HELD_BACK]):
        earned = (f[at.RESERVE] - prefill / active) * took_ns
        f[at.CREDIT] = min(max(f[at.CREDIT] + earned, 0.0), float(w[at.AGING_NS]))


# ---- who is active next


@compiled
def schedule(t: Any, now: int) -> None:
    """Give out the slots of the next extend. Who is admitted, pausing, resumed or late stands in `changes`."""
    w = t.words
    w[at.CHANGED : at.CHANGED + 4] = 0
    _drop_late(t, now)
    if w[at.RULES] == at.TRINITY:
        _set_lost_back(t, now)
    slots = w[at.SLOTS]
    if w[at.RULES] >= at.FIFO:
        if w[at.RULES] == at.FIFO or _active(t) == 0:
            while _active(t) < slots and w[at.QUEUED + at.DECODE]:
                _start(t, at.DECODE)
        return
    if w[at.LISTED + at.DECODE] or not (w[at.QUEUED + at.DECODE] or w[at.LISTED + at.HELD_BACK]) or w[at.RAN_NS] < 0:
        w[at.RAN_NS] = now
    hold = held_until(t, now) > now
    if now - w[at.RAN_NS] >= w[at.AGING_NS] and _active(t) < slots and _may_start(t, at.DECODE, hold):
        t.entries[_start(t, at.DECODE), at.PAUSES] = w[at.MAX_PAUSES]
    yields = _yields(t, now)
    owed, credit = math.ceil(t.floats[at.RESERVE] * slots), t.floats[at.CREDIT] > 0.0
    there = w[at.QUEUED] + w[at.LISTED + at.PREFILL]
    alone = min(there, slots)
    cheap = at.extend_ns(t, alone) * slots <= _BURST_COST * at.extend_ns(t, slots) * alone
    w[at.BURST] = not yields and credit and cheap and (there > owed or (w[at.BURST] and there > 0))
    if credit:
        owed = slots
    while not yields and _may_start(t, at.PREFILL, hold) and w[at.LISTED + at.PREFILL] < owed:
        if _active(t) >= slots:
            pressed = credit or t.entries[t.queues[at.PREFILL, 0], at.START_BY] <= now
            if not pressed or not _pause_one(t):
                break
        _start(t, at.PREFILL)
    if w[at.BURST] and w[at.LISTED + at.PREFILL]:
        while _pause_one(t):
            pass
    else:
        while _active(t) < slots and _may_start(t, at.DECODE, hold):
            _start(t, at.DECODE)
    while _active(t) < slots and _may_start(t, at.PREFILL, hold):
        _start(t, at.PREFILL)
    if w[at.RULES] == at.TRINITY and (yields or not w[at.QUEUED]) and not hold:
        _let_shorter_run(t, slots)


@compiled
def _yields(t: Any, now: int) -> Any:
    """Whether prefill leaves the slots to decode queries that want them: its first one has not waited for τ_pre yet,
    and its caller's deadline is further away than that; or all of its are lost."""
    w = t.words
    if not w[at.QUEUED] or not (w[at.QUEUED + at.DECODE] or w[at.LISTED + at.HELD_BACK]):
        return False
    first, flush = t.entries[t.queues[at.PREFILL, 0]], w[at.FLUSH_PREFILL_NS]
    lost = first[at.START_BY] == first[at.ARRIVAL] + _LOST_TURN * w[at.LOST_NS] > now
    return lost or now < min(first[at.ARRIVAL] + flush, first[at.DEADLINE] - flush)


@compiled
def _set_lost_back(t: Any, now: int) -> None:
    """Prefill queries whose requests have missed their TTFT go behind those that can still make it."""
    w = t.words
    while w[at.QUEUED]:
        first = t.entries[t.queues[at.PREFILL, 0]]
        back = first[at.ARRIVAL] + _LOST_TURN * w[at.LOST_NS]
        if first[at.START_BY] == back or now - first[at.ARRIVAL] < w[at.LOST_NS]:
            return
        entry = at.take(t, at.PREFILL)
        first[at.START_BY] = back
        at.push(t, at.PREFILL, entry)


@compiled
def _let_shorter_run(t: Any, slots: int) -> None:
    """Decode queries give their slots to much shorter ones whose turn is before theirs."""
    w = t.words
    while _active(t) >= slots and _waits(t, at.DECODE):
        longest, shorter = _most_left(t), t.queues[at.DECODE, 0]
        if longest < 0 or t.entries[longest, at.START_BY] <= t.entries[shorter, at.START_BY]:
            return
        left = t.entries[longest, at.EXTENDS] + t.entries[longest, at.BEGAN] - w[at.DONE]
        if left < 2 * t.entries[shorter, at.EXTENDS]:
            return
        _pause_one(t)
        _start(t, at.DECODE)


@compiled
def held_until(t: Any, now: int) -> Any:
    """Until when what waits is held back, if that is later than `now`; NEVER_NS where nothing waits or is to wait."""
    w, until = t.words, at.NEVER_NS
    waiting = w[at.QUEUED] + w[at.QUEUED + 1]
    if w[at.RULES] >= at.FIFO or waiting == 0 or waiting >= w[at.SLOTS] - _active(t):
        return now if waiting else at.NEVER_NS
    if w[at.QUEUED]:
        first = t.queues[at.PREFILL, 0]
        flush = min(w[at.FLUSH_PREFILL_NS], w[at.FLUSH_NS])
        until = min(t.entries[first, at.ARRIVAL] + flush, t.entries[first, at.START_BY])
    if w[at.QUEUED + at.DECODE]:
        until = min(until, t.entries[t.queues[at.DECODE, 0], at.ARRIVAL] + w[at.FLUSH_NS])
    return until


@compiled
def _active(t: Any) -> Any:
    return t.words[at.LISTED + at.PREFILL] + t.words[at.LISTED + at.DECODE]


@compiled
def _may_start(t: Any, stage: int, hold: bool) -> Any:
    if stage == at.DECODE and t.words[at.LISTED + at.HELD_BACK]:
        return True
    return not hold and _waits(t, stage)


@compiled
def _waits(t: Any, stage: int) -> Any:
    """Whether a query of a stage waits that the engine has a slot for."""
    w = t.words
    return w[at.QUEUED + stage] > 0 and _active(t) + w[at.LISTED + at.HELD_BACK] < w[at.ENGINE_SLOTS]


@compiled
def _start(t: Any, stage: int) -> Any:
    """The next query of a stage becomes active: one that waits, or a paused one whose turn is before."""
    w, entry = t.words, -1
    if stage == at.DECODE and w[at.LISTED + at.HELD_BACK]:
        entry = t.lists[at.HELD_BACK, 0]
        for i in range(1, w[at.LISTED + at.HELD_BACK]):
            if at.before(t.entries, t.lists[at.HELD_BACK, i], entry):
                entry = t.lists[at.HELD_BACK, i]
        room = _active(t) + w[at.LISTED + at.HELD_BACK] < w[at.ENGINE_SLOTS]
        if w[at.QUEUED + at.DECODE] and room and at.before(t.entries, t.queues[at.DECODE, 0], entry):
            entry = -1
    if entry >= 0:
        at.unlist(t, at.HELD_BACK, entry)
        at.note(t, at.RESUMED, entry)
    else:
        entry = at.take(t, stage)
        t.entries[entry, at.BEGAN] = 0
        at.note(t, at.ADMITTED, entry)
    t.entries[entry, at.BEGAN] += w[at.DONE]
    t.entries[entry, at.STATE] = at.ACTIVE
    at.list_in(t, t.entries[entry, at.STAGE], entry)
    return entry


@compiled
def _pause_one(t: Any) -> Any:
    """Pause the active decode query with most extends left, of those that still may be. Whether there was one."""
    found = _most_left(t)
    if found < 0:
        return False
    at.unlist(t, at.DECODE, found)
    t.entries[found, at.BEGAN] -= t.words[at.DONE]  # minus the extends that it has had, until it goes on
    t.entries[found, at.PAUSES] += 1
    t.entries[found, at.STATE] = at.PAUSED
    at.list_in(t, at.HELD_BACK, found)
    at.note(t, at.PAUSING, found)
    return True


@compiled
def _most_left(t: Any) -> Any:
    """The active decode query with most extends left, of those that still may be paused; -1 if there is none."""
    found, most = -1, -1
    for i in range(t.words[at.LISTED + at.DECODE]):
        entry = t.lists[at.DECODE, i]
        left = t.entries[entry, at.EXTENDS] + t.entries[entry, at.BEGAN]
        if t.entries[entry, at.PAUSES] < t.words[at.MAX_PAUSES] and (found < 0 or left > most):
            found, most = entry, left
    return found


@compiled
def _drop_late(t: Any, now: int) -> None:
    """Those at the front that cannot make their deadlines any more, had they a slot now."""
    for queue in range(2):
        while t.words[at.QUEUED + queue]:
            front = t.queues[queue, 0]
            beside = t.words[at.LISTED] if queue == at.PREFILL else min(_active(t), t.words[at.SLOTS] - 1)
            if t.entries[front, at.DEADLINE] > now + int(t.entries[front, at.EXTENDS] * at.extend_ns(t, beside + 1)):
                break
            t.entries[at.take(t, queue), at.STATE] = at.FREE
            at.note(t, at.LATE, front)
