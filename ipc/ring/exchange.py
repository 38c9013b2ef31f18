"""Compiled exchange of requests and results between a pool's loop and the clients' rings.

A `ClientTable` is a server's view of its clients: limits, their rows, and the *current request*, which `find_request`
found last. A `ClientRow` describes one client; row i is also row i of the watch table over the request rings
(`atomics.py`). A row whose `handle` is 0 is unused.

    find_request → ACCEPTED: copy the vector, then `release`; one `answer` is due. Of a request of the kind
                             SEARCH_ARENA, its address is in the arena, where it stays until the answer
                   FILTER:   its filter is not cached: cache it, or refuse or set aside the request, then
                             call again
                   CANCEL:   the client cancels the request of this id, which may be outstanding or not
                   REFUSED:  the request was invalid or stale, and has been answered
                   EVICT:    the client of the row violated the protocol
                   NONE:     there is no request

A request whose vector the client's device has not written yet is not received, nor are its client's later ones; while
there is one, `sleep` returns at once.

Nothing in a ring is trusted: each word is read once and validated before use. A request is accepted only when a slot of
its client's result ring is reserved for it, so an answer never waits; a client without a free slot is skipped until the
server finds room (its watch row has 0 slots meanwhile).
"""

from ipc.native import atomics, intrinsics
from ipc.native.atomics import SLOT_HEADER_BYTES, ProducerEnd, WatchRow
from ipc.native.compiled import EntryPoints, compiled
from ipc.native.records import U8, U32, Array, Record, record, record_at
from ipc.ring.descriptors import CANCEL as CANCEL_KIND
from ipc.ring.descriptors import MAX_REQUEST_ID, SEARCH, SEARCH_ARENA, STAGES, STATUS_CODES, WRITTEN
from ipc.ring.filters import FILTER_SLOTS

NONE, ACCEPTED, CANCEL, REFUSED, EVICT, FILTER, _UNWRITTEN = range(7)

_INVALID_REQUEST, _STALE_EPOCH = STATUS_CODES["invalid_request"], STATUS_CODES["stale_epoch"]
_MAX_EXTENDS = (1 << 31) - 1
_STAGE_COUNT = len(STAGES)
_WORD = 0xFFFFFFFF
_HEADER = 8  # bytes of a slot before its header
entry_point = EntryPoints(globals())


@record
class CurrentRequest(Record):
    """The request that `find_request` found last."""

    row: int  # its client's
    request_id: int
    deadline_ns: int
    enqueued_ns: int
    stage: int
    collection_code: int  # in the session
    collection: int  # the server's number of that collection
    scope: int  # what to search: its filter's or its collection's; -1: none
    k: int
    top_m: int
    search_width: int
    patience: int
    dim: int
    vector: int  # its address
    slot: int  # in the ring
    filter_slot: int  # where the client has written the filter, from 1 on; 0 without one
    kind: int  # whether its vector is in the arena (`descriptors`)
    flow: int  # see `SearchSpec`


@record
class SessionCollection(Record):
    """A collection that a session offers, and what requests without a filter search."""

    number: int  # the server's
    scope: int
    dim: int


@record
class CachedFilter(Record):
    """The scope of the filter in a client's filter slot."""

    generation: int  # of the slot when it was read
    scope: int
    code: int  # of its collection in the session; -1: nothing is cached
    generation_at: int  # address of the slot's generation in the client's memory


@record
class ClientRow(Record):
    """One attached client."""

    handle: int
    results: Array[ProducerEnd]
    outstanding: int
    last_id: int
    collections: Array[SessionCollection]  # by code
    codes: int
    bell_pending: bool  # its doorbell is to be rung from Python
    cached_filters: Array[CachedFilter]
    arena: int  # address of the first of its slots of the arena
    arena_slots: int
    arena_stride: int  # bytes from slot to slot
    awaited: int  # address of the word that will be `generation` once its next request's vector is written, or 0
    generation: int


@record
class ClientTable(Record):
    """A server's clients."""

    epoch: int
    max_k: int
    max_top_m: int
    row_count: int  # in use
    rows: Array[ClientRow]
    watch: Array[WatchRow]
    next_row: int  # to be read
    pending_bells: int  # doorbells that are to be rung from Python
    request: CurrentRequest


@record
class _Result(Record):
    """The header of a result (`descriptors`)."""

    request_id: int
    epoch: U32
    status: U8
    count: U32
    extends: U32
    receive_ns: int
    begin_ns: int
    end_ns: int


client_table_at, _result_at = record_at(ClientTable), record_at(_Result)


@compiled
def _free_results(client: ClientRow) -> int:
    """Return the free slots of the client's result ring beyond the outstanding requests; below 0 if it is corrupt."""
    end = client.results[0]
    reserved = end.position + client.outstanding
    if reserved - end.reader >= end.slots and not atomics.read_position(end):
        return -1
    return max(0, end.slots - reserved + end.reader)


@compiled
def result_payload(clients: ClientTable, row: int) -> int:
    """Return the address for the next result's ids (distances: 8·max_k bytes behind); below 0: evict the client."""
    end = clients.rows[row].results[0]
    error = atomics.send_error(end, 12 * clients.max_k)
    return error if error < 0 else atomics.next_slot(end) + SLOT_HEADER_BYTES


@compiled
def answer(
    clients: ClientTable,
    row: int,
    request_id: int,
    status: int,
    count: int,
    extends: int,
    receive_ns: int,
    begin_ns: int,
) -> int:
    """End a request with `count` results, already at `result_payload`. Return below 0 if the client must be evicted."""
    client = clients.rows[row]
    end = client.results[0]
    error = atomics.send_error(end, 12 * clients.max_k)
    if error < 0:
        return error
    result = _result_at(atomics.next_slot(end) + _HEADER)
    result.request_id, result.epoch, result.status = request_id, clients.epoch, status
    result.count, result.extends = count, min(extends, _MAX_EXTENDS)
    result.receive_ns, result.begin_ns, result.end_ns = receive_ns, begin_ns, intrinsics.monotonic_ns()
    client.outstanding -= 1
    if atomics.publish_slots(end, 1):
        client.bell_pending = True
        clients.pending_bells += 1
    return 0


@compiled
def release(clients: ClientTable) -> None:
    """Release the current request's slot to its client."""
    watch = clients.watch[clients.request.row]
    watch.position += 1
    # SYNC POINT: reader position, see `RingProducer.free`.
    watch.ring[0].reader = watch.position


@compiled
def accept(clients: ClientTable) -> None:
    """Accept the current request: one answer is due."""
    client = clients.rows[clients.request.row]
    client.last_id = clients.request.request_id
    client.outstanding += 1


@compiled
def _refuse(clients: ClientTable, status: int) -> int:
    request = clients.request
    client = clients.rows[request.row]
    client.last_id = request.request_id
    client.outstanding += 1
    release(clients)
    error = answer(clients, request.row, request.request_id, status, 0, 0, intrinsics.monotonic_ns(), 0)
    return EVICT if error < 0 else REFUSED


@compiled
def _read(clients: ClientTable, slot: int) -> int:
    """Read and validate the request in a slot: it becomes the current request. Return as `find_request`."""
    header, request = slot + _HEADER, clients.request
    client = clients.rows[request.row]
    request.request_id = intrinsics.load_acquire(header)
    request.deadline_ns = intrinsics.load_acquire(header + 8)
    request.enqueued_ns = intrinsics.load_acquire(header + 16)
    first, second, third = (
        intrinsics.load_acquire(header + 24),
        intrinsics.load_acquire(header + 32),
        intrinsics.load_acquire(header + 40),
    )
    request.kind = (first >> 32) & 0xFF
    client.awaited = 0
    stale = (first & 0xFFFFFFFF) != clients.epoch
    if request.kind == CANCEL_KIND:
        release(clients)
        return CANCEL
    free = _free_results(client)
    if free < 0:
        return EVICT
    if free == 0:
        return NONE
    known = request.kind == SEARCH or request.kind == SEARCH_ARENA
    if request.request_id <= client.last_id or request.request_id > MAX_REQUEST_ID or not known:
        return EVICT
    if stale:
        return _refuse(clients, _STALE_EPOCH)
    request.stage, request.collection_code = (first >> 40) & 0xFF, (first >> 48) & 0xFFFF
    request.k, request.filter_slot, request.top_m = (
        second & 0xFFFF,
        (second >> 16) & 0xFFFF,
        (second >> 32) & 0xFFFFFFFF,
    )
    request.search_width, request.patience = third & 0xFFFF, (third >> 16) & 0xFFFF
    request.dim, request.vector = (third >> 32) & 0xFFFF, slot + SLOT_HEADER_BYTES
    request.flow = (third >> 48) & 0xFFFF
    if (
        request.deadline_ns < 0
        or request.stage >= _STAGE_COUNT
        or request.collection_code >= client.codes
        or not 1 <= request.k <= clients.max_k
        or not 1 <= request.top_m <= clients.max_top_m
        or request.search_width < 1
        or request.filter_slot > FILTER_SLOTS
        or (request.kind == SEARCH_ARENA and request.filter_slot > 0)
    ):
        return _refuse(clients, _INVALID_REQUEST)
    collection = client.collections[request.collection_code]
    if request.dim != collection.dim:
        return _refuse(clients, _INVALID_REQUEST)
    request.collection, request.scope = collection.number, collection.scope
    if request.filter_slot:
        cached = client.cached_filters[request.filter_slot - 1]
        # SYNC POINT: a filter's generation, see `filters.py`.
        generation = intrinsics.load_acquire(cached.generation_at)
        if cached.generation != generation or cached.code != request.collection_code:
            return FILTER
        request.scope = cached.scope
    if request.kind == SEARCH_ARENA:
        handle = intrinsics.load_acquire(slot + SLOT_HEADER_BYTES)
        if handle & _WORD >= client.arena_slots:
            return EVICT
        client.awaited, client.generation = header + WRITTEN, (handle >> 32) & _WORD
        if not _is_written(client):
            return _UNWRITTEN
        client.awaited = 0
        request.vector = client.arena + (handle & _WORD) * client.arena_stride
    accept(clients)
    return ACCEPTED


@compiled
def _is_written(client: ClientRow) -> bool:
    """Return whether the client's next request waits for no vector."""
    # SYNC POINT: the client's device stores this word after the vector, with a system-wide barrier.
    return client.awaited == 0 or intrinsics.load_acquire(client.awaited) & _WORD == client.generation


@compiled
def find_request(clients: ClientTable) -> int:
    """Find the next request, round-robin over clients. The results are in the module's docstring."""
    rows = clients.row_count
    for i in range(rows):
        row = (clients.next_row + i) % rows
        watch = clients.watch[row]
        if not atomics.has_message(watch) or not _is_written(clients.rows[row]):
            continue
        slot = watch.position % watch.slots
        clients.request.row, clients.request.slot = row, slot
        kind = _read(clients, watch.slot + slot * watch.stride)
        if kind == _UNWRITTEN:
            continue
        if kind != NONE:
            clients.next_row = row + 1
            return kind
        watch.slots = 0  # until housekeeping finds room for the result
    return NONE


@compiled
def any_request(clients: ClientTable) -> bool:
    """Return whether `find_request` would find a request."""
    for row in range(clients.row_count):
        if atomics.has_message(clients.watch[row]) and _is_written(clients.rows[row]):
            return True
    return False


@entry_point("int64(int64)")
def has_request(clients: int) -> int:
    """`any_request` as one call from Python."""
    return any_request(client_table_at(clients))


@compiled
def sleep(clients: ClientTable, descriptor: int, timeout_ms: int) -> bool:
    """Sleep until a client rings, which makes `descriptor` readable, or the timeout. Return whether a request came."""
    return atomics.sleep_on(clients.watch, clients.row_count, descriptor, timeout_ms)


@entry_point("void(int64)")
def accept_request(clients: int) -> None:
    """Accept the current request, whose vector has been copied, and release its slot."""
    accept(client_table_at(clients))
    release(client_table_at(clients))


@entry_point("int64(int64, int64)")
def refuse_request(clients: int, status: int) -> int:
    """End the current request, which was not accepted, with this status. Return EVICT if its client must be evicted."""
    return _refuse(client_table_at(clients), status)


entry_point.compile()
