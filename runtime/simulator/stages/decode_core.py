"""The rows of simulated decode workers, compiled: a row takes its steps, probes, waits for the answer and goes on.

Between a row's first token and its last nobody else takes part but the pools, whose events happen here too
(`pool_core`), so all of that happens without Python. `run` returns where Python has its say: for the answer to a
query of prefill's, and in the middle between two runs of a worker's steps, if rows are over, KV is handed over or KV
blocks are counted (`decode`).
"""

from typing import Any

from ipc.memory.intrinsics import words
from runtime.pool.tables import NEVER_NS
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import pool_core as pool
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.stages.pool_core import compiled

NOTHING, ANSWERED, BETWEEN, ROOM = range(4)  # why `run` returns
TIMED_OUT = len(pool.STATUSES)


@compiled
def run(handle: Any, pools: Any, until: int, until_planned: int) -> Any:
    """Let everything happen that comes before an event of that moment and place in the order of plans, or until Python
    is needed: (why, now, the query and its status | the worker). `clock` has then when the next thing happens."""
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
        if not _has_room(s, p, slots):
            s.clock[at.CLOCK_NEXT] = min(when, pools_next)
            return ROOM, now, -1, 0
        if pools_next <= when and pools_next < NEVER_NS:
            now, _, number, status = pool.run(pools, when)
            if number >= 0:
                row = p.asks[number, pool.WHO]
                if row < 0:
                    s.clock[at.CLOCK_NEXT] = now  # whatever comes is looked for again
                    return ANSWERED, now, number, status
                _reply(s, row, status, now)
        elif ours:
            now = when
            kind, what, probe = at.pop(s)
            if kind == at.RUN_ENDS:
                if s.workers[what, at.END] == now and _between(s, pools, what, now):
                    s.clock[at.CLOCK_NEXT] = now
                    return BETWEEN, now, what, 0
            elif kind == at.LOOK:
                _look(s, pools, what, now)
            elif s.rows[what, at.PROBE] == probe:
                d = s.rows[what, at.WORKER]
                _send(s, pools, what, batch.boundary_ns(s, d, now))
        else:
            first_ns = s.events[0, at.WHEN] if s.words[at.EVENTS] else NEVER_NS
            s.clock[at.CLOCK_NEXT] = min(first_ns, pools_next)
            return NOTHING, now, -1, 0


@compiled
def _has_room(s: Any, p: Any, slots: int) -> Any:
    """Whether there is room for what one event may plan, ask and draw."""
    if s.words[at.EVENTS] + slots + 2 * len(s.workers) + 8 > len(s.events):
        return False
    if p.words[pool.FREE] <= slots or p.words[pool.DRAWN] == len(p.drawn):
        return False
    drawn = 0
    for d in range(len(s.workers)):
        drawn = max(drawn, s.workers[d, at.DRAWN])
    return drawn + slots <= s.drawn.shape[1]


# ---- between two runs


@compiled
def _between(s: Any, pools: Any, d: int, now: int) -> Any:
    """A run is over: rows go on, or end. Whether Python is to be called before the next one (`go_on`)."""
    worker = s.workers[d]
    members = worker[at.LISTS + at.MEMBERS]
    steps = batch.end_run(s, d, now)
    worker[at.CONTEXT] += steps * members
    worker[at.TOKENS] += steps * members
    while True:
        row = batch.next_done(s, d)
        if row < 0:
            break
        taken(s, d, row, s.rows[row, at.ROW_STEPS])
        _go_on(s, d, row, now)
    if worker[at.LISTS + at.ANSWERED]:
        _take_answers(s, d, now)
    if worker[at.PYTHON] or worker[at.LISTS + at.OVER]:
        return True
    _join_all(s, d)
    _begin(s, pools, d, now, s.words[at.MOST_STEPS])
    return False


@compiled
def taken(s: Any, d: int, row: int, steps: int) -> None:
    """A row that leaves the batch has taken so many steps."""
    one = s.rows[row]
    one[at.GENERATED] += steps
    one[at.ROW_CONTEXT] += steps
    s.workers[d, at.CONTEXT] -= one[at.ROW_CONTEXT]


@compiled
def _go_on(s: Any, d: int, row: int, now: int) -> None:
    """After a token: the row ends, asks, or takes more steps."""
    one, every = s.rows[row], s.words[at.EVERY]
    if one[at.EXPIRED] or one[at.GENERATED] >= one[at.OUTPUT]:
        at.append(s, d, at.OVER, row)
    elif s.words[at.ASKS] and every and one[at.GENERATED] % every == 0:
        _probe(s, d, row, now)
    else:
        _join(s, d, row)


@compiled
def _join(s: Any, d: int, row: int) -> None:
    """With the next step."""
    if s.rows[row, at.HOLDS]:
        at.append(s, d, at.JOINING, row)
    else:  # it has made room while it waited for its probe
        s.rows[row, at.OUT] = 1
        s.workers[d, at.OUT_ROWS] += 1


@compiled
def _join_all(s: Any, d: int) -> None:
    worker, every = s.workers[d], s.words[at.EVERY]
    for place in range(worker[at.LISTS + at.JOINING]):
        row = s.lists[5 * d + at.JOINING, place]
        one = s.rows[row]
        left = one[at.OUTPUT] - one[at.GENERATED]
        batch.join(s, d, row, min(left, every - one[at.GENERATED] % every) if every else left)
        worker[at.CONTEXT] += one[at.ROW_CONTEXT]
    worker[at.LISTS + at.JOINING] = 0


@compiled
def _begin(s: Any, pools: Any, d: int, now: int, most: int) -> None:
    worker, extra_ns = s.workers[d], 0
    members = worker[at.LISTS + at.MEMBERS]
    if worker[at.GPU]:
        gpu = words(worker[at.GPU], 2)
        gpu[pool.MODEL_BUSY] = members > 0
        extra_ns, gpu[pool.DEBT_NS] = gpu[pool.DEBT_NS], 0
    if members:
        s.extra_s[d] += worker[at.LISTS + at.ASKING] * s.costs[at.EMBED_CORE]
    if s.extra_s[d]:
        extra_ns += round(s.extra_s[d] * 1e9)
        s.extra_s[d] = 0.0
    each_ns = step_ns(s, d, members)
    if s.words[at.PREFILLS]:
        each_ns, extra_ns = round(each_ns * s.costs[at.BESIDE]), round(extra_ns * s.costs[at.BESIDE])
    if worker[at.LISTS + at.ASKING]:
        _embed(s, pools, d, now, now + extra_ns + each_ns if members else 0)
    worker[at.APPENDED] = 0
    batch.begin_run(s, d, now, most, each_ns, extra_ns)


@compiled
def step_ns(s: Any, d: int, rows: int) -> Any:
    """`ServiceTimes.decode_s`, with the contexts of the batch."""
    costs = s.costs
    return max(int(costs[at.STEP] + rows * costs[at.ROW] + s.workers[d, at.CONTEXT] * costs[at.CONTEXT_TOKEN]), 1)


# ---- probes


@compiled
def count_stalls(s: Any, d: int, now: int) -> None:
    """The time of stalled rows, up to now."""
    worker = s.workers[d]
    worker[at.STALL_NS] += worker[at.STALLED] * (now - worker[at.COUNTED])
    worker[at.COUNTED] = now


@compiled
def _probe(s: Any, d: int, row: int, now: int) -> None:
    worker, one = s.workers[d], s.rows[row]
    count_stalls(s, d, now)
    worker[at.STALLED] += 1
    worker[at.PROBES] += 1
    s.words[at.ASKED] += 1
    one[at.PROBE], one[at.QUERY], one[at.DEADLINE] = s.words[at.ASKED], -1, now + s.words[at.TIMEOUT_NS]
    one[at.DUE_BEFORE], one[at.DUE_AFTER] = worker[at.DUE_LAST], -1
    if worker[at.DUE_LAST] >= 0:
        s.rows[worker[at.DUE_LAST], at.DUE_AFTER] = row
    else:
        worker[at.DUE_FIRST] = row
    worker[at.DUE_LAST] = row
    if not worker[at.LOOKS]:
        worker[at.LOOKS] = 1
        at.plan(s, one[at.DEADLINE], at.LOOK, d, 0)
    at.append(s, d, at.ASKING, row)


@compiled
def _embed(s: Any, pools: Any, d: int, now: int, boundary: int) -> None:
    """The pool is asked when the step that begins now is over, or later, when a vector is there."""
    worker = s.workers[d]
    for place in range(worker[at.LISTS + at.ASKING]):
        row = s.lists[5 * d + at.ASKING, place]
        worker[at.EMBEDDED] = max(worker[at.EMBEDDED], now) + s.words[at.EMBED_NS]
        if worker[at.EMBEDDED] <= boundary:
            _send(s, pools, row, boundary)
        else:
            at.plan(s, worker[at.EMBEDDED], at.VECTOR, row, s.rows[row, at.PROBE])
    worker[at.LISTS + at.ASKING] = 0


@compiled
def _send(s: Any, pools: Any, row: int, when: int) -> None:
    one = s.rows[row]
    group = s.workers[one[at.WORKER], at.GROUP]
    when += s.words[at.WAIT_NS] + pool.state_at(pools).words[pool.RING_NS]
    one[at.QUERY] = pool.ask(pools, 1, group, when, one[at.DEADLINE], 0, s.words[at.TOP_M], row)
    s.clock[at.CLOCK_NEXT] = min(s.clock[at.CLOCK_NEXT], when)


@compiled
def _reply(s: Any, row: int, status: int, now: int) -> None:
    """The row's probe is over: its loop sees that between two steps."""
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
    batch.poke(s, d, now)


@compiled
def _look(s: Any, pools: Any, d: int, now: int) -> None:
    """End the probes whose time is over."""
    worker = s.workers[d]
    worker[at.LOOKS] = 0
    while worker[at.DUE_FIRST] >= 0:
        row = worker[at.DUE_FIRST]
        one = s.rows[row]
        if one[at.DEADLINE] > now:
            worker[at.LOOKS] = 1
            at.plan(s, one[at.DEADLINE], at.LOOK, d, 0)
            return
        if one[at.QUERY] >= 0:
            pool.forget(pools, one[at.QUERY])
        _reply(s, row, TIMED_OUT, now)


@compiled
def _take_answers(s: Any, d: int, now: int) -> None:
    """Let rows go on whose probes are over."""
    worker = s.workers[d]
    count_stalls(s, d, now)
    for place in range(worker[at.LISTS + at.ANSWERED]):
        row = s.lists[5 * d + at.ANSWERED, place]
        one = s.rows[row]
        worker[at.STALLED] -= 1
        one[at.WAITED] += now - one[at.DEADLINE] + s.words[at.TIMEOUT_NS]
        s.extra_s[d] += s.costs[at.A_PROBE]
        if one[at.STATUS] == pool.OK:
            found = s.drawn[d, worker[at.DRAWN]] < s.costs[at.HIT]
            worker[at.DRAWN] += 1
            if found:
                _append(s, d, row)
        if one[at.EXPIRED]:
            at.append(s, d, at.OVER, row)
        else:
            _join(s, d, row)
    worker[at.LISTS + at.ANSWERED] = 0


@compiled
def _append(s: Any, d: int, row: int) -> None:
    """New passages: a chunk that goes through the model with the row's next step (`ServiceTimes.prefill_s`)."""
    one, tokens, costs = s.rows[row], s.words[at.PROBE_TOKENS], s.costs
    if one[at.ROW_CONTEXT] + tokens + one[at.OUTPUT] - one[at.GENERATED] > s.workers[d, at.MOST_TOKENS]:
        return
    each = costs[at.CHUNK_TOKEN] + costs[at.CHUNK_PAIR] * (one[at.ROW_CONTEXT] + tokens / 2)
    s.extra_s[d] += tokens * (each + costs[at.CHUNK_BEHIND] if one[at.ROW_CONTEXT] else each)
    one[at.ROW_CONTEXT] += tokens
    s.workers[d, at.APPENDED] += tokens


# ---- what Python calls


@compiled
def arrive(handle: Any, d: int, prompt: int, output: int, expired: bool, holds: bool, now: int) -> Any:
    """A prompt's KV is here, and with it the first token: its row, or -1 if it is over already."""
    s = at.state_at(handle)
    s.workers[d, at.TOKENS] += 1
    if expired or output <= 1:
        return -1
    s.words[at.FREE_ROWS] -= 1
    row = s.free[s.words[at.FREE_ROWS]]
    one = s.rows[row]
    one[:] = 0
    one[at.WORKER], one[at.ENDS], one[at.QUERY], one[at.HOLDS] = d, -1, -1, holds
    one[at.GENERATED], one[at.OUTPUT], one[at.ROW_CONTEXT] = 1, output, prompt
    _go_on(s, d, row, now)
    return row


@compiled
def free(handle: Any, row: int) -> None:
    """A row is over."""
    s = at.state_at(handle)
    s.free[s.words[at.FREE_ROWS]] = row
    s.words[at.FREE_ROWS] += 1


@compiled
def go_on(handle: Any, pools: Any, d: int, now: int, most: int) -> None:
    """The next run, after Python's part between two."""
    s = at.state_at(handle)
    _join_all(s, d)
    _begin(s, pools, d, now, most)


@compiled
def join_all(handle: Any, d: int) -> None:
    """Have the batch take in who is to join it."""
    _join_all(at.state_at(handle), d)


@compiled
def make_room(handle: Any, row: int) -> None:
    """A row loses its KV blocks; if it is in the batch, it leaves it until it has others."""
    s = at.state_at(handle)
    one = s.rows[row]
    d = one[at.WORKER]
    one[at.HOLDS] = 0
    if one[at.ENDS] >= 0:
        taken(s, d, row, batch.leave(s, d, row))
        one[at.OUT] = 1
        s.workers[d, at.OUT_ROWS] += 1


@compiled
def bring_back(handle: Any, row: int, over: bool) -> None:
    """A row without KV blocks has some again, and joins the batch, unless it is over."""
    s = at.state_at(handle)
    one = s.rows[row]
    d = one[at.WORKER]
    one[at.OUT], one[at.HOLDS] = 0, 1
    s.workers[d, at.OUT_ROWS] -= 1
    if not over:
        at.append(s, d, at.JOINING, row)


@compiled
def poke(handle: Any, d: int, now: int) -> None:
    """See `step_batch.poke`."""
    batch.poke(at.state_at(handle), d, now)


@compiled
def boundary_ns(handle: Any, d: int, now: int) -> Any:
    """See `step_batch.boundary_ns`."""
    return batch.boundary_ns(at.state_at(handle), d, now)


@compiled
def time_of_step(handle: Any, d: int, rows: int) -> Any:
    """See `step_ns`."""
    return step_ns(at.state_at(handle), d, rows)


@compiled
def count(handle: Any, d: int, now: int) -> None:
    """See `count_stalls`."""
    count_stalls(at.state_at(handle), d, now)
