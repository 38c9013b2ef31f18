"""Compiled loop of the pool, from a client's request ring to its result ring: receive → schedule → extend → publish.

`run_loop` runs until a given time, or until there is nothing to do; it never enters Python. Its caller
(`loop_driver.py`) sleeps, and does in Python, ten times a second, what cannot be compiled: attaching and evicting
clients, applying knobs, writing gauges and the heartbeat. The loop works on plain arrays:

- the policy's `Tables`; the loop's own columns of an entry are in `loop_layout.py`;
- the client table of a `SessionServer`, and through it the clients' rings (`ipc.ring.exchange`);
- the engine's functions, called by address (`gpu.engine`);
- `loop`, int64 words: addresses of all of these, scratch space, and addresses of metrics in the worker's table.

A query's vector is copied once, from the request ring into its entry's row of `VECTORS`, because the client may reuse
the ring's slot; the engine reads it there. A vector in the pool's arena is read where it lies. Results go from the
engine directly into the client's result ring.
"""

from typing import Any

from gpu.engine import INVALID, PAUSE, RELEASE, RESUME
from ipc.memory import intrinsics
from ipc.memory.intrinsics import call, floats, words
from ipc.ring import exchange
from ipc.ring.descriptors import SEARCH_ARENA, STATUS_CODES
from ipc.ring.exchange import TABLE_WORDS
from runtime.pool import loop_layout as layout
from runtime.pool import policy, scoped_search, tables
from runtime.pool.collections.scopes import LIVE
from runtime.pool.compiled import compiled
from runtime.pool.tables import NEVER_NS, class_a, class_b, tables_at

_RECEIVE = 64  # requests received before an extend, so that arrivals do not delay active queries
_POLLS_PER_YIELD = 32
_OK, _OVERLOADED, _LATE, _INVALID, _CANCELLED = (
    STATUS_CODES[status] for status in ("ok", "overloaded", "deadline_exceeded", "invalid_request", "cancelled")
)


@compiled
def run_loop(loop: Any, handle: Any, until: int, spin_ns: int) -> Any:
    """Run until `until`. With nothing to do, spin for at most `spin_ns`. Return the exit reason."""
    t, clients = tables_at(handle), words(loop[layout.CLIENTS], TABLE_WORDS)
    now = _now(loop)
    while True:
        if loop[layout.RESOLVED]:
            return layout.FILTERS_RESOLVED
        if exchange.any_request(clients):
            stopped = receive(loop, t, clients)
            if stopped >= 0:
                return stopped
            now = _now(loop)  # else the last extend's end is reused: reading the clock costs more than a poll
        policy.schedule(t, now)
        if not apply_schedule(loop, t, clients, now):
            return layout.ENGINE_FAILED
        if t.words[tables.ACTIVE_PREFILL] + t.words[tables.ACTIVE_DECODE] == 0:
            loop[layout.LAST_END_NS] = loop[layout.UNREPORTED_NS] = 0
            if loop[layout.EVICT]:
                return layout.EVICTIONS
            if clients[exchange.PENDING_BELLS] or not _spin(loop, clients, min(until, now + spin_ns)):
                return layout.IDLE
            continue
        if not extend(loop, t, clients):
            return layout.ENGINE_FAILED
        if loop[layout.EVICT]:
            return layout.EVICTIONS
        now = loop[layout.LAST_END_NS]
        if now >= until or clients[exchange.PENDING_BELLS]:
            return layout.TIME_UP


@compiled
def _now(loop: Any) -> Any:
    return words(loop[layout.CLOCK], 1)[0] if loop[layout.CLOCK] else intrinsics.monotonic_ns()


@compiled
def _spin(loop: Any, clients: Any, until: int) -> Any:
    """Poll for requests and resolved filters, yielding the core every few polls. Return whether there is one."""
    while True:
        for _ in range(_POLLS_PER_YIELD):
            if exchange.any_request(clients) or loop[layout.RESOLVED]:
                return True
        if _now(loop) >= until:
            return False
        intrinsics.sched_yield()


# ---- receive


@compiled
def receive(loop: Any, t: Any, clients: Any) -> Any:
    """Receive requests. Return an exit reason if Python is needed, else -1."""
    for _ in range(_RECEIVE):
        found = exchange.find_request(clients)
        if found == exchange.NONE:
            return -1
        if found == exchange.ACCEPTED:
            now = _now(loop)  # read again: the request may have been sent just now
            enqueue(loop, t, clients, clients[exchange.VECTOR], now)
            exchange.release(clients)
        elif found == exchange.CANCEL:
            cancelled = _cancel(loop, t, clients, clients[exchange.ROW], clients[exchange.REQUEST_ID])
            if loop[layout.SET_ASIDE] and not cancelled:
                return layout.CANCEL
        elif found == exchange.EVICT:
            _evict(loop, clients[exchange.ROW])
            return layout.EVICTIONS
        elif found == exchange.FILTER:
            return layout.UNKNOWN_FILTER
    return -1


@compiled
def enqueue(loop: Any, t: Any, clients: Any, vector: int, now: int) -> None:
    """Enqueue or reject the accepted request in the client table, whose vector is at the address `vector`."""
    number = tables.new_entry(t)
    entry, stage = t.entries[number], clients[exchange.STAGE]
    count(loop, layout.QUERIES + stage, 1.0)
    entry[tables.STAGE], entry[tables.ARRIVAL] = stage, now
    entry[tables.DEADLINE] = clients[exchange.DEADLINE] if clients[exchange.DEADLINE] > 0 else NEVER_NS
    entry[layout.ROW], entry[layout.REQUEST_ID] = clients[exchange.ROW], clients[exchange.REQUEST_ID]
    entry[layout.ENQUEUED], entry[layout.RECEIVED] = clients[exchange.ENQUEUE], now
    entry[layout.BEGUN], entry[layout.SLOT] = 0, -1
    entry[layout.COLLECTION], entry[layout.K] = clients[exchange.COLLECTION], clients[exchange.K]
    entry[layout.TOP_M], entry[layout.WIDTH] = clients[exchange.TOP_M], clients[exchange.WIDTH]
    entry[layout.PATIENCE] = clients[exchange.PATIENCE]
    entry[layout.PARTS] = entry[layout.PART_COUNT] = entry[layout.KEPT] = 0
    in_place = clients[exchange.KIND] == SEARCH_ARENA
    entry[layout.VECTOR] = vector if in_place else 0
    searched, scope = clients[exchange.COLLECTION], clients[exchange.FILTER_NUMBER]
    if scope < 0 and searched >= LIVE:
        scope = searched - LIVE
    if scope >= 0:
        searched = LIVE + scope  # each scope is a query class of its own
        scoped_search.bind_scope(loop, entry, scope, now)
    entry[tables.CLASS_A] = class_a(searched, entry[layout.TOP_M])
    entry[tables.CLASS_B] = class_b(entry[layout.WIDTH], entry[layout.PATIENCE])
    if (
        entry[layout.COLLECTION] < 0
        or entry[layout.K] > entry[layout.TOP_M]
        or entry[layout.WIDTH] > loop[layout.MAX_WIDTH]
        or (in_place and scope >= 0)  # the host scans rows of scopes: its client was told
    ):
        _reject(loop, t, clients, number, _INVALID)
        return
    verdict = policy.add(t, number, now)
    if verdict == policy.ACCEPTED:
        if not in_place:
            intrinsics.copy(
                loop[layout.VECTORS] + number * loop[layout.VECTOR_BYTES], vector, 4 * clients[exchange.DIM]
            )
    else:
        _reject(loop, t, clients, number, _OVERLOADED if verdict == policy.OVERLOADED else _LATE)


@compiled
def _cancel(loop: Any, t: Any, clients: Any, row: int, request_id: int) -> Any:
    """Cancel a client's request. Return False if it is in no queue and no slot."""
    for which in range(5):
        length = t.words[tables.QUEUED + which]  # the queues, then the lists
        numbers = t.queues[which] if which < 2 else t.lists[which - 2]
        for i in range(length):
            number = numbers[i]
            if t.entries[number, layout.ROW] == row and t.entries[number, layout.REQUEST_ID] == request_id:
                _drop(loop, t, number)
                _send_result(loop, clients, t.entries[number], _CANCELLED, 0, 0)
                tables.free_entry(t, number)
                return True
    return False


@compiled
def end_set_aside(loop: Any, clients: Any, row: int, request_id: int, stage: int, received: int, status: int) -> None:
    """End a request that was set aside, with a status other than ok."""
    count(loop, layout.QUERIES + stage, 1.0)
    if status != _CANCELLED:
        count(loop, layout.REFUSED, 1.0)
        count(loop, _reason(status), 1.0)
    if exchange.answer(clients, row, request_id, status, 0, 0, received, 0) < 0:
        _evict(loop, row)


@compiled
def _reason(status: int) -> Any:
    """Return the counter of requests refused with a status."""
    return layout.OVERLOADED if status == _OVERLOADED else layout.LATE if status == _LATE else layout.INVALID


@compiled
def _drop(loop: Any, t: Any, number: int) -> None:
    """Remove an entry from the queue, or from the batch and the engine."""
    if t.entries[number, tables.STATE] != tables.WAITING:
        call(loop[layout.CHANGE_STATE], (loop[layout.HANDLE], t.entries[number, layout.SLOT], RELEASE))
    tables.release(t, number)


@compiled
def drop_client(loop: Any, handle: Any, row: int) -> Any:
    """Drop all queries of a client that is gone. Return their number."""
    t = tables_at(handle)
    dropped = 0
    for number in range(len(t.entries)):
        state = t.entries[number, tables.STATE]
        if state != tables.FREE and t.entries[number, layout.ROW] == row:
            if state != tables.BATCH_WAITING:
                _drop(loop, t, number)
            else:
                call(loop[layout.CHANGE_STATE], (loop[layout.HANDLE], t.entries[number, layout.SLOT], RELEASE))
            tables.free_entry(t, number)
            dropped += 1
    return dropped


# ---- schedule


@compiled
def apply_schedule(loop: Any, t: Any, clients: Any, now: int) -> Any:
    """Apply the policy's changes: rejections, pauses, resumptions, admissions. Return False if the engine failed."""
    changed = t.words[tables.CHANGED : tables.CHANGED + 4]
    for i in range(changed[tables.LATE]):
        _reject(loop, t, clients, t.changes[tables.LATE, i], _LATE)
    for i in range(changed[tables.PREEMPTED]):
        call(
            loop[layout.CHANGE_STATE],
            (loop[layout.HANDLE], t.entries[t.changes[tables.PREEMPTED, i], layout.SLOT], PAUSE),
        )
        count(loop, layout.PREEMPTIONS, 1.0)
    for i in range(changed[tables.RESUMED]):
        call(
            loop[layout.CHANGE_STATE],
            (loop[layout.HANDLE], t.entries[t.changes[tables.RESUMED, i], layout.SLOT], RESUME),
        )
    for i in range(changed[tables.ADMITTED]):
        number = t.changes[tables.ADMITTED, i]
        entry = t.entries[number]
        slot = scoped_search.admit(loop, entry, number)
        if slot == INVALID:
            tables.release(t, number)
            _reject(loop, t, clients, number, _INVALID)
            continue
        if slot < 0:
            return False
        entry[layout.BEGUN] = now
        observe(loop, layout.WAIT + 3 * entry[tables.STAGE], (now - entry[layout.ENQUEUED]) / 1e9)
    return True


# ---- extend


@compiled
def extend(loop: Any, t: Any, clients: Any) -> Any:
    """Run one step of the engine and publish the completed queries. Return False if the engine failed."""
    prefill = t.words[tables.ACTIVE_PREFILL]
    active = prefill + t.words[tables.ACTIVE_DECODE]
    begin = _now(loop)
    done = call(loop[layout.EXTEND], (loop[layout.HANDLE], loop[layout.REPORT]))
    end = _now(loop)
    if done < 0:
        return False
    report = words(loop[layout.REPORT], 2 + 2 * done)
    loop[layout.UNREPORTED_NS] += end - (loop[layout.LAST_END_NS] if loop[layout.LAST_END_NS] else begin)
    if report[0] > 0:
        policy.advance(t, prefill, active, report[0], loop[layout.UNREPORTED_NS])
        loop[layout.UNREPORTED_NS] = 0
    if loop[layout.LAST_END_NS]:
        count(loop, layout.LOOP_S, (begin - loop[layout.LAST_END_NS]) / 1e9)
    count(loop, layout.EXTEND_S, (end - begin) / 1e9)
    count(loop, layout.EXTENDS, report[0])
    count(loop, layout.SLOT_STEPS, report[0] * active)
    count(loop, layout.PADDED_STEPS, report[0] * report[1])
    loop[layout.LAST_END_NS], loop[layout.PADDED] = end, report[1]
    static = t.words[tables.RULES] == tables.STATIC
    for i in range(done):
        number = words(loop[layout.OWNERS] + 8 * report[2 + 2 * i], 1)[0]
        extends = scoped_search.finish_part(loop, t.entries[number], number, report[3 + 2 * i])
        if extends == scoped_search.CONTINUES:
            continue
        if extends < 0:
            return False
        policy.finish(t, number, extends)
        if static:
            _defer(loop, t, number, extends)
        elif not _publish(loop, t, clients, number, extends, end):
            return False
    return not static or _publish_batch(loop, t, clients, end)


# ---- publish


@compiled
def _publish(loop: Any, t: Any, clients: Any, number: int, extends: int, now: int) -> Any:
    """Write a query's results into its client's ring. Return False if the engine failed."""
    entry = t.entries[number]
    payload = exchange.result_payload(clients, entry[layout.ROW])
    if payload < 0:
        _evict(loop, entry[layout.ROW])
    else:
        found = scoped_search.read_result(loop, entry, number, payload, clients[exchange.MAX_K])
        if found == INVALID:  # only of a vector that the device has read in place
            count(loop, layout.REFUSED, 1.0)
            count(loop, layout.INVALID, 1.0)
            _send_result(loop, clients, entry, _INVALID, 0, 0)
        elif found < 0:
            return False
        else:
            _send_result(loop, clients, entry, _OK, found, extends)
    call(loop[layout.CHANGE_STATE], (loop[layout.HANDLE], entry[layout.SLOT], RELEASE))
    stage = entry[tables.STAGE]
    limit = entry[tables.DEADLINE]
    if stage == tables.PREFILL:
        limit = min(limit, entry[tables.ARRIVAL] + t.words[tables.TARGET_NS])
    if now > limit:
        count(loop, layout.DEADLINE_MISSES + stage, 1.0)
    observe(loop, layout.LATENCY, (now - entry[layout.ENQUEUED]) / 1e9)
    observe(loop, layout.QUERY_EXTENDS, float(extends))
    tables.free_entry(t, number)
    return True


@compiled
def _defer(loop: Any, t: Any, number: int, extends: int) -> None:
    """Defer a result until its whole batch has completed (`static`)."""
    t.entries[number, tables.STATE] = tables.BATCH_WAITING
    deferred = words(loop[layout.STATIC_DONE] + 16 * loop[layout.DONE_COUNT], 2)
    deferred[0], deferred[1] = number, extends
    loop[layout.DONE_COUNT] += 1


@compiled
def _publish_batch(loop: Any, t: Any, clients: Any, now: int) -> Any:
    """Publish the deferred results once their batch has no active query. Return False if the engine failed."""
    if t.words[tables.ACTIVE_PREFILL] + t.words[tables.ACTIVE_DECODE]:
        return True
    deferred = words(loop[layout.STATIC_DONE], 2 * loop[layout.DONE_COUNT])
    for i in range(loop[layout.DONE_COUNT]):
        if t.entries[deferred[2 * i], tables.STATE] == tables.BATCH_WAITING and not _publish(
            loop, t, clients, deferred[2 * i], deferred[2 * i + 1], now
        ):
            return False
    loop[layout.DONE_COUNT] = 0
    return True


@compiled
def _reject(loop: Any, t: Any, clients: Any, number: int, status: int) -> None:
    """Reject a query whose entry is in no queue and no list."""
    count(loop, layout.REFUSED, 1.0)
    count(loop, _reason(status), 1.0)
    _send_result(loop, clients, t.entries[number], status, 0, 0)
    tables.free_entry(t, number)


@compiled
def _send_result(loop: Any, clients: Any, entry: Any, status: int, found: int, extends: int) -> None:
    row, request_id = entry[layout.ROW], entry[layout.REQUEST_ID]
    received, begun = entry[layout.RECEIVED], entry[layout.BEGUN]
    sent = exchange.answer(clients, row, request_id, status, found, extends, received, begun)
    if sent < 0:  # every accepted request has a slot reserved, so the client corrupted its ring
        _evict(loop, entry[layout.ROW])


@compiled
def _evict(loop: Any, row: int) -> None:
    """Record a client for eviction, which is done in Python."""
    rows = words(loop[layout.EVICTED], loop[layout.EVICT] + 1)
    for i in range(loop[layout.EVICT]):
        if rows[i] == row:
            return
    rows[loop[layout.EVICT]] = row
    loop[layout.EVICT] += 1


# ---- metrics, written into the worker's table


@compiled
def count(loop: Any, counter: int, amount: float) -> None:
    """Add to a counter; `counter` is its word of the loop."""
    floats(loop[counter], 1)[0] += amount


@compiled
def observe(loop: Any, histogram: int, value: float) -> None:
    """Add a value to a histogram; `histogram` is the first of its three words of the loop."""
    size = loop[histogram + 2]
    edges, buckets = floats(loop[histogram + 1], size), floats(loop[histogram], size + 2)
    bucket = 0
    while bucket < size and edges[bucket] < value:
        bucket += 1
    buckets[bucket] += 1.0
    buckets[size + 1] += value  # the sum
