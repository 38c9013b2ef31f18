"""The pool's loop, compiled: receive → schedule → extend → publish, from a client's request ring to its result ring.

`run_loop` goes round until a moment given by its caller, or until there is nothing for it to do; it never enters
Python. Its caller sleeps (`turn`, compiled too), and does ten times a second what only Python can: clients come, go and
die, knobs turn, gauges and the heartbeat are written. What it works on, all of it plain arrays:

- the policy's `Tables`; an entry's own columns are below;
- the desk of a `SessionServer`, and behind it the clients' rings (`ipc.ring.exchange`);
- the engine's functions, by address (`gpu.engine`);
- `Loop`, int64 words: where all of this lies, the loop's scratch space, and the places of its metrics in the worker's
  table, float64.

A query's vector is copied once, from its ring into a row of its entry's, because the client may write the ring's slot
again; from there the engine reads it. Results go from the engine into the client's result ring.
"""

from typing import Any

from gpu.engine import INVALID, PAUSE, RELEASE, RESUME
from ipc.memory import instructions
from ipc.memory.instructions import call, floats, words
from ipc.ring import exchange
from ipc.ring.descriptors import STATUS_CODES
from ipc.ring.exchange import DESK_WORDS
from runtime.pool import loop_words as of
from runtime.pool import parts, policy
from runtime.pool import tables as at
from runtime.pool.collections.scopes import LIVE
from runtime.pool.compiled import compiled
from runtime.pool.tables import NEVER_NS, kind_a, kind_b, tables_at

_RECEIVE = 64  # requests before an extend: what has a slot is not kept waiting by many arrivals
_LOOKS_PER_YIELD = 32
_OK, _OVERLOADED, _LATE, _INVALID, _CANCELLED = (
    STATUS_CODES[status] for status in ("ok", "overloaded", "deadline_exceeded", "invalid_request", "cancelled")
)


@compiled
def run_loop(loop: Any, handle: Any, until: int, spin_ns: int) -> Any:
    """Go round until `until`, and look `spin_ns` for a request when there is nothing to do. Why it returned."""
    t, desk = tables_at(handle), words(loop[of.DESK], DESK_WORDS)
    now = _now(loop)
    while True:
        if exchange.anything_new(desk):
            stopped = _receive(loop, t, desk)
            if stopped >= 0:
                return stopped
            now = _now(loop)  # dearer than looking: a round without news goes on with the end of the last extend
        policy.schedule(t, now)
        if not _carry_out(loop, t, desk, now):
            return of.ENGINE_FAILED
        if t.words[at.LISTED + at.PREFILL] + t.words[at.LISTED + at.DECODE] == 0:
            loop[of.OWN_NS] = loop[of.UNTOLD_NS] = 0
            if loop[of.EVICT]:
                return of.TO_EVICT
            if desk[exchange.BELLS] or not _spin(loop, desk, min(until, now + spin_ns)):
                return of.IDLE
            continue
        if not _extend(loop, t, desk):
            return of.ENGINE_FAILED
        if loop[of.EVICT]:
            return of.TO_EVICT
        now = loop[of.OWN_NS]
        if now >= until or desk[exchange.BELLS]:
            return of.TIME


@compiled
def _now(loop: Any) -> Any:
    return words(loop[of.CLOCK], 1)[0] if loop[of.CLOCK] else instructions.monotonic_ns()


@compiled
def _spin(loop: Any, desk: Any, until: int) -> Any:
    """Look for requests, yielding the core every few looks. Whether there are any."""
    while True:
        for _ in range(_LOOKS_PER_YIELD):
            if exchange.anything_new(desk):
                return True
        if _now(loop) >= until:
            return False
        instructions.sched_yield()


# ---- receive


@compiled
def _receive(loop: Any, t: Any, desk: Any) -> Any:
    """Take in what clients ask. Below 0, or why Python is needed."""
    for _ in range(_RECEIVE):
        found = exchange.find_request(desk)
        if found == exchange.NONE:
            return -1
        if found == exchange.ACCEPTED:
            take_in(loop, t, desk, desk[exchange.VECTOR], _now(loop))  # read now: it may just have been sent
            exchange.release(desk)
        elif found == exchange.CANCEL:
            _cancel(loop, t, desk, desk[exchange.ROW], desk[exchange.REQUEST_ID])
        elif found == exchange.ARENA:
            return of.IN_ARENA
        elif found == exchange.EVICT:
            _evict(loop, desk[exchange.ROW])
            return of.TO_EVICT
        elif found == exchange.FILTER:
            return of.NEW_FILTER
    return -1


@compiled
def take_in(loop: Any, t: Any, desk: Any, vector: int, now: int) -> None:
    """The request found, which was accepted, with its vector at an address: it waits, or is refused."""
    number = at.new_entry(t)
    entry, stage = t.entries[number], desk[exchange.STAGE]
    count(loop, of.QUERIES + stage, 1.0)
    entry[at.STAGE], entry[at.ARRIVAL] = stage, now
    entry[at.DEADLINE] = desk[exchange.DEADLINE] if desk[exchange.DEADLINE] > 0 else NEVER_NS
    entry[of.ROW], entry[of.REQUEST_ID] = desk[exchange.ROW], desk[exchange.REQUEST_ID]
    entry[of.ENQUEUED], entry[of.RECEIVED], entry[of.BEGUN], entry[of.SLOT] = desk[exchange.ENQUEUE], now, 0, -1
    entry[of.COLLECTION], entry[of.K], entry[of.TOP_M] = desk[exchange.NUMBER], desk[exchange.K], desk[exchange.TOP_M]
    entry[of.WIDTH], entry[of.PATIENCE] = desk[exchange.WIDTH], desk[exchange.PATIENCE]
    entry[of.PARTS] = entry[of.COUNT] = entry[of.KEPT] = 0
    kind, scope = desk[exchange.NUMBER], desk[exchange.KNOWN]
    if scope < 0 and kind >= LIVE:
        scope = kind - LIVE
    if scope >= 0:
        kind = LIVE + scope  # each has an estimate of its own
        parts.enter_scope(loop, entry, scope, now)
    entry[at.KIND_A] = kind_a(kind, entry[of.TOP_M])
    entry[at.KIND_B] = kind_b(entry[of.WIDTH], entry[of.PATIENCE])
    if entry[of.COLLECTION] < 0 or entry[of.K] > entry[of.TOP_M] or entry[of.WIDTH] > loop[of.MAX_WIDTH]:
        _refuse(loop, t, desk, number, _INVALID)
        return
    verdict = policy.add(t, number, now)
    if verdict == policy.ACCEPTED:
        instructions.copy(loop[of.VECTORS] + number * loop[of.VECTOR_BYTES], vector, 4 * desk[exchange.DIM])
    else:
        _refuse(loop, t, desk, number, _OVERLOADED if verdict == policy.OVERLOADED else _LATE)


@compiled
def _cancel(loop: Any, t: Any, desk: Any, row: int, request_id: int) -> None:
    """A client does not want an answer any more, or has it already."""
    for which in range(5):
        many = t.words[at.QUEUED + which]  # the queues, then the lists
        numbers = t.queues[which] if which < 2 else t.lists[which - 2]
        for i in range(many):
            number = numbers[i]
            if t.entries[number, of.ROW] == row and t.entries[number, of.REQUEST_ID] == request_id:
                _drop(loop, t, number)
                _end(loop, desk, t.entries[number], _CANCELLED, 0, 0)
                at.free_entry(t, number)
                return


@compiled
def _drop(loop: Any, t: Any, number: int) -> None:
    """Out of the queue, or out of the batch and the engine."""
    if t.entries[number, at.STATE] != at.WAITING:
        call(loop[of.CHANGE], (loop[of.HANDLE], t.entries[number, of.SLOT], RELEASE))
    at.leave(t, number)


@compiled
def forget_client(loop: Any, handle: Any, row: int) -> Any:
    """A client is gone, and with it what it had asked. How many queries that were."""
    t = tables_at(handle)
    dropped = 0
    for number in range(len(t.entries)):
        state = t.entries[number, at.STATE]
        if state != at.FREE and t.entries[number, of.ROW] == row:
            if state != at.DONE_WAITING:
                _drop(loop, t, number)
            else:
                call(loop[of.CHANGE], (loop[of.HANDLE], t.entries[number, of.SLOT], RELEASE))
            at.free_entry(t, number)
            dropped += 1
    return dropped


# ---- schedule


@compiled
def _carry_out(loop: Any, t: Any, desk: Any, now: int) -> Any:
    """What the policy has decided. Whether the engine did it."""
    changed = t.words[at.CHANGED : at.CHANGED + 4]
    for i in range(changed[at.LATE]):
        _refuse(loop, t, desk, t.changes[at.LATE, i], _LATE)
    for i in range(changed[at.PAUSING]):
        call(loop[of.CHANGE], (loop[of.HANDLE], t.entries[t.changes[at.PAUSING, i], of.SLOT], PAUSE))
        count(loop, of.PREEMPTIONS, 1.0)
    for i in range(changed[at.RESUMED]):
        call(loop[of.CHANGE], (loop[of.HANDLE], t.entries[t.changes[at.RESUMED, i], of.SLOT], RESUME))
    for i in range(changed[at.ADMITTED]):
        number = t.changes[at.ADMITTED, i]
        entry = t.entries[number]
        slot = parts.admit(loop, entry, number)
        if slot == INVALID:
            at.leave(t, number)
            _refuse(loop, t, desk, number, _INVALID)
            continue
        if slot < 0:
            return False
        entry[of.BEGUN] = now
        observe(loop, of.WAITS + 3 * entry[at.STAGE], (now - entry[of.ENQUEUED]) / 1e9)
    return True


# ---- extend


@compiled
def _extend(loop: Any, t: Any, desk: Any) -> Any:
    """One step of the engine, and what it has finished. Whether the engine did it."""
    prefill = t.words[at.LISTED + at.PREFILL]
    active = prefill + t.words[at.LISTED + at.DECODE]
    begin = _now(loop)
    done = call(loop[of.EXTEND], (loop[of.HANDLE], loop[of.REPORT]))
    end = _now(loop)
    if done < 0:
        return False
    report = words(loop[of.REPORT], 2 + 2 * done)
    loop[of.UNTOLD_NS] += end - (loop[of.OWN_NS] if loop[of.OWN_NS] else begin)
    if report[0] > 0:
        policy.advanced(t, prefill, active, report[0], loop[of.UNTOLD_NS])
        loop[of.UNTOLD_NS] = 0
    if loop[of.OWN_NS]:
        count(loop, of.LOOP_S, (begin - loop[of.OWN_NS]) / 1e9)
    count(loop, of.EXTEND_S, (end - begin) / 1e9)
    count(loop, of.EXTENDS, report[0])
    count(loop, of.STEPS, report[0] * active)
    count(loop, of.PADDED_STEPS, report[0] * report[1])
    loop[of.OWN_NS], loop[of.PADDED] = end, report[1]
    static = t.words[at.RULES] == at.STATIC
    for i in range(done):
        number = words(loop[of.OWNERS] + 8 * report[2 + 2 * i], 1)[0]
        extends = parts.extends_of(loop, t.entries[number], number, report[3 + 2 * i])
        if extends == parts.GOES_ON:
            continue
        if extends < 0:
            return False
        policy.finished(t, number, extends)
        if static:
            _keep(loop, t, number, extends)
        elif not _publish(loop, t, desk, number, extends, end):
            return False
    return not static or _publish_together(loop, t, desk, end)


# ---- publish


@compiled
def _publish(loop: Any, t: Any, desk: Any, number: int, extends: int, now: int) -> Any:
    """A query's results into its client's ring. Whether the engine gave them."""
    entry = t.entries[number]
    place = exchange.payload_of_result(desk, entry[of.ROW])
    if place < 0:
        _evict(loop, entry[of.ROW])
    else:
        found = parts.harvest(loop, entry, number, place, desk[exchange.MAX_K])
        if found < 0:
            return False
        _end(loop, desk, entry, _OK, found, extends)
    call(loop[of.CHANGE], (loop[of.HANDLE], entry[of.SLOT], RELEASE))
    stage = entry[at.STAGE]
    limit = entry[at.DEADLINE]
    if stage == at.PREFILL:
        limit = min(limit, entry[at.ARRIVAL] + t.words[at.TARGET_NS])
    if now > limit:
        count(loop, of.MISSED + stage, 1.0)
    observe(loop, of.TOOK, (now - entry[of.ENQUEUED]) / 1e9)
    observe(loop, of.TOOK_EXTENDS, float(extends))
    at.free_entry(t, number)
    return True


@compiled
def _keep(loop: Any, t: Any, number: int, extends: int) -> None:
    """`static`: an answer waits until all of its batch are there."""
    t.entries[number, at.STATE] = at.DONE_WAITING
    kept = words(loop[of.STATIC_DONE] + 16 * loop[of.DONE_COUNT], 2)
    kept[0], kept[1] = number, extends
    loop[of.DONE_COUNT] += 1


@compiled
def _publish_together(loop: Any, t: Any, desk: Any, now: int) -> Any:
    """What was kept, once nothing of its batch is in a slot. Whether the engine gave it."""
    if t.words[at.LISTED + at.PREFILL] + t.words[at.LISTED + at.DECODE]:
        return True
    kept = words(loop[of.STATIC_DONE], 2 * loop[of.DONE_COUNT])
    for i in range(loop[of.DONE_COUNT]):
        if t.entries[kept[2 * i], at.STATE] == at.DONE_WAITING and not _publish(
            loop, t, desk, kept[2 * i], kept[2 * i + 1], now
        ):
            return False
    loop[of.DONE_COUNT] = 0
    return True


@compiled
def _refuse(loop: Any, t: Any, desk: Any, number: int, status: int) -> None:
    """A query that will not be searched; its entry is in no queue and no list."""
    count(loop, of.REFUSED, 1.0)
    reason = of.OVERLOADED if status == _OVERLOADED else of.LATE if status == _LATE else of.UNFIT
    count(loop, reason, 1.0)
    _end(loop, desk, t.entries[number], status, 0, 0)
    at.free_entry(t, number)


@compiled
def _end(loop: Any, desk: Any, entry: Any, status: int, found: int, extends: int) -> None:
    sent = exchange.answer(
        desk, entry[of.ROW], entry[of.REQUEST_ID], status, found, extends, entry[of.RECEIVED], entry[of.BEGUN]
    )  # fmt: skip
    if sent < 0:  # not for want of a slot, which every accepted request has: the client wrote what is not its own
        _evict(loop, entry[of.ROW])


@compiled
def _evict(loop: Any, row: int) -> None:
    """Remember a client that only Python can evict."""
    rows = words(loop[of.EVICTED], loop[of.EVICT] + 1)
    for i in range(loop[of.EVICT]):
        if rows[i] == row:
            return
    rows[loop[of.EVICT]] = row
    loop[of.EVICT] += 1


# ---- metrics, written where the worker's table has them


@compiled
def count(loop: Any, counter: int, amount: float) -> None:
    """Add to the counter of this word of the loop."""
    floats(loop[counter], 1)[0] += amount


@compiled
def observe(loop: Any, histogram: int, value: float) -> None:
    """A value of the histogram of this word and the two behind it."""
    many = loop[histogram + 2]
    edges, buckets = floats(loop[histogram + 1], many), floats(loop[histogram], many + 2)
    place = 0
    while place < many and edges[place] < value:
        place += 1
    buckets[place] += 1.0
    buckets[many + 1] += value
