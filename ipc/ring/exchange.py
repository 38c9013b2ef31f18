"""Requests out of the clients' rings and results into them, compiled: what a pool's loop does for each query.

Everything is at addresses, so that a call costs next to nothing from Python and from compiled code alike. A *desk*,
int64 [DESK_WORDS], is what a server knows; its words up to `FOUND` are the server's, the rest is the request that
`find_request` has found. A *client row*, int64 [CLIENT_WORDS], is what it knows of one client; row i of the clients is
also row i of the watch table over their request rings (`atomics.py`). A client whose HANDLE is 0 is none.

    find_request → ACCEPTED: copy the vector at VECTOR, then `release`; one `answer` is owed
                   ARENA:    the vector lies in the pool's arena: `accept` when it is there, then as above
                   FILTER:   its filter, in PLACE, is not known yet: make it known, or refuse the request; look again
                   CANCEL:   the client does not want REQUEST_ID any more, which may be outstanding or not
                   REFUSED:  could not be served, and is answered
                   EVICT:    the client at ROW wrote what no correct client writes
                   NONE:     nothing there

Nothing in a ring is trusted: each word is read once, and nothing is accessed by what it says before it is checked. A
request is accepted only when a slot of its client's result ring is kept for it, so an answer never waits; a client
without one is not looked at until the server has found room (`WATCH_SLOTS` 0 meanwhile).
"""

from functools import partial
from typing import Any

from ipc.memory import atomics, instructions
from ipc.memory.atomics import (
    END_BASE,
    END_COLUMNS,
    END_POSITION,
    END_READER,
    END_SLOTS,
    END_STRIDE,
    END_WORDS,
    WATCH_BASE,
    WATCH_COLUMNS,
    WATCH_POSITION,
    WATCH_SLEEPING,
    WATCH_SLOTS,
    WATCH_STRIDE,
)
from ipc.memory.compiled import compiled, entry_point
from ipc.ring.descriptors import CANCEL as CANCEL_KIND
from ipc.ring.descriptors import MAX_REQUEST_ID, SEARCH, SEARCH_ARENA, STAGES, STATUS_CODES
from ipc.ring.filters import PLACES

# A desk. EPOCH … MAX_TOP_M: limits; ROWS: clients' rows in use, CLIENTS and WATCH: addresses of the tables; TURN: whose
# requests are read next; INVALID, STALE: counters; BELLS: clients that only Python can ring.
(
    EPOCH,
    MAX_K,
    MAX_TOP_M,
    ROWS,
    CLIENTS,
    WATCH,
    TURN,
    INVALID,
    STALE,
    BELLS,
    FOUND,
) = range(11)
# The request found: whose it is, its words, its vector's address, and its slot in the ring.
# KNOWN: the server's number for its filter, -1 where it has none; PLACE: where a client has written that, from 1 on.
(
    ROW,
    REQUEST_ID,
    DEADLINE,
    ENQUEUE,
    STAGE,
    CODE,
    NUMBER,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    DIM,
    VECTOR,
    SLOT,
    KNOWN,
    PLACE,
) = range(FOUND, 26)
DESK_WORDS = 26

# A client row. END: address of the result ring's end (`atomics.py`); OUTSTANDING, LAST_ID, RECEIVED: of its requests;
# COLLECTIONS: address of int64 [CODES, 2], for each code of a collection the server's own number for it and its
# dimension; TO_RING: it is to be rung, which only Python can do; FILTERS: address of int64 [PLACES, KNOWN_WORDS].
(HANDLE, END, OUTSTANDING, LAST_ID, RECEIVED, COLLECTIONS, CODES, TO_RING, FILTERS) = range(9)
CLIENT_WORDS = 9

# What is known of a client's filter: its place's generation, the server's own number for it and the code of the
# collection it is for, and the address of the generation in the client's memory.
(KNOWN_GENERATION, KNOWN_NUMBER, KNOWN_CODE, GENERATION_AT) = range(4)
KNOWN_WORDS = 4

NONE, ACCEPTED, CANCEL, ARENA, REFUSED, EVICT, FILTER = range(7)

_INVALID_REQUEST, _STALE_EPOCH = STATUS_CODES["invalid_request"], STATUS_CODES["stale_epoch"]
_MAX_EXTENDS = (1 << 31) - 1
_STAGE_COUNT = len(STAGES)
_HEADER, _PAYLOAD = 8, 64  # bytes of a slot before its header, and before its payload


@partial(compiled, returns_array=True)
def client_at(desk: Any, row: int) -> Any:
    """A client's row."""
    return instructions.words(desk[CLIENTS] + row * 8 * CLIENT_WORDS, CLIENT_WORDS)


@partial(compiled, returns_array=True)
def _end_of(client: Any) -> Any:
    return instructions.words(client[END], END_COLUMNS)


@compiled
def _room(client: Any) -> Any:
    """Results that the client's ring has room for, beyond those that are owed; below 0 where it says what cannot be."""
    end = _end_of(client)
    owed = end[END_POSITION] + client[OUTSTANDING]
    if owed - end[END_READER] >= end[END_SLOTS]:
        # SYNC POINT: reader position, see `RingProducer.free`.
        reader = instructions.load_acquire(end[END_WORDS] + atomics.READER)
        if reader < end[END_READER] or reader > end[END_POSITION]:
            return -1
        end[END_READER] = reader
    return max(0, end[END_SLOTS] - owed + end[END_READER])


@compiled
def payload_of_result(desk: Any, row: int) -> Any:
    """Where the next result's ids go (the distances are 8·MAX_K bytes behind); below 0: the client must be evicted."""
    end = _end_of(client_at(desk, row))
    refusal = atomics.refusal_of(end, 1, 12 * desk[MAX_K])
    if refusal < 0:
        return refusal
    return end[END_BASE] + (end[END_POSITION] % end[END_SLOTS]) * end[END_STRIDE] + _PAYLOAD


@compiled
def answer(
    desk: Any, row: int, request_id: int, status: int, count: int, extends: int, receive_ns: int, begin_ns: int
) -> Any:
    """End a request with `count` results, which are in their place. Below 0: the client must be evicted."""
    client = client_at(desk, row)
    end = _end_of(client)
    refusal = atomics.refusal_of(end, 1, 12 * desk[MAX_K])
    if refusal < 0:
        return refusal
    header = instructions.words(end[END_BASE] + (end[END_POSITION] % end[END_SLOTS]) * end[END_STRIDE] + _HEADER, 6)
    header[0] = request_id
    header[1] = desk[EPOCH] | (status << 32)
    header[2] = (min(extends, _MAX_EXTENDS) << 32) | count
    header[3] = receive_ns
    header[4] = begin_ns
    header[5] = instructions.monotonic_ns()
    client[OUTSTANDING] -= 1
    if atomics.publish_slots(end, 1):
        client[TO_RING] = 1
        desk[BELLS] += 1
    return 0


@compiled
def release(desk: Any) -> None:
    """Give the slot of the request found back to its client."""
    watch = instructions.words(desk[WATCH] + desk[ROW] * 8 * WATCH_COLUMNS, WATCH_COLUMNS)
    watch[WATCH_POSITION] += 1
    # SYNC POINT: reader position, see `RingProducer.free`.
    words = watch[WATCH_SLEEPING] - atomics.SLEEPING
    instructions.store_release(words + atomics.READER, watch[WATCH_POSITION])


@compiled
def accept(desk: Any) -> None:
    """The request found will be answered."""
    client = client_at(desk, desk[ROW])
    client[LAST_ID] = desk[REQUEST_ID]
    client[OUTSTANDING] += 1
    client[RECEIVED] += 1


@compiled
def _refuse(desk: Any, status: int) -> Any:
    desk[STALE if status == _STALE_EPOCH else INVALID] += 1
    client = client_at(desk, desk[ROW])
    client[LAST_ID] = desk[REQUEST_ID]
    client[OUTSTANDING] += 1
    release(desk)
    refusal = answer(desk, desk[ROW], desk[REQUEST_ID], status, 0, 0, instructions.monotonic_ns(), 0)
    return EVICT if refusal < 0 else REFUSED


@compiled
def _read(desk: Any, slot: int) -> Any:
    """The request in a slot: its words into the desk, and whether it can be served."""
    header = slot + _HEADER
    request_id = desk[REQUEST_ID] = instructions.load_acquire(header)
    deadline = desk[DEADLINE] = instructions.load_acquire(header + 8)
    desk[ENQUEUE] = instructions.load_acquire(header + 16)
    first, second, third = (
        instructions.load_acquire(header + 24),
        instructions.load_acquire(header + 32),
        instructions.load_acquire(header + 40),
    )
    kind = (first >> 32) & 0xFF
    client = client_at(desk, desk[ROW])
    stale = (first & 0xFFFFFFFF) != desk[EPOCH]
    if kind == CANCEL_KIND:
        release(desk)
        return CANCEL
    room = _room(client)
    if room < 0:
        return EVICT
    if room == 0:
        return NONE
    if request_id <= client[LAST_ID] or request_id > MAX_REQUEST_ID or (kind != SEARCH and kind != SEARCH_ARENA):
        return EVICT
    if stale:
        return _refuse(desk, _STALE_EPOCH)
    stage, code = (first >> 40) & 0xFF, (first >> 48) & 0xFFFF
    k, place, top_m = second & 0xFFFF, (second >> 16) & 0xFFFF, (second >> 32) & 0xFFFFFFFF
    width, patience, dim = third & 0xFFFF, (third >> 16) & 0xFFFF, (third >> 32) & 0xFFFFFFFF
    if (
        deadline < 0
        or stage >= _STAGE_COUNT
        or code >= client[CODES]
        or not 1 <= k <= desk[MAX_K]
        or not 1 <= top_m <= desk[MAX_TOP_M]
        or width < 1
        or place > PLACES
    ):
        return _refuse(desk, _INVALID_REQUEST)
    collection = instructions.words(client[COLLECTIONS] + 16 * code, 2)
    if dim != collection[1]:
        return _refuse(desk, _INVALID_REQUEST)
    desk[STAGE], desk[CODE], desk[NUMBER] = stage, code, collection[0]
    desk[K], desk[TOP_M], desk[WIDTH], desk[PATIENCE], desk[DIM] = k, top_m, width, patience, dim
    desk[VECTOR] = slot + _PAYLOAD
    desk[PLACE], desk[KNOWN] = place, -1
    if place:
        known = instructions.words(client[FILTERS] + 8 * KNOWN_WORDS * (place - 1), KNOWN_WORDS)
        # SYNC POINT: a filter's generation, see `filters.py`.
        if known[KNOWN_GENERATION] != instructions.load_acquire(known[GENERATION_AT]) or known[KNOWN_CODE] != code:
            return FILTER
        desk[KNOWN] = known[KNOWN_NUMBER]
    if kind == SEARCH_ARENA:
        return ARENA
    accept(desk)
    return ACCEPTED


@compiled
def find_request(desk: Any) -> Any:
    """Look for one request, clients in turn, each client's in its order. What is found: see the module's text."""
    rows = desk[ROWS]
    for i in range(rows):
        row = (desk[TURN] + i) % rows
        watch_row = desk[WATCH] + row * 8 * WATCH_COLUMNS
        if not atomics.has_news(watch_row):
            continue
        watch = instructions.words(watch_row, WATCH_COLUMNS)
        slot = watch[WATCH_POSITION] % watch[WATCH_SLOTS]
        desk[ROW], desk[SLOT] = row, slot
        found = _read(desk, watch[WATCH_BASE] + slot * watch[WATCH_STRIDE])
        if found != NONE:
            desk[TURN] = row + 1
            return found
        watch[WATCH_SLOTS] = 0  # until housekeeping finds room for its result
    return NONE


@compiled
def anything_new(desk: Any) -> Any:
    """Whether a client has sent what `find_request` would find."""
    for row in range(desk[ROWS]):  # noqa: SIM110  (numba has no generators in `any`)
        if atomics.has_news(desk[WATCH] + row * 8 * WATCH_COLUMNS):
            return True
    return False


@compiled
def sleep(desk: Any, descriptor: int, timeout_ms: int) -> Any:
    """Sleep until a client rings, which makes `descriptor` readable, or the time is over. Whether there is news."""
    return atomics.sleep_on(desk[WATCH], desk[ROWS], descriptor, timeout_ms) >= 0


@entry_point("void(int64)")
def accept_request(desk: int) -> None:
    """The request found, whose vector is in the arena, will be answered; its slot is its client's again."""
    accept(instructions.words(desk, DESK_WORDS))
    release(instructions.words(desk, DESK_WORDS))


@entry_point("int64(int64, int64)")
def refuse_request(desk: int, status: int) -> int:
    """The request found, which was not accepted, ends with this status. EVICT: its client must be evicted."""
    return int(_refuse(instructions.words(desk, DESK_WORDS), status))
