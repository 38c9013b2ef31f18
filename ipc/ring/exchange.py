"""Compiled exchange of requests and results between a pool's loop and the clients' rings.

All data is addressed by int64 addresses, so that a call is cheap from Python and from compiled code alike. A *client
table*, int64 [TABLE_WORDS], is a server's view of its clients: limits, addresses of its rows, and from REQUEST on the
*current request*, which `find_request` found last. A *client row*, int64 [CLIENT_WORDS], describes one client; row i
is also row i of the watch table over the request rings (`atomics.py`). A row whose HANDLE is 0 is unused.

    find_request → ACCEPTED: copy the vector at VECTOR, then `release`; one `answer` is due. Of a request of the KIND
                             SEARCH_ARENA, VECTOR is an address in the arena, where it stays until the answer
                   FILTER:   the filter in FILTER_SLOT is not cached: cache it, or refuse or set aside the request, then
                             call again
                   CANCEL:   the client cancels REQUEST_ID, which may be outstanding or not
                   REFUSED:  the request was invalid or stale, and has been answered
                   EVICT:    the client at ROW violated the protocol
                   NONE:     there is no request

A request whose vector the client's device has not written yet is not received, nor are its client's later ones; while
there is one, `sleep` returns at once.

Nothing in a ring is trusted: each word is read once and validated before use. A request is accepted only when a slot of
its client's result ring is reserved for it, so an answer never waits; a client without a free slot is skipped until the
server finds room (its WATCH_SLOTS is 0 meanwhile).
"""

from functools import partial
from typing import Any

from ipc.memory import atomics, intrinsics
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
from ipc.ring.descriptors import MAX_REQUEST_ID, SEARCH, SEARCH_ARENA, STAGES, STATUS_CODES, WRITTEN
from ipc.ring.filters import FILTER_SLOTS

# A client table. EPOCH … MAX_TOP_M: limits; ROW_COUNT: rows in use; CLIENT_ROWS, WATCH: addresses of the client rows
# and of the watch table; NEXT_ROW: the row to read next; INVALID, STALE: counters; PENDING_BELLS: number of doorbells
# that are to be rung from Python.
(
    EPOCH,
    MAX_K,
    MAX_TOP_M,
    ROW_COUNT,
    CLIENT_ROWS,
    WATCH,
    NEXT_ROW,
    INVALID,
    STALE,
    PENDING_BELLS,
    REQUEST,
) = range(11)
# The current request: its client's row, its fields, the address of its vector, and its slot in the ring.
# COLLECTION: the server's number of the collection whose code in the session is COLLECTION_CODE. FILTER_SLOT: where the
# client has written the filter, from 1 on, 0 without one; FILTER_NUMBER: the server's number for that filter, or -1.
# KIND: whether its vector is in the arena (`descriptors`). FLOW: see `SearchSpec`.
(
    ROW,
    REQUEST_ID,
    DEADLINE,
    ENQUEUE,
    STAGE,
    COLLECTION_CODE,
    COLLECTION,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    DIM,
    VECTOR,
    SLOT,
    FILTER_NUMBER,
    FILTER_SLOT,
    KIND,
    FLOW,
) = range(REQUEST, 28)
TABLE_WORDS = 28

# A client row. RESULT_END: address of the result ring's end (`atomics.py`); OUTSTANDING, LAST_ID, RECEIVED: of its
# requests; COLLECTIONS: address of int64 [CODES, 2], by collection code the server's number and the dimension;
# BELL_PENDING: its doorbell is to be rung from Python; CACHED_FILTERS: address of int64 [FILTER_SLOTS,
# CACHED_FILTER_WORDS]; ARENA: address of the first of its ARENA_SLOTS slots of the arena, ARENA_STRIDE bytes apart;
# AWAITED: address of the word that will be GENERATION once the vector of its next request is written, or 0.
(
    HANDLE,
    RESULT_END,
    OUTSTANDING,
    LAST_ID,
    RECEIVED,
    COLLECTIONS,
    CODES,
    BELL_PENDING,
    CACHED_FILTERS,
    ARENA,
    ARENA_SLOTS,
    ARENA_STRIDE,
    AWAITED,
    GENERATION,
) = range(14)
CLIENT_WORDS = 14

# A cached filter: the generation of its slot when it was read, the server's number for it, the code of its collection,
# and the address of the slot's generation in the client's memory.
(CACHED_GENERATION, CACHED_NUMBER, CACHED_CODE, GENERATION_ADDRESS) = range(4)
CACHED_FILTER_WORDS = 4

NONE, ACCEPTED, CANCEL, REFUSED, EVICT, FILTER, _UNWRITTEN = range(7)

_INVALID_REQUEST, _STALE_EPOCH = STATUS_CODES["invalid_request"], STATUS_CODES["stale_epoch"]
_MAX_EXTENDS = (1 << 31) - 1
_STAGE_COUNT = len(STAGES)
_WORD = 0xFFFFFFFF
_HEADER, _PAYLOAD = 8, 64  # bytes of a slot before its header, and before its payload


@partial(compiled, returns_array=True)
def client_at(clients: Any, row: int) -> Any:
    """Return a client's row."""
    return intrinsics.words(clients[CLIENT_ROWS] + row * 8 * CLIENT_WORDS, CLIENT_WORDS)


@partial(compiled, returns_array=True)
def _result_end(client: Any) -> Any:
    return intrinsics.words(client[RESULT_END], END_COLUMNS)


@compiled
def _free_results(client: Any) -> Any:
    """Return the free slots of the client's result ring beyond the outstanding requests; below 0 if it is corrupt."""
    end = _result_end(client)
    reserved = end[END_POSITION] + client[OUTSTANDING]
    if reserved - end[END_READER] >= end[END_SLOTS]:
        # SYNC POINT: reader position, see `RingProducer.free`.
        reader = intrinsics.load_acquire(end[END_WORDS] + atomics.READER)
        if reader < end[END_READER] or reader > end[END_POSITION]:
            return -1
        end[END_READER] = reader
    return max(0, end[END_SLOTS] - reserved + end[END_READER])


@compiled
def result_payload(clients: Any, row: int) -> Any:
    """Return the address for the next result's ids (distances: 8·MAX_K bytes behind); below 0: evict the client."""
    end = _result_end(client_at(clients, row))
    error = atomics.send_error(end, 1, 12 * clients[MAX_K])
    if error < 0:
        return error
    return end[END_BASE] + (end[END_POSITION] % end[END_SLOTS]) * end[END_STRIDE] + _PAYLOAD


@compiled
def answer(
    clients: Any, row: int, request_id: int, status: int, count: int, extends: int, receive_ns: int, begin_ns: int
) -> Any:
    """End a request with `count` results, already at `result_payload`. Return below 0 if the client must be evicted."""
    client = client_at(clients, row)
    end = _result_end(client)
    error = atomics.send_error(end, 1, 12 * clients[MAX_K])
    if error < 0:
        return error
    header = intrinsics.words(end[END_BASE] + (end[END_POSITION] % end[END_SLOTS]) * end[END_STRIDE] + _HEADER, 6)
    header[0] = request_id
    header[1] = clients[EPOCH] | (status << 32)
    header[2] = (min(extends, _MAX_EXTENDS) << 32) | count
    header[3] = receive_ns
    header[4] = begin_ns
    header[5] = intrinsics.monotonic_ns()
    client[OUTSTANDING] -= 1
    if atomics.publish_slots(end, 1):
        client[BELL_PENDING] = 1
        clients[PENDING_BELLS] += 1
    return 0


@compiled
def release(clients: Any) -> None:
    """Release the current request's slot to its client."""
    watch = intrinsics.words(clients[WATCH] + clients[ROW] * 8 * WATCH_COLUMNS, WATCH_COLUMNS)
    watch[WATCH_POSITION] += 1
    # SYNC POINT: reader position, see `RingProducer.free`.
    words = watch[WATCH_SLEEPING] - atomics.SLEEPING
    intrinsics.store_release(words + atomics.READER, watch[WATCH_POSITION])


@compiled
def accept(clients: Any) -> None:
    """Accept the current request: one answer is due."""
    client = client_at(clients, clients[ROW])
    client[LAST_ID] = clients[REQUEST_ID]
    client[OUTSTANDING] += 1
    client[RECEIVED] += 1


@compiled
def _refuse(clients: Any, status: int) -> Any:
    clients[STALE if status == _STALE_EPOCH else INVALID] += 1
    client = client_at(clients, clients[ROW])
    client[LAST_ID] = clients[REQUEST_ID]
    client[OUTSTANDING] += 1
    release(clients)
    error = answer(clients, clients[ROW], clients[REQUEST_ID], status, 0, 0, intrinsics.monotonic_ns(), 0)
    return EVICT if error < 0 else REFUSED


@compiled
def _read(clients: Any, slot: int) -> Any:
    """Read and validate the request in a slot: it becomes the current request. Return as `find_request`."""
    header = slot + _HEADER
    request_id = clients[REQUEST_ID] = intrinsics.load_acquire(header)
    deadline = clients[DEADLINE] = intrinsics.load_acquire(header + 8)
    clients[ENQUEUE] = intrinsics.load_acquire(header + 16)
    first, second, third = (
        intrinsics.load_acquire(header + 24),
        intrinsics.load_acquire(header + 32),
        intrinsics.load_acquire(header + 40),
    )
    kind = (first >> 32) & 0xFF
    client = client_at(clients, clients[ROW])
    client[AWAITED] = 0
    stale = (first & 0xFFFFFFFF) != clients[EPOCH]
    if kind == CANCEL_KIND:
        release(clients)
        return CANCEL
    free = _free_results(client)
    if free < 0:
        return EVICT
    if free == 0:
        return NONE
    if request_id <= client[LAST_ID] or request_id > MAX_REQUEST_ID or (kind != SEARCH and kind != SEARCH_ARENA):
        return EVICT
    if stale:
        return _refuse(clients, _STALE_EPOCH)
    stage, code = (first >> 40) & 0xFF, (first >> 48) & 0xFFFF
    k, filter_slot, top_m = second & 0xFFFF, (second >> 16) & 0xFFFF, (second >> 32) & 0xFFFFFFFF
    width, patience, dim = third & 0xFFFF, (third >> 16) & 0xFFFF, (third >> 32) & 0xFFFF
    if (
        deadline < 0
        or stage >= _STAGE_COUNT
        or code >= client[CODES]
        or not 1 <= k <= clients[MAX_K]
        or not 1 <= top_m <= clients[MAX_TOP_M]
        or width < 1
        or filter_slot > FILTER_SLOTS
        or (kind == SEARCH_ARENA and filter_slot > 0)
    ):
        return _refuse(clients, _INVALID_REQUEST)
    collection = intrinsics.words(client[COLLECTIONS] + 16 * code, 2)
    if dim != collection[1]:
        return _refuse(clients, _INVALID_REQUEST)
    clients[STAGE], clients[COLLECTION_CODE], clients[COLLECTION] = stage, code, collection[0]
    clients[K], clients[TOP_M], clients[WIDTH], clients[PATIENCE], clients[DIM] = k, top_m, width, patience, dim
    clients[VECTOR] = slot + _PAYLOAD
    clients[FILTER_SLOT], clients[FILTER_NUMBER], clients[KIND] = filter_slot, -1, kind
    clients[FLOW] = (third >> 48) & 0xFFFF
    if filter_slot:
        cached = intrinsics.words(
            client[CACHED_FILTERS] + 8 * CACHED_FILTER_WORDS * (filter_slot - 1), CACHED_FILTER_WORDS
        )
        # SYNC POINT: a filter's generation, see `filters.py`.
        generation = intrinsics.load_acquire(cached[GENERATION_ADDRESS])
        if cached[CACHED_GENERATION] != generation or cached[CACHED_CODE] != code:
            return FILTER
        clients[FILTER_NUMBER] = cached[CACHED_NUMBER]
    if kind == SEARCH_ARENA:
        handle = intrinsics.load_acquire(slot + _PAYLOAD)
        if handle & _WORD >= client[ARENA_SLOTS]:
            return EVICT
        client[AWAITED], client[GENERATION] = header + WRITTEN, (handle >> 32) & _WORD
        if not _is_written(client):
            return _UNWRITTEN
        client[AWAITED] = 0
        clients[VECTOR] = client[ARENA] + (handle & _WORD) * client[ARENA_STRIDE]
    accept(clients)
    return ACCEPTED


@compiled
def _is_written(client: Any) -> Any:
    """Return whether the client's next request waits for no vector."""
    # SYNC POINT: the client's device stores this word after the vector, with a system-wide barrier.
    return client[AWAITED] == 0 or intrinsics.load_acquire(client[AWAITED]) & _WORD == client[GENERATION]


@compiled
def find_request(clients: Any) -> Any:
    """Find the next request, round-robin over clients. The results are in the module's docstring."""
    rows = clients[ROW_COUNT]
    for i in range(rows):
        row = (clients[NEXT_ROW] + i) % rows
        watch_row = clients[WATCH] + row * 8 * WATCH_COLUMNS
        if not atomics.has_message(watch_row) or not _is_written(client_at(clients, row)):
            continue
        watch = intrinsics.words(watch_row, WATCH_COLUMNS)
        slot = watch[WATCH_POSITION] % watch[WATCH_SLOTS]
        clients[ROW], clients[SLOT] = row, slot
        found = _read(clients, watch[WATCH_BASE] + slot * watch[WATCH_STRIDE])
        if found == _UNWRITTEN:
            continue
        if found != NONE:
            clients[NEXT_ROW] = row + 1
            return found
        watch[WATCH_SLOTS] = 0  # until housekeeping finds room for the result
    return NONE


@compiled
def any_request(clients: Any) -> Any:
    """Return whether `find_request` would find a request."""
    for row in range(clients[ROW_COUNT]):
        if atomics.has_message(clients[WATCH] + row * 8 * WATCH_COLUMNS) and _is_written(client_at(clients, row)):
            return True
    return False


@entry_point("int64(int64)")
def has_request(clients: int) -> int:
    """`any_request` as one call from Python."""
    return int(any_request(intrinsics.words(clients, TABLE_WORDS)))


@compiled
def sleep(clients: Any, descriptor: int, timeout_ms: int) -> Any:
    """Sleep until a client rings, which makes `descriptor` readable, or the timeout. Return whether a request came."""
    return atomics.sleep_on(clients[WATCH], clients[ROW_COUNT], descriptor, timeout_ms) >= 0


@entry_point("void(int64)")
def accept_request(clients: int) -> None:
    """Accept the current request, whose vector has been copied, and release its slot."""
    accept(intrinsics.words(clients, TABLE_WORDS))
    release(intrinsics.words(clients, TABLE_WORDS))


@entry_point("int64(int64, int64)")
def refuse_request(clients: int, status: int) -> int:
    """End the current request, which was not accepted, with this status. Return EVICT if its client must be evicted."""
    return int(_refuse(intrinsics.words(clients, TABLE_WORDS), status))
