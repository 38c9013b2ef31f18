"""Compiled events of the simulated pools: a query arrives through the ring, joins a batch of extends, is answered.

Between a query and its answer a pool does not depend on the workers, so these events run without Python. A pool's batch
advances all its queries together, and its members change only between *runs* of extends. While nothing changes, many
extends are one event: a run is planned up to the next query's last extend, and an earlier arrival (`_interrupt`) ends
it with the extend in progress.

Production's policy (`runtime.pool.policy`) selects the active queries.
"""

from runtime.pool import policy, queues
from runtime.pool.tables import NEVER_NS, PREFILL, active_count
from runtime.simulator.stages.pool_tables import Member, Pool, Query, State, state_at
from runtime.simulator.stages.schedule import ANSWER, EXTENDS_END, QUERY, compiled, plan

OK, OVERLOADED, LATE = range(3)
STATUSES = ("ok", "overloaded", "deadline_exceeded")
_POLICY_INTERVAL_NS = 100_000  # interval of policy calls while queries wait and none arrives or ends


@compiled
def submit(at: int, stage: int, group: int, at_ns: int, deadline: int, extends: int, top_m: int, caller: int) -> int:
    """Add a query that reaches its pool at `at_ns`. Return its number, or -1 without capacity."""
    s = state_at(at)
    if s.free_count == 0:
        return -1
    s.free_count -= 1
    number = s.free[s.free_count]
    query = s.queries[number]
    query.cancelled = query.waits = False
    query.stage, query.group, query.deadline_ns = stage, group, deadline
    query.extends, query.top_m, query.caller = extends, top_m, caller
    plan(s.schedule[0], at_ns, QUERY, number, 0)
    return number


@compiled
def cancel(at: int, number: int) -> None:
    """Cancel a query. One that has a slot continues, because it ends soon."""
    s = state_at(at)
    query = s.queries[number]
    if query.waits:
        pool = s.pools[query.pool]
        queues.release(pool.tables[0], query.entry)
        queues.free_entry(pool.tables[0], query.entry)
        pool.queries -= 1
        _free(s, number)
    else:
        query.cancelled = True


@compiled
def process(s: State, kind: int, subject: int, stamp: int) -> bool:
    """Process an event of the pools. Return whether it is an answer that somebody awaits."""
    if kind == EXTENDS_END:
        if s.pools[subject].planned == stamp:  # else another plan has replaced it
            _between_runs(s, s.pools[subject])
        return False
    awaited = not s.queries[subject].cancelled
    if kind == QUERY and awaited:
        _arrive(s, subject)
        return False
    _free(s, subject)
    return awaited


@compiled
def _end_at(s: State, pool: Pool, when: int) -> None:
    """Set the end of the current run."""
    schedule = s.schedule[0]
    pool.planned = schedule.planned + 1
    plan(schedule, when, EXTENDS_END, pool.number, pool.planned)


@compiled
def _free(s: State, number: int) -> None:
    s.free[s.free_count] = number
    s.free_count += 1


@compiled
def _arrive(s: State, number: int) -> None:
    """Process a query that leaves the ring: it joins the next extend if the policy admits it."""
    query, now = s.queries[number], s.schedule[0].now_ns
    if not query.extends:
        query.extends = s.min_extends + s.drawn[s.drawn_used]
        s.drawn_used += 1
    group = s.groups[query.group]
    query.pool = group.pools[group.next]  # replicas round-robin, as the search client
    group.next = (group.next + 1) % group.count
    pool = s.pools[query.pool]
    t = pool.tables[0]
    query.waits, query.enqueued_ns, query.entry = True, now - s.ring_ns, queues.new_entry(t)
    entry = t.entries[query.entry]
    entry.stage, entry.arrival_ns, entry.deadline_ns = query.stage, now, query.deadline_ns
    entry.scope = entry.patience = 0
    entry.top_m, entry.search_width = query.top_m, s.search_width
    pool.members[query.entry].query = number
    verdict = policy.add(t, query.entry, now)
    if verdict == policy.ACCEPTED:
        pool.queries += 1
        _interrupt(s, pool)
    else:
        queues.free_entry(t, query.entry)
        _answer(s, number, OVERLOADED if verdict == policy.OVERLOADED else LATE)


@compiled
def _answer(s: State, number: int, status: int) -> None:
    query, now = s.queries[number], s.schedule[0].now_ns
    query.ended_ns, query.status, query.waits = now, status, False
    plan(s.schedule[0], now + s.ring_ns, ANSWER, number, 0)


# ---- a pool's batch


@compiled
def _interrupt(s: State, pool: Pool) -> None:
    """End the current run with the extend in progress, so that the policy is called."""
    now = s.schedule[0].now_ns
    if pool.idle:
        pool.idle, pool.steps = False, 0
        _end_at(s, pool, now + pool.wake_ns)
    elif pool.steps > 1:
        passed = now - pool.begin_ns - pool.first_ns
        steps = 1 if passed <= 0 else 1 - (-passed // pool.each_ns)
        if steps < pool.steps:
            pool.steps = steps
            _end_at(s, pool, pool.begin_ns + pool.first_ns + (steps - 1) * pool.each_ns)


@compiled
def _between_runs(s: State, pool: Pool) -> None:
    """End a run of extends: answer finished queries, and let the policy select the active ones of the next run."""
    t, members = pool.tables[0], pool.members
    steps, pool.steps = pool.steps, 0
    if steps:
        _finish_run(s, pool, steps)
    while True:
        entry = _next_finished(pool)
        if entry < 0:
            break
        number = members[entry].query
        policy.finish(t, entry, s.queries[number].extends)
        queues.free_entry(t, entry)
        pool.served += 1
        pool.queries -= 1
        _answer(s, number, OK)
    policy.schedule(t, s.schedule[0].now_ns)
    for i in range(t.late.count):
        entry = t.late.numbers[i]
        queues.free_entry(t, entry)
        pool.queries -= 1
        _answer(s, members[entry].query, LATE)
    for i in range(t.preempted.count):  # keep the number of remaining extends until it resumes
        members[t.preempted.numbers[i]].last_step -= pool.taken
    for i in range(t.resumed.count):
        member = members[t.resumed.numbers[i]]
        _join(pool, member, member.last_step)
    for i in range(t.admitted.count):
        member = members[t.admitted.numbers[i]]
        _join(pool, member, s.queries[member.query].extends)
        _record_admission(s, pool, s.queries[member.query])
    _plan_run(s, pool)


@compiled
def _finish_run(s: State, pool: Pool, steps: int) -> None:
    t = pool.tables[0]
    active = active_count(t)
    pool.busy_ns += s.schedule[0].now_ns - pool.begin_ns
    pool.member_steps += steps * active
    pool.taken += steps
    policy.advance(t, t.active[PREFILL].count, active, steps, steps * pool.each_ns)
    if pool.shared:
        pool.gpu[0].debt_ns += steps * round(s.extend_s[active] * 1e9)


@compiled
def _next_finished(pool: Pool) -> int:
    """Return the finished query that joined first; -1 without one."""
    first, members, active = -1, pool.members, pool.tables[0].active
    for stage in range(2):
        for i in range(active[stage].count):
            entry = active[stage].numbers[i]
            sooner = first < 0 or members[entry].order < members[first].order
            if members[entry].last_step <= pool.taken and sooner:
                first = entry
    return first


@compiled
def _join(pool: Pool, member: Member, steps: int) -> None:
    pool.joined += 1
    member.last_step, member.order = pool.taken + steps, pool.joined


@compiled
def _record_admission(s: State, pool: Pool, query: Query) -> None:
    query.begun_ns, query.waits = s.schedule[0].now_ns, False
    wait = query.begun_ns - query.enqueued_ns
    pool.admitted += 1
    pool.waited_ns += wait
    if query.stage == PREFILL:
        bucket = 0
        while bucket < s.edge_count and s.edges[bucket] < wait / 1e9:
            bucket += 1
        pool.waits[bucket] += 1.0


@compiled
def _plan_run(s: State, pool: Pool) -> None:
    """Plan the next run: up to the next query's last extend, or the policy's next call while queries wait."""
    t, now = pool.tables[0], s.schedule[0].now_ns
    active = active_count(t)
    if active == 0:
        pool.idle = True
        return
    gpu = pool.gpu[0]
    pool.shared = gpu.slowdown > 1.0 and gpu.model_busy
    slowdown = gpu.slowdown if pool.shared else 1.0
    pool.each_ns = max(round((s.extend_s[active] * slowdown + pool.round_s) * 1e9), 1)
    steps = NEVER_NS if pool.queries <= active else -(-_POLICY_INTERVAL_NS // pool.each_ns)
    for stage in range(2):
        for i in range(t.active[stage].count):
            steps = min(steps, pool.members[t.active[stage].numbers[i]].last_step - pool.taken)
    pool.begin_ns, pool.steps = now, steps
    pool.first_ns = pool.each_ns + round(pool.admitted * pool.query_s * 1e9)
    pool.admitted = 0
    _end_at(s, pool, now + pool.first_ns + (steps - 1) * pool.each_ns)
