"""Compiled events of the rows of simulated decode workers: steps, probes, waits for passages.

Between its first and last token a row interacts only with the pools, whose events are processed here too (`pool_core`),
so this needs no Python. `run` returns when Python is needed: for the answer to a prefill query, and between two runs of
a worker's steps if rows have ended, KV is being handed over, or KV blocks are counted (`decode`).
"""

from typing import Any

from ipc.native.records import record_at
from runtime.pool.tables import NEVER_NS
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import pool_core as pool
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.stages.pool_core import compiled

NO_EVENT, QUERY_ANSWERED, BETWEEN, OUT_OF_CAPACITY = range(4)  # reasons why `run` returns
TIMED_OUT = len(pool.STATUSES)
_share_at = record_at(pool.Share)


@compiled
def run(handle: Any, pools: int, until: int, until_planned: int) -> Any:
    """Process the events before the event at (`until`, `until_planned`), or until Python is needed.

    Return (reason, now, query and status | worker). `clock` then contains the time of the next event.
    """
    s, p = at.state_at(handle), pool.state_at(pools)
    slots = s.lists.shape[1]
    now = until
    while True:
        when, planned, ours = until, until_planned, False
        if s.words[at.EVENTS]:
            first = s.events[0]
            if first[at.WHEN] < when or (first[at.WHEN] == when and first[at.PLANNED] < planned):
                when, planned, ours = first[at.WHEN], first[at.PLANNED], True
        pools_next = pool.next_ns(p)
        if not _has_capacity(s, p, slots):
            s.clock[at.CLOCK_NEXT] = min(when, pools_next)
            return OUT_OF_CAPACITY, now, -1, 0
        if pools_next <= when and pools_next < NEVER_NS:
            now, _, number, status = pool.run(pools, when)
            if number >= 0:
                row = p.queries[number].caller
                if row < 0:
                    s.clock[at.CLOCK_NEXT] = now  # search for the next event again
                    return QUERY_ANSWERED, now, number, status
                _reply(s, row, status, now)
        elif ours:
            now = when
            kind, what, probe = at.pop(s)
            if kind == at.RUN_ENDS:
                if s.workers[what, at.END] == now and _between_runs(s, pools, what, now):
                    s.clock[at.CLOCK_NEXT] = now
                    return BETWEEN, now, what, 0
            elif kind == at.TIMEOUT:
                _end_timeouts(s, pools, what, now)
            elif s.rows[what, at.PROBE] == probe:
                d = s.rows[what, at.WORKER]
                _send(s, pools, what, batch.boundary_ns(s, d, now))
        else:
            first_ns = s.events[0, at.WHEN] if s.words[at.EVENTS] else NEVER_NS
            s.clock[at.CLOCK_NEXT] = min(first_ns, pools_next)
            return NO_EVENT, now, -1, 0


@compiled
def _has_capacity(s: Any, p: pool.State, slots: int) -> Any:
    """Return whether the arrays have capacity for the events, queries and random numbers of one event."""
    if s.words[at.EVENTS] + slots + 2 * len(s.workers) + 8 > len(s.events):
        return False
    if p.free_count <= slots or p.drawn_used == p.drawn_count:
        return False
    drawn = 0
    for d in range(len(s.workers)):
        drawn = max(drawn, s.workers[d, at.DRAWN])
    return drawn + slots <= s.drawn.shape[1]


# ---- between two runs


@compiled
def _between_runs(s: Any, pools: int, d: int, now: int) -> Any:
    """End a run: rows continue or end. Return whether Python must be called before the next run (`resume`)."""
    worker = s.workers[d]
    members = worker[at.LISTS + at.MEMBERS]
    steps = batch.end_run(s, d, now)
    worker[at.CONTEXT] += steps * members
    worker[at.TOKENS] += steps * members
    while True:
        row = batch.next_done(s, d)
        if row < 0:
            break
        record_steps(s, d, row, s.rows[row, at.ROW_STEPS])
        _advance_row(s, d, row, now)
    if worker[at.LISTS + at.ANSWERED]:
        _process_answers(s, d, now)
    if worker[at.CALLBACK] or worker[at.LISTS + at.FINISHED]:
        return True
    _join_pending(s, d)
    _begin_run(s, pools, d, now, s.words[at.MOST_STEPS])
    return False


@compiled
def record_steps(s: Any, d: int, row: int, steps: int) -> None:
    """Record the steps of a row that leaves the batch."""
    one = s.rows[row]
    one[at.GENERATED] += steps
    one[at.ROW_CONTEXT] += steps
    s.workers[d, at.CONTEXT] -= one[at.ROW_CONTEXT]


@compiled
def _advance_row(s: Any, d: int, row: int, now: int) -> None:
    """Continue a row after a token: it ends, probes, or takes more steps."""
    one, every = s.rows[row], s.words[at.PROBE_INTERVAL]
    if one[at.EXPIRED] or one[at.GENERATED] >= one[at.OUTPUT]:
        at.append(s, d, at.FINISHED, row)
    elif s.words[at.PROBES_ENABLED] and every and one[at.GENERATED] % every == 0:
        _probe(s, d, row, now)
    else:
        _join(s, d, row)


@compiled
def _join(s: Any, d: int, row: int) -> None:
    """Let a row join with the next step."""
    if s.rows[row, at.HAS_BLOCKS]:
        at.append(s, d, at.JOINING, row)
    else:  # it was preempted while it waited for its probe
        s.rows[row, at.PREEMPTED] = 1
        s.workers[d, at.PREEMPTED_ROWS] += 1


@compiled
def _join_pending(s: Any, d: int) -> None:
    worker, every = s.workers[d], s.words[at.PROBE_INTERVAL]
    for place in range(worker[at.LISTS + at.JOINING]):
        row = s.lists[5 * d + at.JOINING, place]
        one = s.rows[row]
        left = one[at.OUTPUT] - one[at.GENERATED]
        batch.join(s, d, row, min(left, every - one[at.GENERATED] % every) if every else left)
        worker[at.CONTEXT] += one[at.ROW_CONTEXT]
    worker[at.LISTS + at.JOINING] = 0


@compiled
def _begin_run(s: Any, pools: int, d: int, now: int, most: int) -> None:
    worker, extra_ns = s.workers[d], 0
    members = worker[at.LISTS + at.MEMBERS]
    if worker[at.GPU]:
        share = _share_at(worker[at.GPU])
        share.model_busy = members > 0
        extra_ns, share.debt_ns = share.debt_ns, 0
    if members:
        s.extra_s[d] += worker[at.LISTS + at.PROBING] * s.costs[at.EMBED_CORE]
    if s.extra_s[d]:
        extra_ns += round(s.extra_s[d] * 1e9)
        s.extra_s[d] = 0.0
    each_ns = step_ns(s, d, members)
    if s.words[at.PREFILLS]:
        each_ns, extra_ns = round(each_ns * s.costs[at.BUSY_FACTOR]), round(extra_ns * s.costs[at.BUSY_FACTOR])
    if worker[at.LISTS + at.PROBING]:
        _embed(s, pools, d, now, now + extra_ns + each_ns if members else 0)
    worker[at.APPENDED] = 0
    batch.begin_run(s, d, now, most, each_ns, extra_ns)


@compiled
def step_ns(s: Any, d: int, rows: int) -> Any:
    """Return `ServiceTimes.decode_s` for `rows` rows, with the contexts of the batch."""
    costs = s.costs
    return max(int(costs[at.STEP] + rows * costs[at.ROW] + s.workers[d, at.CONTEXT] * costs[at.CONTEXT_TOKEN]), 1)


# ---- probes


@compiled
def add_stall_time(s: Any, d: int, now: int) -> None:
    """Add the time of stalled rows up to now."""
    worker = s.workers[d]
    worker[at.STALL_NS] += worker[at.STALLED] * (now - worker[at.COUNTED])
    worker[at.COUNTED] = now


@compiled
def _probe(s: Any, d: int, row: int, now: int) -> None:
    worker, one = s.workers[d], s.rows[row]
    add_stall_time(s, d, now)
    worker[at.STALLED] += 1
    worker[at.PROBES] += 1
    s.words[at.PROBES_STARTED] += 1
    one[at.PROBE], one[at.QUERY], one[at.DEADLINE] = s.words[at.PROBES_STARTED], -1, now + s.words[at.TIMEOUT_NS]
    one[at.DUE_BEFORE], one[at.DUE_AFTER] = worker[at.DUE_LAST], -1
    if worker[at.DUE_LAST] >= 0:
        s.rows[worker[at.DUE_LAST], at.DUE_AFTER] = row
    else:
        worker[at.DUE_FIRST] = row
    worker[at.DUE_LAST] = row
    if not worker[at.TIMEOUT_PLANNED]:
        worker[at.TIMEOUT_PLANNED] = 1
        at.plan(s, one[at.DEADLINE], at.TIMEOUT, d, 0)
    at.append(s, d, at.PROBING, row)


@compiled
def _embed(s: Any, pools: int, d: int, now: int, boundary: int) -> None:
    """Plan the probes' queries: after the step that begins now, or when the vector is ready, whichever is later."""
    worker = s.workers[d]
    for place in range(worker[at.LISTS + at.PROBING]):
        row = s.lists[5 * d + at.PROBING, place]
        worker[at.EMBEDDED] = max(worker[at.EMBEDDED], now) + s.words[at.EMBED_NS]
        if worker[at.EMBEDDED] <= boundary:
            _send(s, pools, row, boundary)
        else:
            at.plan(s, worker[at.EMBEDDED], at.VECTOR, row, s.rows[row, at.PROBE])
    worker[at.LISTS + at.PROBING] = 0


@compiled
def _send(s: Any, pools: int, row: int, when: int) -> None:
    one = s.rows[row]
    group = s.workers[one[at.WORKER], at.GROUP]
    when += s.words[at.WAIT_NS] + pool.state_at(pools).ring_ns
    one[at.QUERY] = pool.submit(pools, 1, group, when, one[at.DEADLINE], 0, s.words[at.TOP_M], row)
    s.clock[at.CLOCK_NEXT] = min(s.clock[at.CLOCK_NEXT], when)


@compiled
def _reply(s: Any, row: int, status: int, now: int) -> None:
    """End a row's probe; the worker's loop sees it between two steps."""
    one = s.rows[row]
    d = one[at.WORKER]
    worker = s.workers[d]
    one[at.PROBE], one[at.STATUS] = 0, status
    if one[at.DUE_BEFORE] >= 0:
        s.rows[one[at.DUE_BEFORE], at.DUE_AFTER] = one[at.DUE_AFTER]
    else:
        worker[at.DUE_FIRST] = one[at.DUE_AFTER]
    if one[at.DUE_AFTER] >= 0:
        s.rows[one[at.DUE_AFTER], at.DUE_BEFORE] = one[at.DUE_BEFORE]
    else:
        worker[at.DUE_LAST] = one[at.DUE_BEFORE]
    at.append(s, d, at.ANSWERED, row)
    batch.interrupt(s, d, now)


@compiled
def _end_timeouts(s: Any, pools: int, d: int, now: int) -> None:
    """End the probes that have timed out."""
    worker = s.workers[d]
    worker[at.TIMEOUT_PLANNED] = 0
    while worker[at.DUE_FIRST] >= 0:
        row = worker[at.DUE_FIRST]
        one = s.rows[row]
        if one[at.DEADLINE] > now:
            worker[at.TIMEOUT_PLANNED] = 1
            at.plan(s, one[at.DEADLINE], at.TIMEOUT, d, 0)
            return
        if one[at.QUERY] >= 0:
            pool.cancel(pools, one[at.QUERY])
        _reply(s, row, TIMED_OUT, now)


@compiled
def _process_answers(s: Any, d: int, now: int) -> None:
    """Continue the rows whose probes have ended."""
    worker = s.workers[d]
    add_stall_time(s, d, now)
    for place in range(worker[at.LISTS + at.ANSWERED]):
        row = s.lists[5 * d + at.ANSWERED, place]
        one = s.rows[row]
        worker[at.STALLED] -= 1
        one[at.STALL] += now - one[at.DEADLINE] + s.words[at.TIMEOUT_NS]
        s.extra_s[d] += s.costs[at.PROBE_COST]
        if one[at.STATUS] == pool.OK:
            found = s.drawn[d, worker[at.DRAWN]] < s.costs[at.HIT]
            worker[at.DRAWN] += 1
            if found:
                _append(s, d, row)
        if one[at.EXPIRED]:
            at.append(s, d, at.FINISHED, row)
        else:
            _join(s, d, row)
    worker[at.LISTS + at.ANSWERED] = 0


@compiled
def _append(s: Any, d: int, row: int) -> None:
    """Append new passages: a chunk computed with the row's next step (`ServiceTimes.prefill_s`)."""
    one, tokens, costs = s.rows[row], s.words[at.PROBE_TOKENS], s.costs
    if one[at.ROW_CONTEXT] + tokens + one[at.OUTPUT] - one[at.GENERATED] > s.workers[d, at.MOST_TOKENS]:
        return
    each = costs[at.CHUNK_TOKEN] + costs[at.CHUNK_PAIR] * (one[at.ROW_CONTEXT] + tokens / 2)
    s.extra_s[d] += tokens * (each + costs[at.CHUNK_BEHIND] if one[at.ROW_CONTEXT] else each)
    one[at.ROW_CONTEXT] += tokens
    s.workers[d, at.APPENDED] += tokens


# ---- functions called from Python


@compiled
def add_row(handle: Any, d: int, prompt: int, output: int, expired: bool, holds: bool, now: int) -> Any:
    """Add a row for a prompt that has its KV and first token. Return the row, or -1 if it has ended already."""
    s = at.state_at(handle)
    s.workers[d, at.TOKENS] += 1
    if expired or output <= 1:
        return -1
    s.words[at.FREE_ROWS] -= 1
    row = s.free[s.words[at.FREE_ROWS]]
    one = s.rows[row]
    one[:] = 0
    one[at.WORKER], one[at.ENDS], one[at.QUERY], one[at.HAS_BLOCKS] = d, -1, -1, holds
    one[at.GENERATED], one[at.OUTPUT], one[at.ROW_CONTEXT] = 1, output, prompt
    _advance_row(s, d, row, now)
    return row


@compiled
def free(handle: Any, row: int) -> None:
    """Free a row that has ended."""
    s = at.state_at(handle)
    s.free[s.words[at.FREE_ROWS]] = row
    s.words[at.FREE_ROWS] += 1


@compiled
def resume(handle: Any, pools: int, d: int, now: int, most: int) -> None:
    """Start the next run after Python's callback."""
    s = at.state_at(handle)
    _join_pending(s, d)
    _begin_run(s, pools, d, now, most)


@compiled
def join_pending(handle: Any, d: int) -> None:
    """Let pending rows join the batch."""
    _join_pending(at.state_at(handle), d)


@compiled
def preempt(handle: Any, row: int) -> None:
    """Remove a row's KV blocks; it leaves the batch until it has blocks again."""
    s = at.state_at(handle)
    one = s.rows[row]
    d = one[at.WORKER]
    one[at.HAS_BLOCKS] = 0
    if one[at.ENDS] >= 0:
        record_steps(s, d, row, batch.remove(s, d, row))
        one[at.PREEMPTED] = 1
        s.workers[d, at.PREEMPTED_ROWS] += 1


@compiled
def restore(handle: Any, row: int, over: bool) -> None:
    """Return blocks to a preempted row; it joins the batch unless it has ended."""
    s = at.state_at(handle)
    one = s.rows[row]
    d = one[at.WORKER]
    one[at.PREEMPTED], one[at.HAS_BLOCKS] = 0, 1
    s.workers[d, at.PREEMPTED_ROWS] -= 1
    if not over:
        at.append(s, d, at.JOINING, row)


@compiled
def interrupt(handle: Any, d: int, now: int) -> None:
    """See `step_batch.interrupt`."""
    batch.interrupt(at.state_at(handle), d, now)


@compiled
def boundary_ns(handle: Any, d: int, now: int) -> Any:
    """See `step_batch.boundary_ns`."""
    return batch.boundary_ns(at.state_at(handle), d, now)


@compiled
def next_step_ns(handle: Any, d: int, rows: int) -> Any:
    """Return `step_ns`."""
    return step_ns(at.state_at(handle), d, rows)


@compiled
def update_stall_time(handle: Any, d: int, now: int) -> None:
    """See `add_stall_time`."""
    add_stall_time(at.state_at(handle), d, now)
