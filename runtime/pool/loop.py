"""Compiled loop of the pool, from a client's request ring to its result ring: receive → schedule → extend → publish.

`run_loop` runs until a given time, or until there is nothing to do; it never enters Python. Its caller
(`loop_driver.py`) sleeps, and does in Python, ten times a second, what cannot be compiled: attaching and evicting
clients, applying knobs, writing gauges and the heartbeat. A `Loop` (`loop_layout.py`) holds all that it works on:

- the policy's `Tables`;
- the client table of a `SessionServer`, and through it the clients' rings (`ipc.ring.exchange`);
- the engine's functions, called by address (`gpu.engine`);
- scratch space, and addresses of metrics in the worker's table.

A query's vector is copied once, from the request ring into its entry's row of `vectors`, because the client may reuse
the ring's slot; the engine reads it there. A vector in the pool's arena is read where it lies. Results go from the
engine directly into the client's result ring.
"""

from gpu.engine import INVALID, PAUSE, RELEASE, RESUME
from ipc.native import intrinsics
from ipc.native.intrinsics import call
from ipc.native.records import Array, address
from ipc.ring import exchange
from ipc.ring.descriptors import SEARCH_ARENA, STATUS_CODES
from ipc.ring.exchange import ClientTable
from runtime.pool import loop_layout as layout
from runtime.pool import policy, queues, scoped_search, tables
from runtime.pool.compiled import compiled
from runtime.pool.loop_layout import Histogram, Loop, loop_at
from runtime.pool.tables import DECODE, NEVER_NS, PREFILL, EntryList, active_count

_RECEIVE = 64  # requests received before an extend, so that arrivals do not delay active queries
_POLLS_PER_YIELD = 32
_OK, _OVERLOADED, _LATE, _INVALID, _CANCELLED = (
    STATUS_CODES[status] for status in ("ok", "overloaded", "deadline_exceeded", "invalid_request", "cancelled")
)


@compiled
def run_loop(at: int, until: int, spin_ns: int) -> int:
    """Run the loop at an address until `until`; without work, spin for at most `spin_ns`. Return the exit reason."""
    loop = loop_at(at)
    t, clients = loop.tables, loop.clients[0]
    now = _now(loop)
    while True:
        if loop.resolved:
            return layout.FILTERS_RESOLVED
        if exchange.any_request(clients):
            stopped = receive(loop, clients)
            if stopped >= 0:
                return stopped
            now = _now(loop)  # else the last extend's end is reused: reading the clock costs more than a poll
        policy.schedule(t, now)
        if not apply_schedule(loop, clients, now):
            return layout.ENGINE_FAILED
        if active_count(t) == 0:
            loop.last_end_ns = loop.unreported_ns = 0
            if loop.evict_count:
                return layout.EVICTIONS
            if clients.pending_bells or not _spin(loop, clients, min(until, now + spin_ns)):
                return layout.IDLE
            continue
        if not extend(loop, clients):
            return layout.ENGINE_FAILED
        if loop.evict_count:
            return layout.EVICTIONS
        now = loop.last_end_ns
        if now >= until or clients.pending_bells:
            return layout.TIME_UP


@compiled
def _now(loop: Loop) -> int:
    return loop.clock[0] if loop.clock else intrinsics.monotonic_ns()


@compiled
def _spin(loop: Loop, clients: ClientTable, until: int) -> bool:
    """Poll for requests and resolved filters, yielding the core every few polls. Return whether there is one."""
    while True:
        for _ in range(_POLLS_PER_YIELD):
            if exchange.any_request(clients) or loop.resolved:
                return True
        if _now(loop) >= until:
            return False
        intrinsics.sched_yield()


# ---- receive


@compiled
def receive(loop: Loop, clients: ClientTable) -> int:
    """Receive requests. Return an exit reason if Python is needed, else -1."""
    for _ in range(_RECEIVE):
        kind = exchange.find_request(clients)
        if kind == exchange.NONE:
            return -1
        if kind == exchange.ACCEPTED:
            now = _now(loop)  # read again: the request may have been sent just now
            enqueue(loop, clients, clients.request.vector, now)
            exchange.release(clients)
        elif kind == exchange.CANCEL:
            cancelled = _cancel(loop, clients, clients.request.row, clients.request.request_id)
            if loop.set_aside and not cancelled:
                return layout.CANCEL
        elif kind == exchange.EVICT:
            _evict(loop, clients.request.row)
            return layout.EVICTIONS
        elif kind == exchange.FILTER:
            return layout.UNKNOWN_FILTER
    return -1


@compiled
def enqueue(loop: Loop, clients: ClientTable, vector: int, now: int) -> None:
    """Enqueue or reject the accepted request in the client table, whose vector is at the address `vector`."""
    t = loop.tables
    number = queues.new_entry(t)
    entry, search, request = t.entries[number], loop.searches[number], clients.request
    count(loop.metrics.queries[request.stage], 1.0)
    entry.stage, entry.arrival_ns = request.stage, now
    entry.deadline_ns = request.deadline_ns if request.deadline_ns > 0 else NEVER_NS
    search.row, search.request_id = request.row, request.request_id
    search.enqueued_ns, search.received_ns = request.enqueued_ns, now
    search.begun_ns, search.slot = 0, -1
    search.k = request.k
    in_place = request.kind == SEARCH_ARENA
    search.vector = vector if in_place else 0
    entry.top_m, entry.search_width = request.top_m, request.search_width
    entry.patience = request.patience
    entry.scope = request.scope
    if request.scope < 0 or search.k > entry.top_m or entry.search_width > loop.max_width:
        _reject(loop, clients, number, _INVALID)
        return
    scoped_search.bind_scope(loop, search, request.scope, now)
    if in_place and not scoped_search.is_whole_index(search):  # its client is being told: the host scans rows of parts
        _reject(loop, clients, number, _OVERLOADED)
        return
    verdict = policy.add(t, number, now)
    if verdict == policy.ACCEPTED:
        if not in_place:
            intrinsics.copy(loop.vectors + number * loop.vector_bytes, vector, 4 * request.dim)
    else:
        _reject(loop, clients, number, _OVERLOADED if verdict == policy.OVERLOADED else _LATE)


@compiled
def _cancel(loop: Loop, clients: ClientTable, row: int, request_id: int) -> bool:
    """Cancel a client's request. Return False if it is in no queue and no slot."""
    t = loop.tables
    for entries in (t.queues[PREFILL], t.queues[DECODE], t.active[PREFILL], t.active[DECODE], t.paused):
        number = _find(loop, entries, row, request_id)
        if number >= 0:
            _drop(loop, number)
            _send_result(loop, clients, number, _CANCELLED, 0, 0)
            queues.free_entry(t, number)
            return True
    return False


@compiled
def _find(loop: Loop, entries: EntryList, row: int, request_id: int) -> int:
    """Return the entry of a client's request, or -1 if it is not among these."""
    for i in range(entries.count):
        search = loop.searches[entries.numbers[i]]
        if search.row == row and search.request_id == request_id:
            return entries.numbers[i]
    return -1


@compiled
def end_set_aside(
    loop: Loop, clients: ClientTable, row: int, request_id: int, stage: int, received: int, status: int
) -> None:
    """End a request that was set aside, with a status other than ok."""
    count(loop.metrics.queries[stage], 1.0)
    if status != _CANCELLED:
        _count_refused(loop, status)
    if exchange.answer(clients, row, request_id, status, 0, 0, received, 0) < 0:
        _evict(loop, row)


@compiled
def _count_refused(loop: Loop, status: int) -> None:
    reason = layout.OVERLOADED if status == _OVERLOADED else layout.LATE if status == _LATE else layout.INVALID
    count(loop.metrics.refused, 1.0)
    count(loop.metrics.refused_for[reason], 1.0)


@compiled
def _change_state(loop: Loop, number: int, action: int) -> None:
    """Pause, resume or release the slot of an entry."""
    call(loop.engine.change_state, (loop.engine.handle, loop.searches[number].slot, action))


@compiled
def _drop(loop: Loop, number: int) -> None:
    """Remove an entry from the queue, or from the batch and the engine."""
    if loop.tables.entries[number].state != tables.WAITING:
        _change_state(loop, number, RELEASE)
    queues.release(loop.tables, number)


@compiled
def drop_client(at: int, row: int) -> None:
    """Drop all queries of a client that is gone."""
    loop = loop_at(at)
    t = loop.tables
    for number in range(t.entry_count):
        if t.entries[number].state != tables.FREE and loop.searches[number].row == row:
            _drop(loop, number)
            queues.free_entry(t, number)


# ---- schedule


@compiled
def apply_schedule(loop: Loop, clients: ClientTable, now: int) -> bool:
    """Apply the policy's changes: rejections, pauses, resumptions, admissions. Return False if the engine failed."""
    t = loop.tables
    for i in range(t.late.count):
        _reject(loop, clients, t.late.numbers[i], _LATE)
    for i in range(t.preempted.count):
        _change_state(loop, t.preempted.numbers[i], PAUSE)
        count(loop.metrics.preemptions, 1.0)
    for i in range(t.resumed.count):
        _change_state(loop, t.resumed.numbers[i], RESUME)
    for i in range(t.admitted.count):
        number = t.admitted.numbers[i]
        slot = scoped_search.admit(loop, number)
        if slot == INVALID:
            queues.release(t, number)
            _reject(loop, clients, number, _INVALID)
            continue
        if slot < 0:
            return False
        search = loop.searches[number]
        search.begun_ns = now
        observe(loop.metrics.waits[t.entries[number].stage], (now - search.enqueued_ns) / 1e9)
    return True


# ---- extend


@compiled
def extend(loop: Loop, clients: ClientTable) -> bool:
    """Run one step of the engine and publish the completed queries. Return False if the engine failed."""
    t, metrics = loop.tables, loop.metrics
    prefill, active = t.active[PREFILL].count, active_count(t)
    begin = _now(loop)
    done = call(loop.engine.extend, (loop.engine.handle, address(loop.report)))
    end = _now(loop)
    if done < 0:
        return False
    report = loop.report[0]
    loop.unreported_ns += end - (loop.last_end_ns if loop.last_end_ns else begin)
    if report.extends > 0:
        policy.advance(t, prefill, active, report.extends, loop.unreported_ns)
        loop.unreported_ns = 0
    if loop.last_end_ns:
        count(metrics.loop_s, (begin - loop.last_end_ns) / 1e9)
    count(metrics.extend_s, (end - begin) / 1e9)
    count(metrics.extends, report.extends)
    count(metrics.slot_steps, report.extends * active)
    count(metrics.padded_steps, report.extends * report.padded)
    loop.last_end_ns, loop.padded = end, report.padded
    for i in range(done):
        finished = report.finished[i]
        number = loop.owners[finished.slot]
        extends = scoped_search.finish_part(loop, number, finished.extends)
        if extends == scoped_search.CONTINUES:
            continue
        if extends < 0:
            return False
        policy.finish(t, number, extends)
        if not _publish(loop, clients, number, extends, end):
            return False
    return True


# ---- publish


@compiled
def _publish(loop: Loop, clients: ClientTable, number: int, extends: int, now: int) -> bool:
    """Write a query's results into its client's ring. Return False if the engine failed."""
    entry, search = loop.tables.entries[number], loop.searches[number]
    payload = exchange.result_payload(clients, search.row)
    if payload < 0:
        _evict(loop, search.row)
    else:
        result_count = scoped_search.read_result(loop, number, payload, clients.max_k)
        if result_count == INVALID:  # only of a vector that the device has read in place
            _count_refused(loop, _INVALID)
            _send_result(loop, clients, number, _INVALID, 0, 0)
        elif result_count < 0:
            return False
        else:
            _send_result(loop, clients, number, _OK, result_count, extends)
    _change_state(loop, number, RELEASE)
    limit = entry.deadline_ns
    if entry.stage == PREFILL:
        limit = min(limit, entry.arrival_ns + loop.tables.target_ns)
    if now > limit:
        count(loop.metrics.deadline_misses[entry.stage], 1.0)
    observe(loop.metrics.latency, (now - search.enqueued_ns) / 1e9)
    observe(loop.metrics.query_extends, float(extends))
    queues.free_entry(loop.tables, number)
    return True


@compiled
def _reject(loop: Loop, clients: ClientTable, number: int, status: int) -> None:
    """Reject a query whose entry is in no queue and no list."""
    _count_refused(loop, status)
    _send_result(loop, clients, number, status, 0, 0)
    queues.free_entry(loop.tables, number)


@compiled
def _send_result(loop: Loop, clients: ClientTable, number: int, status: int, count: int, extends: int) -> None:
    search = loop.searches[number]
    received, begun = search.received_ns, search.begun_ns
    if exchange.answer(clients, search.row, search.request_id, status, count, extends, received, begun) < 0:
        _evict(loop, search.row)  # every accepted request has a slot reserved, so the client corrupted its ring


@compiled
def _evict(loop: Loop, row: int) -> None:
    """Record a client for eviction, which is done in Python."""
    for i in range(loop.evict_count):
        if loop.evicted[i] == row:
            return
    loop.evicted[loop.evict_count] = row
    loop.evict_count += 1


# ---- metrics, written into the worker's table


@compiled
def count(counter: Array[float], amount: float) -> None:
    counter[0] += amount


@compiled
def observe(histogram: Histogram, value: float) -> None:
    bucket = 0
    while bucket < histogram.edge_count and histogram.edges[bucket] < value:
        bucket += 1
    histogram.buckets[bucket] += 1.0
    histogram.buckets[histogram.edge_count + 1] += value  # the sum
