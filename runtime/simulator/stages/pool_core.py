"""The simulated pools' events, compiled: a query comes through the ring, joins a batch of extends, is answered.

Between its query and its answer a request's worker does nothing that a pool could see, so all of this happens without
Python; `run` returns for answers. A pool's batch advances all its queries together, and who is in it changes between
*runs* of extends only. While nothing changes, many extends are one event: a run is planned up to the next query's
last extend, and whoever comes earlier (`_poke`) ends it with the extend that is under way.

Who is active is production's policy's to say (`runtime.pool.policy`).
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import ipc
import runtime.pool
from ipc.memory.compiled import compiler_for
from ipc.memory.intrinsics import floats, words
from runtime.pool import policy
from runtime.pool import tables as at
from runtime.pool.tables import NEVER_NS, class_a, class_b, tables_at

compiled = compiler_for(*(Path(str(package.__file__)).parent for package in (ipc, runtime.pool)), Path(__file__).parent)

OK, OVERLOADED, LATE = range(3)
STATUSES = ("ok", "overloaded", "deadline_exceeded")
FIRST_IN_LINE_NS = 1 << 60  # how much earlier the stage seems to have come that goes before the other
_LOOK_NS = 100_000  # how often the policy is asked while someone waits and nobody comes or ends
_TABLES = len(at.Tables._fields)

# Words of all pools. Asks on their way to a pool and answers on their way back are rings, by time. DRAWN: how many of
# the drawn extends are used.
(NOW, FREE, COMING, CAME_FIRST, LEAVING, LEFT_FIRST, DRAWN, RING_NS, SEARCH_WIDTH, EXTENDS_LEAST, PLANS) = range(11)
WORDS = 11

# Of an ask. AT: when it is at the pool, or its answer at who asked. EXTENDS: 0 until they are drawn.
# WHO: the row of a decode worker, or -1.
(STATE, STAGE, GROUP, AT, DEADLINE, EXTENDS, TOP_M, ASKED, BEGUN, ENDED, POOL, ENTRY, STATUS, WHO) = range(14)
ASK_WORDS = 14
ON_ITS_WAY, INSIDE, LEAVES, FORGOTTEN = range(1, 5)

# Of a pool. END: of the run under way, of STEPS extends from BEGIN on, the first of which takes FIRST ns, the others
# EACH. WAKE: when what is held back is to be looked at again; WOKEN: the last such moment. BESIDE: the run began beside
# a model at work. PREFERRED: the stage that goes before the other (-1: none).
# PLANNED: when, in the order of all plans, END was set.
(
    END,
    STEPS,
    BEGIN,
    FIRST,
    EACH,
    TAKEN,
    RESTING,
    BUSY,
    MEMBER_STEPS,
    COUNTED,
    ADMITTED,
    JOINED,
    WAKE,
    WOKEN,
    WAITED,
    SERVED,
    QUERIES,
    BESIDE,
    GPU,
    WAKE_NS,
    PREFERRED,
    PLANNED,
) = range(22)
POOL_WORDS = 22
PACE, ROUND_S, QUERY_S = range(3)  # PACE: how many times as long an extend takes beside a model at work
MODEL_BUSY, DEBT_NS = range(2)  # words of a GPU
_ASK, _LAST_STEP, _ORDER = range(at.CALLER, at.CALLER + 3)  # the simulator's columns of a policy's entry


class State(NamedTuple):
    """The arrays of all pools, which `run` works on."""

    words: npt.NDArray[np.int64]  # [WORDS]
    asks: npt.NDArray[np.int64]  # [asks, ASK_WORDS]
    free: npt.NDArray[np.int64]  # [asks]: a stack
    coming: npt.NDArray[np.int64]  # [asks]: a ring
    leaving: npt.NDArray[np.int64]  # [asks]: a ring
    pools: npt.NDArray[np.int64]  # [pools, POOL_WORDS]
    costs: npt.NDArray[np.float64]  # [pools, 3]
    extend_s: npt.NDArray[np.float64]  # [most slots + 1]: an extend by active slots
    handles: npt.NDArray[np.int64]  # [pools · tables, 3]: of the policies' tables
    groups: npt.NDArray[np.int64]  # [groups, pools + 2]: whose turn it is, how many, and which pools
    drawn: npt.NDArray[np.int64]  # extends of the next queries, drawn beforehand
    waits: npt.NDArray[np.float64]  # [pools, buckets]: prefill queries' waits for a slot
    edges: npt.NDArray[np.float64]  # [buckets - 1], in s


@partial(compiled, returns_array=True)
def state_at(handle: Any) -> Any:
    """The arrays that `handle_of` described."""
    return State(
        words(handle[0, 0], handle[0, 1]),
        words(handle[1, 0], (handle[1, 1], handle[1, 2])),
        words(handle[2, 0], handle[2, 1]),
        words(handle[3, 0], handle[3, 1]),
        words(handle[4, 0], handle[4, 1]),
        words(handle[5, 0], (handle[5, 1], handle[5, 2])),
        floats(handle[6, 0], (handle[6, 1], handle[6, 2])),
        floats(handle[7, 0], handle[7, 1]),
        words(handle[8, 0], (handle[8, 1], handle[8, 2])),
        words(handle[9, 0], (handle[9, 1], handle[9, 2])),
        words(handle[10, 0], handle[10, 1]),
        floats(handle[11, 0], (handle[11, 1], handle[11, 2])),
        floats(handle[12, 0], handle[12, 1]),
    )


@compiled
def ask(handle: Any, stage: int, group: int, at_ns: int, deadline: int, extends: int, top_m: int, who: int) -> Any:
    """A query that is at the pool `at_ns`: its number, or -1 if there is no room."""
    s = state_at(handle)
    w = s.words
    if w[FREE] == 0:
        return -1
    w[FREE] -= 1
    number = s.free[w[FREE]]
    one = s.asks[number]
    one[STATE], one[STAGE], one[GROUP], one[AT], one[DEADLINE] = ON_ITS_WAY, stage, group, at_ns, deadline
    one[EXTENDS], one[TOP_M], one[BEGUN], one[WHO] = extends, top_m, 0, who
    place = w[CAME_FIRST] + w[COMING]
    while place > w[CAME_FIRST] and s.asks[s.coming[(place - 1) % len(s.coming)], AT] > at_ns:
        s.coming[place % len(s.coming)] = s.coming[(place - 1) % len(s.coming)]
        place -= 1
    s.coming[place % len(s.coming)] = number
    w[COMING] += 1
    return number


@compiled
def forget(handle: Any, number: int) -> None:
    """No answer is wanted any more. A query that has a slot is let go on, as its end is near."""
    s = state_at(handle)
    one = s.asks[number]
    if one[STATE] == INSIDE and not one[BEGUN]:
        t = _tables(s, one[POOL])
        at.release(t, one[ENTRY])
        at.free_entry(t, one[ENTRY])
        s.pools[one[POOL], QUERIES] -= 1
        _free(s, number)
    else:
        one[STATE] = FORGOTTEN


@compiled
def run(handle: Any, until: int) -> Any:
    """Let everything happen up to a moment, or to an answer: (now, when the next thing happens, who is answered or -1,
    its status). What has been drawn may be used up: then `DRAWN` is all of it, and more are to be drawn."""
    s = state_at(handle)
    w = s.words
    while True:
        when = next_ns(s)
        if when > until or when == NEVER_NS or w[DRAWN] == len(s.drawn):
            return w[NOW], when, -1, OK
        w[NOW] = when
        if w[COMING] and s.asks[s.coming[w[CAME_FIRST]], AT] == when:
            number = s.coming[w[CAME_FIRST]]
            w[CAME_FIRST] = (w[CAME_FIRST] + 1) % len(s.coming)
            w[COMING] -= 1
            if s.asks[number, STATE] == FORGOTTEN:
                _free(s, number)
            else:
                _arrive(s, number)
        elif w[LEAVING] and s.asks[s.leaving[w[LEFT_FIRST]], AT] == when:
            number = s.leaving[w[LEFT_FIRST]]
            w[LEFT_FIRST] = (w[LEFT_FIRST] + 1) % len(s.leaving)
            w[LEAVING] -= 1
            wanted = s.asks[number, STATE] != FORGOTTEN
            _free(s, number)
            if wanted:
                return when, next_ns(s), number, s.asks[number, STATUS]
        else:
            p = _due(s, when)
            if s.pools[p, END] == when:
                _between(s, p)
            else:
                s.pools[p, WAKE] = NEVER_NS
                _poke(s, p)


@compiled
def next_ns(s: Any) -> Any:
    """When the next thing happens."""
    w, when = s.words, NEVER_NS
    if w[COMING]:
        when = s.asks[s.coming[w[CAME_FIRST]], AT]
    if w[LEAVING]:
        when = min(when, s.asks[s.leaving[w[LEFT_FIRST]], AT])
    for p in range(len(s.pools)):
        when = min(when, s.pools[p, END], s.pools[p, WAKE])
    return when


@compiled
def _due(s: Any, when: int) -> Any:
    """The pool to which something happens at that moment: of several the one for which it was planned first."""
    found = -1
    for p in range(len(s.pools)):
        pool = s.pools[p]
        if (pool[END] == when or pool[WAKE] == when) and (found < 0 or pool[PLANNED] < s.pools[found, PLANNED]):
            found = p
    return found


@compiled
def _end_at(s: Any, pool: Any, when: int) -> None:
    """The run under way ends then."""
    s.words[PLANS] += 1
    pool[END], pool[PLANNED] = when, s.words[PLANS]


@compiled
def _tables(s: Any, p: int) -> Any:
    return tables_at(s.handles[p * _TABLES : (p + 1) * _TABLES])


@compiled
def _free(s: Any, number: int) -> None:
    s.asks[number, STATE] = 0
    s.free[s.words[FREE]] = number
    s.words[FREE] += 1


@compiled
def _arrive(s: Any, number: int) -> None:
    """Through the ring: it joins the next extend, if the policy lets it."""
    w, one = s.words, s.asks[number]
    now = w[NOW]
    if not one[EXTENDS]:
        one[EXTENDS] = w[EXTENDS_LEAST] + s.drawn[w[DRAWN]]
        w[DRAWN] += 1
    group = s.groups[one[GROUP]]
    p = group[2 + group[0]]  # replicas in turn, as the search client does
    group[0] = (group[0] + 1) % group[1]
    pool, t = s.pools[p], _tables(s, p)
    one[STATE], one[POOL], one[ASKED] = INSIDE, p, now - w[RING_NS]
    entry = one[ENTRY] = at.new_entry(t)
    e = t.entries[entry]
    e[at.STAGE], e[at.ARRIVAL], e[at.DEADLINE], e[_ASK] = one[STAGE], now, one[DEADLINE], number
    if one[STAGE] == pool[PREFERRED]:
        e[at.ARRIVAL] -= FIRST_IN_LINE_NS
    e[at.CLASS_A], e[at.CLASS_B] = class_a(0, one[TOP_M]), class_b(w[SEARCH_WIDTH], 0)
    verdict = policy.add(t, entry, now)
    if verdict == policy.ACCEPTED:
        pool[QUERIES] += 1
        _poke(s, p)
    else:
        at.free_entry(t, entry)
        _answer(s, number, OVERLOADED if verdict == policy.OVERLOADED else LATE)


@compiled
def _answer(s: Any, number: int, status: int) -> None:
    w, one = s.words, s.asks[number]
    one[ENDED], one[STATUS], one[AT] = w[NOW], status, w[NOW] + w[RING_NS]
    if one[STATE] != FORGOTTEN:
        one[STATE] = LEAVES
    s.leaving[(w[LEFT_FIRST] + w[LEAVING]) % len(s.leaving)] = number
    w[LEAVING] += 1


# ---- a pool's batch


@compiled
def _poke(s: Any, p: int) -> None:
    """Something has changed: the policy is asked as soon as the extend under way ends."""
    pool, now = s.pools[p], s.words[NOW]
    if pool[RESTING]:
        pool[RESTING], pool[STEPS] = 0, 0
        _end_at(s, pool, now + pool[WAKE_NS])
    elif pool[STEPS] > 1:
        passed = now - pool[BEGIN] - pool[FIRST]
        steps = 1 if passed <= 0 else 1 - (-passed // pool[EACH])
        if steps < pool[STEPS]:
            pool[STEPS] = steps
            _end_at(s, pool, pool[BEGIN] + pool[FIRST] + (steps - 1) * pool[EACH])


@compiled
def _between(s: Any, p: int) -> None:
    """A run of extends is over: who is done is answered, the policy says who is active in the next."""
    pool, t, now = s.pools[p], _tables(s, p), s.words[NOW]
    steps, pool[STEPS] = pool[STEPS], 0
    if steps:
        _took(s, pool, t, steps)
    while True:
        entry = _done(pool, t)
        if entry < 0:
            break
        number = t.entries[entry, _ASK]
        policy.finish(t, entry, s.asks[number, EXTENDS])
        at.free_entry(t, entry)
        pool[SERVED] += 1
        pool[QUERIES] -= 1
        _answer(s, number, OK)
    policy.schedule(t, now)
    changed = t.words[at.CHANGED : at.CHANGED + 4]
    for i in range(changed[at.LATE]):
        entry = t.changes[at.LATE, i]
        at.free_entry(t, entry)
        pool[QUERIES] -= 1
        _answer(s, t.entries[entry, _ASK], LATE)
    for i in range(changed[at.PREEMPTED]):  # how many it has left, until it goes on
        t.entries[t.changes[at.PREEMPTED, i], _LAST_STEP] -= pool[TAKEN]
    for i in range(changed[at.RESUMED]):
        _join(pool, t, t.changes[at.RESUMED, i], t.entries[t.changes[at.RESUMED, i], _LAST_STEP])
    for i in range(changed[at.ADMITTED]):
        entry = t.changes[at.ADMITTED, i]
        _join(pool, t, entry, s.asks[t.entries[entry, _ASK], EXTENDS])
        _begun(s, pool, p, t.entries[entry, _ASK])
    _plan(s, pool, t, p)


@compiled
def _active(t: Any) -> Any:
    return t.words[at.ACTIVE_PREFILL] + t.words[at.ACTIVE_DECODE]


@compiled
def _took(s: Any, pool: Any, t: Any, steps: int) -> None:
    active = _active(t)
    pool[BUSY] += s.words[NOW] - pool[BEGIN]
    pool[MEMBER_STEPS] += steps * active
    pool[TAKEN] += steps
    policy.advance(t, t.words[at.ACTIVE_PREFILL], active, steps, steps * pool[EACH])
    if pool[BESIDE]:
        gpu = words(pool[GPU], 2)
        gpu[DEBT_NS] += steps * round(s.extend_s[active] * 1e9)


@compiled
def _done(pool: Any, t: Any) -> Any:
    """The query whose extends are over that joined first; -1 if there is none."""
    found = -1
    for stage in range(2):
        for i in range(t.words[at.LISTED + stage]):
            entry = t.lists[stage, i]
            sooner = found < 0 or t.entries[entry, _ORDER] < t.entries[found, _ORDER]
            if t.entries[entry, _LAST_STEP] <= pool[TAKEN] and sooner:
                found = entry
    return found


@compiled
def _join(pool: Any, t: Any, entry: int, steps: int) -> None:
    pool[JOINED] += 1
    t.entries[entry, _LAST_STEP], t.entries[entry, _ORDER] = pool[TAKEN] + steps, pool[JOINED]


@compiled
def _begun(s: Any, pool: Any, p: int, number: int) -> None:
    """A query has its slot."""
    one = s.asks[number]
    one[BEGUN] = s.words[NOW]
    wait = one[BEGUN] - one[ASKED]
    pool[ADMITTED] += 1
    pool[WAITED] += wait
    if one[STAGE] == at.PREFILL:
        bucket = 0
        while bucket < len(s.edges) and s.edges[bucket] < wait / 1e9:
            bucket += 1
        s.waits[p, bucket] += 1.0


@compiled
def _plan(s: Any, pool: Any, t: Any, p: int) -> None:
    """The next run: up to the next query's last extend, or until the policy is to be asked again."""
    now, active, cost = s.words[NOW], _active(t), s.costs[p]
    if active == 0:
        until = policy.held_until(t, now)
        if now < until < NEVER_NS and until != pool[WOKEN]:
            pool[WAKE] = pool[WOKEN] = until
        pool[RESTING], pool[END] = 1, NEVER_NS
        return
    pool[BESIDE] = 0
    pace = 1.0
    if cost[PACE] > 1.0 and words(pool[GPU], 2)[MODEL_BUSY]:
        pool[BESIDE], pace = 1, cost[PACE]
    pool[EACH] = max(round((s.extend_s[active] * pace + cost[ROUND_S]) * 1e9), 1)
    steps = NEVER_NS if pool[QUERIES] <= active else -(-_LOOK_NS // pool[EACH])
    for stage in range(2):
        for i in range(t.words[at.LISTED + stage]):
            steps = min(steps, t.entries[t.lists[stage, i], _LAST_STEP] - pool[TAKEN])
    pool[BEGIN], pool[STEPS] = now, steps
    pool[FIRST] = pool[EACH] + round(pool[ADMITTED] * cost[QUERY_S] * 1e9)
    pool[ADMITTED] = 0
    _end_at(s, pool, now + pool[FIRST] + (steps - 1) * pool[EACH])
