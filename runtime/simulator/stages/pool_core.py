"""Compiled events of the simulated pools: a query arrives through the ring, joins a batch of extends, is answered.

Between a query and its answer a pool does not depend on the workers, so these events run without Python; `run` returns
for answers. A pool's batch advances all its queries together, and its members change only between *runs* of extends.
While nothing changes, many extends are one event: a run is planned up to the next query's last extend, and an earlier
arrival (`_interrupt`) ends it with the extend in progress.

Production's policy (`runtime.pool.policy`) selects the active queries.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import ipc
import runtime.pool
from ipc.native.compiled import compiler_for
from ipc.native.intrinsics import floats, words
from ipc.native.records import Array, Record, array_at, record
from runtime.pool import policy, tables
from runtime.pool.tables import NEVER_NS, PREFILL, Tables, active_count, tables_at

compiled = compiler_for(*(Path(str(package.__file__)).parent for package in (ipc, runtime.pool)), Path(__file__).parent)

OK, OVERLOADED, LATE = range(3)
STATUSES = ("ok", "overloaded", "deadline_exceeded")
PRIORITY_NS = 1 << 60  # subtracted from the arrival of the stage with strict priority
_POLICY_INTERVAL_NS = 100_000  # interval of policy calls while queries wait and none arrives or ends

# Words shared by all pools. Queries in transit to a pool (ARRIVING) and answers in transit back (ANSWERS) are rings
# ordered by time. DRAWN: number of drawn extends that are used.
(NOW, FREE, ARRIVING, ARRIVING_HEAD, ANSWERS, ANSWERS_HEAD, DRAWN, RING_NS, SEARCH_WIDTH, MIN_EXTENDS, PLANS) = range(
    11
)
WORDS = 11

# Words of a query. AT: when it reaches the pool, or its answer the caller. EXTENDS: 0 until drawn.
# CALLER: the row of a decode worker, or -1.
(STATE, STAGE, GROUP, AT, DEADLINE, EXTENDS, TOP_M, ENQUEUED, BEGUN, ENDED, POOL, ENTRY, STATUS, CALLER) = range(14)
QUERY_WORDS = 14
SENT, IN_POOL, ANSWERED, CANCELLED = range(1, 5)

# Words of a pool. END: end of the current run, of STEPS extends from BEGIN on, the first of which takes FIRST ns, the
# others EACH. WAKE: next policy call for queries held back by the flush timeout; WOKEN: the last such time. SHARED: the
# run began while the model was busy. PREFERRED: the stage with strict priority (-1: none). PLANNED: sequence number of
# the plan that set END.
(
    END,
    STEPS,
    BEGIN,
    FIRST,
    EACH,
    TAKEN,
    IDLE,
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
    SHARED,
    GPU,
    WAKE_NS,
    PREFERRED,
    PLANNED,
) = range(22)
POOL_WORDS = 22
SLOWDOWN, ROUND_S, QUERY_S = range(3)  # SLOWDOWN: factor of an extend while the model is busy
MODEL_BUSY, DEBT_NS = range(2)  # words of a GPU


@record
class Member(Record):
    """What the simulator knows of a policy's entry of the same number."""

    query: int
    last_step: int  # of the pool's extends; while paused: how many are left
    order: int  # of joining the batch


_members_at = array_at(Member)


class State(NamedTuple):
    """The arrays of all pools."""

    words: npt.NDArray[np.int64]  # [WORDS]
    queries: npt.NDArray[np.int64]  # [queries, QUERY_WORDS]
    free: npt.NDArray[np.int64]  # [queries]: a stack
    arriving: npt.NDArray[np.int64]  # [queries]: a ring
    answers: npt.NDArray[np.int64]  # [queries]: a ring
    pools: npt.NDArray[np.int64]  # [pools, POOL_WORDS]
    costs: npt.NDArray[np.float64]  # [pools, 3]
    extend_s: npt.NDArray[np.float64]  # [max slots + 1]: time of an extend by active slots
    policies: npt.NDArray[np.int64]  # [pools, 2]: addresses of a policy's tables and of their members
    groups: npt.NDArray[np.int64]  # [groups, pools + 2]: next pool, number of pools, pools
    drawn: npt.NDArray[np.int64]  # extra extends of the next queries, drawn in advance
    waits: npt.NDArray[np.float64]  # [pools, buckets]: prefill queries' waits for a slot
    edges: npt.NDArray[np.float64]  # [buckets - 1], in s


def handle_of(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Return addresses and shapes of arrays, int64 [arrays, 3]: one argument costs less to pass than all of them.

    The arrays must outlive it.
    """
    return np.array([(array.ctypes.data, *array.shape, 1)[:3] for array in arrays], np.int64)


@partial(compiled, returns_array=True)
def state_at(handle: Any) -> Any:
    """Return the arrays that `handle_of` described."""
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
def submit(handle: Any, stage: int, group: int, at_ns: int, deadline: int, extends: int, top_m: int, who: int) -> Any:
    """Add a query that reaches its pool at `at_ns`. Return its number, or -1 without capacity."""
    s = state_at(handle)
    w = s.words
    if w[FREE] == 0:
        return -1
    w[FREE] -= 1
    number = s.free[w[FREE]]
    one = s.queries[number]
    one[STATE], one[STAGE], one[GROUP], one[AT], one[DEADLINE] = SENT, stage, group, at_ns, deadline
    one[EXTENDS], one[TOP_M], one[BEGUN], one[CALLER] = extends, top_m, 0, who
    place = w[ARRIVING_HEAD] + w[ARRIVING]
    while place > w[ARRIVING_HEAD] and s.queries[s.arriving[(place - 1) % len(s.arriving)], AT] > at_ns:
        s.arriving[place % len(s.arriving)] = s.arriving[(place - 1) % len(s.arriving)]
        place -= 1
    s.arriving[place % len(s.arriving)] = number
    w[ARRIVING] += 1
    return number


@compiled
def cancel(handle: Any, number: int) -> None:
    """Cancel a query. One that has a slot continues, because it ends soon."""
    s = state_at(handle)
    one = s.queries[number]
    if one[STATE] == IN_POOL and not one[BEGUN]:
        t = _tables(s, one[POOL])
        tables.release(t, one[ENTRY])
        tables.free_entry(t, one[ENTRY])
        s.pools[one[POOL], QUERIES] -= 1
        _free(s, number)
    else:
        one[STATE] = CANCELLED


@compiled
def run(handle: Any, until: int) -> Any:
    """Process events up to `until` or the next answer. Return (now, time of the next event, answered query or -1,
    status). Returns early if all drawn extends are used (`DRAWN`): the caller must draw more."""
    s = state_at(handle)
    w = s.words
    while True:
        when = next_ns(s)
        if when > until or when == NEVER_NS or w[DRAWN] == len(s.drawn):
            return w[NOW], when, -1, OK
        w[NOW] = when
        if w[ARRIVING] and s.queries[s.arriving[w[ARRIVING_HEAD]], AT] == when:
            number = s.arriving[w[ARRIVING_HEAD]]
            w[ARRIVING_HEAD] = (w[ARRIVING_HEAD] + 1) % len(s.arriving)
            w[ARRIVING] -= 1
            if s.queries[number, STATE] == CANCELLED:
                _free(s, number)
            else:
                _arrive(s, number)
        elif w[ANSWERS] and s.queries[s.answers[w[ANSWERS_HEAD]], AT] == when:
            number = s.answers[w[ANSWERS_HEAD]]
            w[ANSWERS_HEAD] = (w[ANSWERS_HEAD] + 1) % len(s.answers)
            w[ANSWERS] -= 1
            awaited = s.queries[number, STATE] != CANCELLED
            _free(s, number)
            if awaited:
                return when, next_ns(s), number, s.queries[number, STATUS]
        else:
            p = _due(s, when)
            if s.pools[p, END] == when:
                _between_runs(s, p)
            else:
                s.pools[p, WAKE] = NEVER_NS
                _interrupt(s, p)


@compiled
def next_ns(s: Any) -> Any:
    """Return the time of the next event."""
    w, when = s.words, NEVER_NS
    if w[ARRIVING]:
        when = s.queries[s.arriving[w[ARRIVING_HEAD]], AT]
    if w[ANSWERS]:
        when = min(when, s.queries[s.answers[w[ANSWERS_HEAD]], AT])
    for p in range(len(s.pools)):
        when = min(when, s.pools[p, END], s.pools[p, WAKE])
    return when


@compiled
def _due(s: Any, when: int) -> Any:
    """Return the pool with an event at that time; of several the one whose event was planned first."""
    found = -1
    for p in range(len(s.pools)):
        pool = s.pools[p]
        if (pool[END] == when or pool[WAKE] == when) and (found < 0 or pool[PLANNED] < s.pools[found, PLANNED]):
            found = p
    return found


@compiled
def _end_at(s: Any, pool: Any, when: int) -> None:
    """Set the end of the current run."""
    s.words[PLANS] += 1
    pool[END], pool[PLANNED] = when, s.words[PLANS]


@compiled
def _tables(s: Any, p: int) -> Tables:
    return tables_at(s.policies[p, 0])


@compiled
def _members(s: Any, p: int) -> Array[Member]:
    return _members_at(s.policies[p, 1])


@compiled
def _free(s: Any, number: int) -> None:
    s.queries[number, STATE] = 0
    s.free[s.words[FREE]] = number
    s.words[FREE] += 1


@compiled
def _arrive(s: Any, number: int) -> None:
    """Process a query that leaves the ring: it joins the next extend if the policy admits it."""
    w, one = s.words, s.queries[number]
    now = w[NOW]
    if not one[EXTENDS]:
        one[EXTENDS] = w[MIN_EXTENDS] + s.drawn[w[DRAWN]]
        w[DRAWN] += 1
    group = s.groups[one[GROUP]]
    p = group[2 + group[0]]  # replicas round-robin, as the search client
    group[0] = (group[0] + 1) % group[1]
    pool, t = s.pools[p], _tables(s, p)
    one[STATE], one[POOL], one[ENQUEUED] = IN_POOL, p, now - w[RING_NS]
    one[ENTRY] = tables.new_entry(t)
    entry = t.entries[one[ENTRY]]
    entry.stage, entry.arrival_ns, entry.deadline_ns = one[STAGE], now, one[DEADLINE]
    if one[STAGE] == pool[PREFERRED]:
        entry.arrival_ns -= PRIORITY_NS
    entry.index = entry.scope = entry.patience = 0
    entry.top_m, entry.search_width = one[TOP_M], w[SEARCH_WIDTH]
    _members(s, p)[one[ENTRY]].query = number
    verdict = policy.add(t, one[ENTRY], now)
    if verdict == policy.ACCEPTED:
        pool[QUERIES] += 1
        _interrupt(s, p)
    else:
        tables.free_entry(t, one[ENTRY])
        _answer(s, number, OVERLOADED if verdict == policy.OVERLOADED else LATE)


@compiled
def _answer(s: Any, number: int, status: int) -> None:
    w, one = s.words, s.queries[number]
    one[ENDED], one[STATUS], one[AT] = w[NOW], status, w[NOW] + w[RING_NS]
    if one[STATE] != CANCELLED:
        one[STATE] = ANSWERED
    s.answers[(w[ANSWERS_HEAD] + w[ANSWERS]) % len(s.answers)] = number
    w[ANSWERS] += 1


# ---- a pool's batch


@compiled
def _interrupt(s: Any, p: int) -> None:
    """End the current run with the extend in progress, so that the policy is called."""
    pool, now = s.pools[p], s.words[NOW]
    if pool[IDLE]:
        pool[IDLE], pool[STEPS] = 0, 0
        _end_at(s, pool, now + pool[WAKE_NS])
    elif pool[STEPS] > 1:
        passed = now - pool[BEGIN] - pool[FIRST]
        steps = 1 if passed <= 0 else 1 - (-passed // pool[EACH])
        if steps < pool[STEPS]:
            pool[STEPS] = steps
            _end_at(s, pool, pool[BEGIN] + pool[FIRST] + (steps - 1) * pool[EACH])


@compiled
def _between_runs(s: Any, p: int) -> None:
    """End a run of extends: answer finished queries, and let the policy select the active ones of the next run."""
    pool, t, members, now = s.pools[p], _tables(s, p), _members(s, p), s.words[NOW]
    steps, pool[STEPS] = pool[STEPS], 0
    if steps:
        _finish_run(s, pool, t, steps)
    while True:
        entry = _next_finished(pool, t, members)
        if entry < 0:
            break
        number = members[entry].query
        policy.finish(t, entry, s.queries[number, EXTENDS])
        tables.free_entry(t, entry)
        pool[SERVED] += 1
        pool[QUERIES] -= 1
        _answer(s, number, OK)
    policy.schedule(t, now)
    for i in range(t.late.count):
        entry = t.late.numbers[i]
        tables.free_entry(t, entry)
        pool[QUERIES] -= 1
        _answer(s, members[entry].query, LATE)
    for i in range(t.preempted.count):  # keep the number of remaining extends until it resumes
        members[t.preempted.numbers[i]].last_step -= pool[TAKEN]
    for i in range(t.resumed.count):
        member = members[t.resumed.numbers[i]]
        _join(pool, member, member.last_step)
    for i in range(t.admitted.count):
        member = members[t.admitted.numbers[i]]
        _join(pool, member, s.queries[member.query, EXTENDS])
        _record_admission(s, pool, p, member.query)
    _plan_run(s, pool, t, p)


@compiled
def _finish_run(s: Any, pool: Any, t: Tables, steps: int) -> None:
    active = active_count(t)
    pool[BUSY] += s.words[NOW] - pool[BEGIN]
    pool[MEMBER_STEPS] += steps * active
    pool[TAKEN] += steps
    policy.advance(t, t.active[PREFILL].count, active, steps, steps * pool[EACH])
    if pool[SHARED]:
        gpu = words(pool[GPU], 2)
        gpu[DEBT_NS] += steps * round(s.extend_s[active] * 1e9)


@compiled
def _next_finished(pool: Any, t: Tables, members: Array[Member]) -> int:
    """Return the finished query that joined first; -1 without one."""
    found = -1
    for stage in range(2):
        for i in range(t.active[stage].count):
            entry = t.active[stage].numbers[i]
            sooner = found < 0 or members[entry].order < members[found].order
            if members[entry].last_step <= pool[TAKEN] and sooner:
                found = entry
    return found


@compiled
def _join(pool: Any, member: Member, steps: int) -> None:
    pool[JOINED] += 1
    member.last_step, member.order = pool[TAKEN] + steps, pool[JOINED]


@compiled
def _record_admission(s: Any, pool: Any, p: int, number: int) -> None:
    """Record the admission of a query to a slot."""
    one = s.queries[number]
    one[BEGUN] = s.words[NOW]
    wait = one[BEGUN] - one[ENQUEUED]
    pool[ADMITTED] += 1
    pool[WAITED] += wait
    if one[STAGE] == tables.PREFILL:
        bucket = 0
        while bucket < len(s.edges) and s.edges[bucket] < wait / 1e9:
            bucket += 1
        s.waits[p, bucket] += 1.0


@compiled
def _plan_run(s: Any, pool: Any, t: Tables, p: int) -> None:
    """Plan the next run: up to the next query's last extend, or the next policy call."""
    now, active, cost, members = s.words[NOW], active_count(t), s.costs[p], _members(s, p)
    if active == 0:
        until = policy.held_until(t, now)
        if now < until < NEVER_NS and until != pool[WOKEN]:
            pool[WAKE] = pool[WOKEN] = until
        pool[IDLE], pool[END] = 1, NEVER_NS
        return
    pool[SHARED] = 0
    slowdown = 1.0
    if cost[SLOWDOWN] > 1.0 and words(pool[GPU], 2)[MODEL_BUSY]:
        pool[SHARED], slowdown = 1, cost[SLOWDOWN]
    pool[EACH] = max(round((s.extend_s[active] * slowdown + cost[ROUND_S]) * 1e9), 1)
    steps = NEVER_NS if pool[QUERIES] <= active else -(-_POLICY_INTERVAL_NS // pool[EACH])
    for stage in range(2):
        for i in range(t.active[stage].count):
            steps = min(steps, members[t.active[stage].numbers[i]].last_step - pool[TAKEN])
    pool[BEGIN], pool[STEPS] = now, steps
    pool[FIRST] = pool[EACH] + round(pool[ADMITTED] * cost[QUERY_S] * 1e9)
    pool[ADMITTED] = 0
    _end_at(s, pool, now + pool[FIRST] + (steps - 1) * pool[EACH])
