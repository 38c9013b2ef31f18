"""The CUDA engine's C functions for compiled loops (`gpu.engine.Backend`), and the words of their handle.

A step launches `write_slots` for the commands that admissions, pauses and releases have written to pinned memory,
replays the CUDA graph of the smallest bucket that covers the active slots, and polls a pinned word until the launch has
ended. The driver's functions are called by address; nothing here synchronises. Queries are prepared in their slot's
staged line in pinned memory, which `write_slots` copies to the device; results are read from pinned memory.
"""

from typing import Any

import numpy as np
from numba import carray

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu.extend.filtered import SIGMAS_COMPARE, filtered_top_m, found_too_few, scan_rows
from gpu.cpu.extend.keys import may_be_result
from gpu.cpu.queries import write_query
from gpu.cpu.simd import pointer
from gpu.cpu.tables import encodings_at
from gpu.cuda import filtered, layout
from gpu.cuda.driver import NOT_READY
from gpu.engine import FAILED, INVALID, PAUSE, RELEASE, RESUME
from gpu.slots import ACTIVE_COUNT, MAX_COLLECTIONS, STATES
from ipc.native.arrays import int64_at as words_at
from ipc.native.intrinsics import call_int, load_acquire_u32, monotonic_ns, store_release_u32

# Words of the handle, int64. Addresses, unless noted otherwise:
#   TABLE, ACTIVE                    the slot table's words and its list of active slots; SLOTS: number of slots
#   ENCODINGS, IDS                   tables by collection number; an entry of IDS is 0 where row numbers are the ids
#   COLLECTIONS, SEARCHES, KEYS      the arrays of `gpu.cuda.filtered.HostScans`
#   LINES, DEVICE_LINES              the staged slot lines, LINE_BYTES each, as addressed by host and device
#   COMMANDS                         int64 [slots, 2]; the first PENDING (a count) go into the next launch
#   PLACES                           int64 [slots]: 1 + the index of the slot's command, 0 if it has none
#   RESULTS, PROGRESS, DOORBELL      pinned memory; RESULT_BYTES, MAX_K: sizes of a result
#   GRAPHS                           `LaunchGraphs.table`, BUCKETS rows; LIMIT: extends per launch; STREAM
#   REPLAY, LAUNCH, QUERY            the driver's entry points
#   WRITE, ARGUMENTS                 the kernel `write_slots` and the addresses of its arguments
#   RESIDENT                         the state of `gpu.cuda.resident`
#   SLOT_STATES                      int64 [slots, SLOT_STATE_WORDS], its state by slot; ON_DEVICE: device owns it
#   INTERRUPT, INTERRUPT_ARGUMENT    callback polled during a launch of several extends, and its argument; 0: none
# Values: POLL_NS: interval at which a wait polls the driver for errors, next at POLL_AT; TIMEOUT_NS: of a wait.
# NEXT_TICKET; LAUNCHES, TOTAL_EXTENDS: counts so far; EXTENDS: of the last launch; WAITED_NS: in total. FAILURE: the
# kind of failure below, with its CODE.
(
    TABLE,
    ACTIVE,
    SLOTS,
    ENCODINGS,
    IDS,
    COLLECTIONS,
    SEARCHES,
    KEYS,
    LINES,
    DEVICE_LINES,
    LINE_BYTES,
    COMMANDS,
    PENDING,
    PLACES,
    RESULTS,
    RESULT_BYTES,
    MAX_K,
    PROGRESS,
    DOORBELL,
    GRAPHS,
    BUCKETS,
    LIMIT,
    STREAM,
    REPLAY,
    LAUNCH,
    QUERY,
    WRITE,
    ARGUMENTS,
    RESIDENT,
    SLOT_STATES,
    INTERRUPT,
    INTERRUPT_ARGUMENT,
    POLL_NS,
    POLL_AT,
    TIMEOUT_NS,
    NEXT_TICKET,
    LAUNCHES,
    TOTAL_EXTENDS,
    EXTENDS,
    WAITED_NS,
    FAILURE,
    CODE,
) = range(42)
HANDLE_WORDS = 42
ON_DEVICE, SLOT_STATE_WORDS = 0, 8  # a cache line

NO_FAILURE, LAUNCH_FAILED, REPLAY_FAILED, QUERY_FAILED, NOT_REPORTED, TIMED_OUT, RECORDS_MISSING = range(7)
"""Kinds of failure: a failed driver call (three of them); a launch that ended without reporting progress; a launch that
timed out; a resident launch that ended without a record of every slot that it took."""

INTERRUPT_POLL_NS = 2_000
"""Interval of interrupt polls, each of which costs twenty polls of the device's words."""

_WORD = 0xFFFFFFFF
_HEAD_WORDS = layout.SLOT.itemsize // 4
_FREE, _ACTIVE, _PAUSED = layout.FREE, layout.ACTIVE, layout.PAUSED
_TICKET_OFFSET, _EXTENDS_OFFSET, _INVALID_OFFSET, _NODES_OFFSET = 0, 4, 8, layout.RESULT.itemsize
_WRITE_THREADS, _PREPARE_BYTES = layout.WRITE_THREADS, layout.PREPARE_BYTES
assert layout.SLOT.names is not None
assert layout.SLOT.names[: layout.VISITED_BITS + 1] == (
    "status", "ticket", "collection", "k", "top_m", "search_width", "patience", "visited_bits",
)  # fmt: skip
assert layout.SLOT.fields is not None
assert layout.SLOT.fields["vector"][1] == 4 * layout.VECTOR
assert layout.RESULT.names is not None
assert layout.RESULT.names[:3] == ("ticket", "extends", "invalid")
assert [layout.COMMAND.fields[name][1] for name in ("slot", "status", "line")] == [0, 4, 8]  # type: ignore[index]


@compiled
def _head(words: Any, slot: int) -> Any:
    """Return the SLOT of a staged line, uint32: the parameters of the slot's query."""
    return carray(pointer(words[LINES] + slot * words[LINE_BYTES]), _HEAD_WORDS, np.uint32)


@compiled
def _result(words: Any, slot: int) -> Any:
    return words[RESULTS] + slot * words[RESULT_BYTES]


@compiled
def _nodes(words: Any, slot: int) -> Any:
    return carray(pointer(_result(words, slot) + _NODES_OFFSET), words[MAX_K], np.int32)


@compiled
def _raw(words: Any, slot: int) -> Any:
    return carray(pointer(_result(words, slot) + _NODES_OFFSET + 4 * words[MAX_K]), words[MAX_K], np.float32)


@compiled
def table_of(words: Any) -> Any:
    return words_at(words[TABLE], STATES + words[SLOTS])


@compiled
def scans_of(words: Any) -> Any:
    return filtered.host_scans_at(words[COLLECTIONS], words[SEARCHES], words[KEYS], words[SLOTS], words[MAX_K])


@compiled
def active_of(words: Any) -> Any:
    return carray(pointer(words[ACTIVE]), words[SLOTS], np.int32)


@compiled
def _command(words: Any, slot: int, status: int, line: int) -> None:
    """Queue a command for the next launch. A slot has at most one: a later command replaces the earlier status."""
    places = words_at(words[PLACES], words[SLOTS])
    first = places[slot] == 0
    if first:
        words[PENDING] += 1
        places[slot] = words[PENDING]
    command = words_at(words[COMMANDS] + 16 * (places[slot] - 1), 2)
    command[0] = slot | (status << 32)
    if first or line:
        command[1] = line


# ---- launches


@compiled
def failed(words: Any, kind: int, code: int) -> Any:
    """Record a failure in the handle. Returns False."""
    words[FAILURE], words[CODE] = kind, code
    return False


@compiled
def _write_slots(words: Any) -> Any:
    """Launch `write_slots` for the pending commands. Returns whether it succeeded."""
    one, count, shared_bytes = np.uint32(1), words[PENDING], np.uint32(_PREPARE_BYTES)
    grid, block = np.uint32(count), np.uint32(_WRITE_THREADS)
    code = call_int(
        words[LAUNCH],
        (words[WRITE], grid, one, one, block, one, one, shared_bytes, words[STREAM], words[ARGUMENTS], np.int64(0)),
    )  # fmt: skip
    if code:
        return failed(words, LAUNCH_FAILED, code)
    places, commands = words_at(words[PLACES], words[SLOTS]), words_at(words[COMMANDS], 2 * count)
    for i in range(count):
        places[commands[2 * i] & _WORD] = 0
    words[PENDING] = 0
    return True


@compiled
def begin_wait(words: Any) -> Any:
    """Start a wait for the device. Returns the start time."""
    now = monotonic_ns()
    words[POLL_AT] = now + words[POLL_NS]
    return now


@compiled
def poll_wait(words: Any, begin: int) -> Any:
    """Return the ns since the wait began, or FAILED after an error or a timeout; polls the driver from time to time."""
    now = monotonic_ns()
    if now < words[POLL_AT]:
        return now - begin
    words[POLL_AT] = now + words[POLL_NS]
    code = call_int(words[QUERY], (words[STREAM],))
    if code == 0 and load_acquire_u32(words[PROGRESS]) != words[LAUNCHES]:
        failed(words, NOT_REPORTED, 0)
    elif code != 0 and code != NOT_READY:
        failed(words, QUERY_FAILED, code)
    elif now - begin > words[TIMEOUT_NS]:
        failed(words, TIMED_OUT, 0)
    else:
        return now - begin
    return FAILED


@compiled
def _launch(words: Any, graph: int) -> Any:
    """Replay a graph and poll until the launch has ended. Returns whether it succeeded."""
    code = call_int(words[REPLAY], (graph, words[STREAM]))
    if code:
        return failed(words, REPLAY_FAILED, code)
    words[LAUNCHES] = expected = (words[LAUNCHES] + 1) & _WORD
    polls = words[INTERRUPT] != 0 and words[LIMIT] > 1
    begin, elapsed, poll_at = begin_wait(words), 0, 0
    # SYNC POINT: progress. The kernel stores it last, with release at system scope.
    while load_acquire_u32(words[PROGRESS]) != expected:
        if polls and elapsed >= poll_at:
            poll_at = elapsed + INTERRUPT_POLL_NS
            if call_int(words[INTERRUPT], (words[INTERRUPT_ARGUMENT],)):
                store_release_u32(words[DOORBELL], 1)
                polls = False
        elapsed = poll_wait(words, begin)
        if elapsed < 0:
            return False
    store_release_u32(words[DOORBELL], 0)
    total = load_acquire_u32(words[PROGRESS] + 4)
    words[EXTENDS] = (total - words[TOTAL_EXTENDS]) & _WORD
    words[TOTAL_EXTENDS] = total
    words[WAITED_NS] += monotonic_ns() - begin
    return True


# ---- the functions


@compiled
def _encoding(words: Any, collection: int) -> Any:
    return encodings_at(words[ENCODINGS])[collection]


@compiled
def _is_loaded(words: Any, collection: int) -> Any:
    return 0 <= collection < MAX_COLLECTIONS and _encoding(words, collection).dim != 0


@compiled
def accept_query(words: Any, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    """Assign a slot to a query and prepare it in the slot's staged line. Returns the slot, or INVALID."""
    if not _is_loaded(words, collection):
        return INVALID
    encoding = _encoding(words, collection)
    slot = slot_changes.next_free(table_of(words))
    query = carray(pointer(vector), encoding.dim, np.float32)
    line = carray(pointer(words[LINES] + slot * words[LINE_BYTES]), words[LINE_BYTES], np.uint8)
    if not write_query(query, encoding, line[4 * _HEAD_WORDS :]):
        return INVALID
    _start_query(words, slot, collection, k, top_m, width, patience)
    return slot


@compiled
def accept_in_place(words: Any, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    """Assign a slot to a query which the device prepares from a vector in its memory. Returns the slot, or INVALID."""
    if not _is_loaded(words, collection) or scans_of(words).collections[collection].degree == 0:
        return INVALID  # without a graph the host scans the rows
    slot = slot_changes.next_free(table_of(words))
    _start_query(words, slot, collection, k, top_m, width, patience)
    head = _head(words, slot)
    head[layout.VECTOR], head[layout.VECTOR + 1] = vector & _WORD, vector >> 32
    return slot


@compiled
def _start_query(words: Any, slot: int, collection: int, k: int, top_m: int, width: int, patience: int) -> None:
    """Write the head of a query's staged line and mark its slot as running."""
    scans = scans_of(words)
    degree = scans.collections[collection].degree
    filtered.start_query(scans.slots[slot], collection, k, degree == 0)
    layout.write_head(_head(words, slot), words[NEXT_TICKET], collection, degree, k, top_m, width, patience)
    words[NEXT_TICKET] = words[NEXT_TICKET] % _WORD + 1
    slot_changes.acquire(table_of(words), active_of(words), slot)


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    slot = accept_query(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID and not scans_of(words).slots[slot].scanning:
        _command(words, slot, _ACTIVE, words[DEVICE_LINES] + slot * words[LINE_BYTES])
    return slot


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit_in_place(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    slot = accept_in_place(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        line = words[DEVICE_LINES] + slot * words[LINE_BYTES]
        _command(words, slot, _ACTIVE, line | layout.LINE_IN_PLACE)
    return slot


@compiled
def apply_filter(words: Any, slot: int, allowed: int, allowed_count: int) -> Any:
    """Set a query's filter. Returns whether this switched it from a device graph search to a host scan."""
    scans, head = scans_of(words), _head(words, slot)
    search = scans.slots[slot]
    search.allowed, search.allowed_count = allowed, allowed_count
    if search.scanning:
        return False
    collection = scans.collections[np.int64(head[layout.COLLECTION_NUMBER])]
    length = filtered_top_m(np.int64(head[layout.TOP_M]), allowed_count, collection.size, words[MAX_K])
    if length:
        head[layout.K] = head[layout.TOP_M] = length
        head[layout.VISITED_BITS] = layout.visited_bits(length, collection.degree)
    else:
        search.scanning = 1
    return length == 0


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    if apply_filter(words, slot, allowed, allowed_count):
        _command(words, slot, _FREE, 0)
    return 0


@compiled
def _scan_step(words: Any, scans: Any, slot: int) -> Any:
    """Make one extend of a slot that the host scans. Returns whether it is finished."""
    search = scans.slots[slot]
    search.extends += 1
    store_release_u32(_result(words, slot) + _EXTENDS_OFFSET, search.extends)
    if not scan_rows(scans, slot):
        return False
    filtered.write_scan_result(scans, slot, _nodes(words, slot), _raw(words, slot))
    return True


@compiled
def _graph_search_done(words: Any, scans: Any, slot: int) -> Any:
    """Return whether a slot that the device searches is finished. Falls back to a scan if it found too few rows."""
    result = _result(words, slot)
    if words_at(words[SLOT_STATES] + 8 * SLOT_STATE_WORDS * slot, SLOT_STATE_WORDS)[ON_DEVICE]:
        return False
    if load_acquire_u32(result + _TICKET_OFFSET) != _head(words, slot)[layout.TICKET]:
        return False
    return found_enough(words, scans, slot)


@compiled
def found_enough(words: Any, scans: Any, slot: int) -> Any:
    """Return whether a finished graph search found enough allowed rows. If not, it falls back to a scan."""
    result, search = _result(words, slot), scans.slots[slot]
    if search.allowed == 0:
        return True
    found_nodes = _nodes(words, slot)[: np.int64(_head(words, slot)[layout.K])]
    walked, passing = filtered.count_allowed(search, found_nodes)
    size = scans.collections[search.collection].size
    if not found_too_few(search, passing, walked, passing, size, SIGMAS_COMPARE):
        return True
    search.scanning, search.extends = 1, load_acquire_u32(result + _EXTENDS_OFFSET)
    return False


@compiled
def report_finished(words: Any, report: int) -> Any:
    """Move finished slots from the active list to the report, behind its first two words, and make an extend of each
    slot that the host scans. Returns the number of finished slots."""
    table, active, scans = table_of(words), active_of(words), scans_of(words)
    kept = done = 0
    for i in range(table[ACTIVE_COUNT]):
        slot = active[i]
        scanning = scans.slots[slot].scanning
        if not (_scan_step(words, scans, slot) if scanning else _graph_search_done(words, scans, slot)):
            active[kept] = slot
            kept += 1
            continue
        slot_changes.finish(table, slot)
        finished = words_at(report + 16 + 16 * done, 2)
        finished[0], finished[1] = slot, load_acquire_u32(_result(words, slot) + _EXTENDS_OFFSET)
        done += 1
    table[ACTIVE_COUNT] = kept
    return done


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    table, active, counts, scans = table_of(words), active_of(words), words_at(report, 2), scans_of(words)
    count = table[ACTIVE_COUNT]
    highest, searching = -1, 0
    for i in range(count):
        if not scans.slots[active[i]].scanning:
            highest = max(highest, active[i])
            searching += 1
    counts[0], counts[1] = 1, 0
    # SYNC POINT: commands are launched only together with a replay, whose end is awaited: afterwards the device has
    # read them, and the host may overwrite them.
    if searching:
        if words[PENDING] and not _write_slots(words):
            return FAILED
        buckets = words_at(words[GRAPHS], 2 * words[BUCKETS])
        bucket = 0
        while buckets[2 * bucket] <= highest:
            bucket += 1
        if not _launch(words, buckets[2 * bucket + 1]):
            return FAILED
        counts[0], counts[1] = words[EXTENDS], buckets[2 * bucket] - searching
    return report_finished(words, report)


@c_function("int64(int64, int64, int64, int64)")
def read_result(handle: int, slot: int, ids: int, distances: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    if not scans_of(words).slots[slot].scanning and load_acquire_u32(_result(words, slot) + _INVALID_OFFSET):
        return INVALID
    scans, number = scans_of(words), np.int64(_head(words, slot)[layout.COLLECTION_NUMBER])
    search, collection = scans.slots[slot], scans.collections[number]
    factor = collection.factor
    offset = collection.offset
    k, names = search.k, words_at(words[IDS], MAX_COLLECTIONS)
    nodes, raw = _nodes(words, slot), _raw(words, slot)
    to_ids, to_distances = words_at(ids, k), carray(pointer(distances), k, np.float32)
    found = 0
    for i in range(k if search.scanning else np.int64(_head(words, slot)[layout.K])):
        node = np.int64(nodes[i])
        if node < 0 or found == k:
            break
        if may_be_result(search.allowed, node):
            to_ids[found] = node if names[number] == 0 else words_at(names[number] + 8 * node, 1)[0]
            to_distances[found] = np.float64(raw[i]) * factor + offset
            found += 1
    return found


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    words = words_at(handle, HANDLE_WORDS)
    slot_changes.change(table_of(words), active_of(words), slot, action)
    if scans_of(words).slots[slot].scanning and action != RELEASE:
        return 0  # the device does not have this slot
    _command(words, slot, _PAUSED if action == PAUSE else _ACTIVE if action == RESUME else _FREE, 0)
    return 0


@c_function("int64(int64, int64)")
def launch(handle: int, graph: int) -> Any:
    """Replay a graph and wait for its end. Returns 0 or FAILED."""
    return 0 if _launch(words_at(handle, HANDLE_WORDS), graph) else FAILED
