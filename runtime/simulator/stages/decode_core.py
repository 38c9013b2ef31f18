"""Compiled events of the rows of simulated decode workers: steps, probes, waits for passages.

Between its first and last token a row interacts only with the pools, whose events are processed here too (`pool_core`),
so this needs no Python. `run` returns for Python's own calls, for the answer to a prefill query, and between two runs
of a worker's steps if rows have ended or KV is being handed over (`decode`).
"""

from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import pool_core as pool
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.stages.decode_tables import Row, State, Worker, state_at
from runtime.simulator.stages.pool_tables import State as PoolState
from runtime.simulator.stages.pool_tables import state_at as pool_state_at
from runtime.simulator.stages.schedule import (
    ANSWERED,
    BETWEEN_STEPS,
    CALL,
    CALLED,
    EXTENDS_END,
    NO_EVENT,
    OUT_OF_CAPACITY,
    STEPS_END,
    TIMEOUT,
    VECTOR,
    compiled,
    is_full,
    plan,
    pop,
)

TIMED_OUT = len(pool.STATUSES)


@compiled
def run(decodes: int, pools: int) -> tuple[int, int, int, int]:
    """Process events until Python is needed. `decodes` 0: there are no decode workers.

    Return (reason, now, subject, status): the subject is a call, a query or a worker.
    """
    s, p = state_at(decodes), pool_state_at(pools)
    schedule = p.schedule[0]
    while True:
        if not _has_capacity(decodes, p):
            return OUT_OF_CAPACITY, schedule.now_ns, -1, 0
        if schedule.count == 0:
            return NO_EVENT, schedule.now_ns, -1, 0
        kind, subject, stamp = pop(schedule)
        now = schedule.now_ns
        if kind == CALL:
            return CALLED, now, subject, 0
        if kind <= EXTENDS_END:
            if pool.process(p, kind, subject, stamp):
                query = p.queries[subject]
                if query.caller < 0:
                    return ANSWERED, now, subject, query.status
                _reply(decodes, query.caller, query.status)
        elif kind == STEPS_END:
            if s.workers[subject].end_ns == now and _between_runs(s, pools, s.workers[subject], now):
                return BETWEEN_STEPS, now, subject, 0
        elif s.rows[subject].probe != stamp:
            continue  # it has ended
        elif kind == TIMEOUT:
            _time_out(decodes, pools, subject)
        else:
            _send(s, pools, subject, batch.boundary_ns(decodes, s.rows[subject].worker))


@compiled
def _has_capacity(decodes: int, p: PoolState) -> bool:
    """Return whether the arrays have capacity for the events, queries and random numbers of one event."""
    if is_full(p.schedule[0]) or p.drawn_used == p.drawn_count:
        return False
    if decodes == 0:
        return True
    s = state_at(decodes)
    used = 0
    for d in range(s.worker_count):
        used = max(used, s.workers[d].drawn_used)
    return p.free_count > s.slots and used + s.slots <= s.drawn_count


# ---- between two runs


@compiled
def _between_runs(s: State, pools: int, worker: Worker, now: int) -> bool:
    """End a run: rows continue or end. Return whether Python must be called before the next run (`resume`)."""
    members = worker.members.count
    steps = batch.end_run(worker, now)
    worker.context += steps * members
    worker.tokens += steps * members
    while True:
        number = batch.next_done(s, worker)
        if number < 0:
            break
        _record_steps(worker, s.rows[number], s.rows[number].steps)
        _advance_row(s, worker, number, now)
    if worker.answered.count:
        _process_answers(s, worker, now)
    if worker.callback or worker.finished.count:
        return True
    _join_pending(s, worker)
    _begin_run(s, pools, worker, now, s.most_steps)
    return False


@compiled
def _record_steps(worker: Worker, row: Row, steps: int) -> None:
    """Record the steps of a row that leaves the batch."""
    row.generated += steps
    row.context += steps
    worker.context -= row.context


@compiled
def _advance_row(s: State, worker: Worker, number: int, now: int) -> None:
    """Continue a row after a token: it ends, probes, or takes more steps."""
    row, every = s.rows[number], s.probe_interval
    if row.expired or row.generated >= row.output:
        at.append(worker.finished, number)
    elif s.probes_enabled and every and row.generated % every == 0:
        _probe(s, worker, number, now)
    else:
        at.append(worker.joining, number)


@compiled
def _join_pending(s: State, worker: Worker) -> None:
    every = s.probe_interval
    for position in range(worker.joining.count):
        number = worker.joining.rows[position]
        row = s.rows[number]
        left = row.output - row.generated
        batch.join(s, worker, number, min(left, every - row.generated % every) if every else left)
        worker.context += row.context
    worker.joining.count = 0


@compiled
def _begin_run(s: State, pools: int, worker: Worker, now: int, most: int) -> None:
    extra_ns, members = 0, worker.members.count
    if worker.gpu:
        gpu = worker.gpu[0]
        gpu.model_busy = members > 0
        extra_ns, gpu.debt_ns = gpu.debt_ns, 0
    if worker.extra_s:
        extra_ns += round(worker.extra_s * 1e9)
        worker.extra_s = 0.0
    each_ns = _step_ns(s, worker, members)
    if worker.probing.count:
        _embed(s, pools, worker, now, now + extra_ns + each_ns if members else 0)
    worker.appended = 0
    batch.begin_run(s, worker, now, most, each_ns, extra_ns)


@compiled
def _step_ns(s: State, worker: Worker, rows: int) -> int:
    """Return `ServiceTimes.decode_s` for `rows` rows, with the contexts of the batch."""
    costs = s.costs
    return max(int(costs.step_ns + rows * costs.row_ns + worker.context * costs.context_token_ns), 1)


# ---- probes


@compiled
def _add_stall_time(worker: Worker, now: int) -> None:
    """Add the time of stalled rows up to now."""
    worker.stall_ns += worker.stalled * (now - worker.counted_ns)
    worker.counted_ns = now


@compiled
def _probe(s: State, worker: Worker, number: int, now: int) -> None:
    row = s.rows[number]
    _add_stall_time(worker, now)
    worker.stalled += 1
    worker.probes += 1
    s.probes_started += 1
    row.probe, row.query, row.deadline_ns = s.probes_started, -1, now + s.timeout_ns
    plan(s.schedule[0], row.deadline_ns, TIMEOUT, number, row.probe)
    at.append(worker.probing, number)


@compiled
def _embed(s: State, pools: int, worker: Worker, now: int, boundary: int) -> None:
    """Plan the probes' queries: after the step that begins now, or when the vector is ready, whichever is later."""
    for position in range(worker.probing.count):
        number = worker.probing.rows[position]
        worker.embedded_ns = max(worker.embedded_ns, now) + s.embed_ns
        if worker.embedded_ns <= boundary:
            _send(s, pools, number, boundary)
        else:
            plan(s.schedule[0], worker.embedded_ns, VECTOR, number, s.rows[number].probe)
    worker.probing.count = 0


@compiled
def _send(s: State, pools: int, number: int, when: int) -> None:
    row = s.rows[number]
    when += pool_state_at(pools).ring_ns
    row.query = pool.submit(pools, 1, s.workers[row.worker].group, when, row.deadline_ns, 0, s.top_m, number)


@compiled
def _reply(decodes: int, number: int, status: int) -> None:
    """End a row's probe; the worker's loop sees it between two steps."""
    s = state_at(decodes)
    row = s.rows[number]
    row.probe, row.status = 0, status
    at.append(s.workers[row.worker].answered, number)
    batch.interrupt(decodes, row.worker)


@compiled
def _time_out(decodes: int, pools: int, number: int) -> None:
    """End a row's probe at its deadline."""
    row = state_at(decodes).rows[number]
    if row.query >= 0:
        pool.cancel(pools, row.query)
    _reply(decodes, number, TIMED_OUT)


@compiled
def _process_answers(s: State, worker: Worker, now: int) -> None:
    """Continue the rows whose probes have ended."""
    _add_stall_time(worker, now)
    for position in range(worker.answered.count):
        number = worker.answered.rows[position]
        row = s.rows[number]
        worker.stalled -= 1
        row.stall_ns += now - row.deadline_ns + s.timeout_ns
        if row.status == pool.OK:
            hit = worker.drawn[worker.drawn_used] < s.probe_hit
            worker.drawn_used += 1
            if hit:
                _append_passages(s, worker, row)
        if row.expired:
            at.append(worker.finished, number)
        else:
            at.append(worker.joining, number)
    worker.answered.count = 0


@compiled
def _append_passages(s: State, worker: Worker, row: Row) -> None:
    """Append new passages: a chunk computed with the row's next step (`ServiceTimes.prefill_s`)."""
    tokens, costs = s.probe_tokens, s.costs
    each = costs.chunk_token_s + costs.chunk_pair_s * (row.context + tokens / 2)
    worker.extra_s += tokens * (each + costs.chunk_behind_s if row.context else each)
    row.context += tokens
    worker.appended += tokens


# ---- functions called from Python


@compiled
def add_row(address: int, d: int, prompt: int, output: int, expired: bool, now: int) -> int:
    """Add a row for a prompt that has its KV and first token. Return the row, or -1 if it has ended already."""
    s = state_at(address)
    worker = s.workers[d]
    worker.tokens += 1
    if expired or output <= 1:
        return -1
    s.free_count -= 1
    number = s.free[s.free_count]
    row = s.rows[number]
    row.worker, row.ends, row.query = d, -1, -1
    row.generated, row.output, row.context = 1, output, prompt
    row.stall_ns, row.expired, row.probe = 0, False, 0
    _advance_row(s, worker, number, now)
    return number


@compiled
def free(address: int, number: int) -> None:
    """Free a row that has ended."""
    s = state_at(address)
    s.free[s.free_count] = number
    s.free_count += 1


@compiled
def resume(address: int, pools: int, d: int, now: int, most: int) -> None:
    """Start the next run after Python's callback."""
    s = state_at(address)
    _join_pending(s, s.workers[d])
    _begin_run(s, pools, s.workers[d], now, most)


@compiled
def step_ns(address: int, d: int, rows: int) -> int:
    """Return the time of a worker's next step with `rows` rows."""
    s = state_at(address)
    return _step_ns(s, s.workers[d], rows)
