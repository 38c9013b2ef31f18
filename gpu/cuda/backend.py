"""The CUDA engine's functions for compiled loops (`gpu.engine`), and the handle that they take.

A step is: the commands that admissions, pauses and releases have left in pinned memory, as one launch of `write_slots`;
one replay of the graph of the smallest bucket that covers the active slots; looking at a pinned word until it has
ended. The driver's functions are called by address, and nothing here synchronises. A query's vector is prepared in its
slot's staged line, in pinned memory too, from where `write_slots` fetches it; results are read where the device put
them.
"""

from typing import Any

import numpy as np
from numba import carray

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu.extend.keys import may_be_result
from gpu.cpu.extend.passing import compare, walk_length
from gpu.cpu.queries import write_query
from gpu.cpu.simd import pointer
from gpu.cpu.tables import ALLOWED, DEGREE, DIM, FACTOR, FORM_FIELDS, OFFSET, PASSING, SCANNING, SIZE
from gpu.cpu.tables import EXTENDS as SPENT
from gpu.cpu.tables import K as WANTED
from gpu.cuda import layout
from gpu.cuda import passing as among
from gpu.cuda.driver import NOT_READY
from gpu.engine import FAILED, INVALID, PAUSE, RELEASE, RESUME
from gpu.instructions import call, load_acquire, monotonic_ns, store_release, words_at
from gpu.slots import ACTIVE_COUNT, MAX_COLLECTIONS, STATES

# The handle, int64. TABLE, ACTIVE: of the slot table, addresses. FORMS, IDS: addresses of tables by number, the
# latter of the collections' ids (0: row numbers). COLLECTIONS, SEARCHES, KEYS: addresses of what `gpu.cuda.passing`
# has. LINES: the staged lines, LINE_BYTES each, as the host and as the device address them. COMMANDS: int64 [slots,
# 2], of which PENDING are for the next launch; PLACES, int64 [slots]: one more than the place of a slot's command, 0:
# none. RESULTS, PROGRESS, DOORBELL: pinned memory. GRAPHS: address of `LaunchGraphs.table`. REPLAY, LAUNCH, QUERY:
# the driver's entry points. WRITE, ARGUMENTS: the kernel `write_slots` and addresses of its arguments. STAY: address
# of what `gpu.cuda.resident` has; SEATS: of int64 [slots, SEAT_WORDS], what it knows of each slot: the first word,
# IS_OUT, is whether the slot is the device's. ARRIVED, and what it takes: asked while a launch of several extends
# runs, 0: nobody is. TIME: two words for the clock. LAUNCHES and TOTAL_EXTENDS so far; EXTENDS of the last launch,
# WAITED_NS for all. A wait asks the driver every LOOK_NS whether something failed, next at LOOK_AT, and is given up
# after GIVE_UP_NS. FAILURE: which call failed, and its CODE.
(
    TABLE,
    ACTIVE,
    SLOTS,
    FORMS,
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
    STAY,
    SEATS,
    ARRIVED,
    ARRIVED_ARGUMENT,
    TIME,
    LOOK_NS,
    LOOK_AT,
    GIVE_UP_NS,
    NEXT_TICKET,
    LAUNCHES,
    TOTAL_EXTENDS,
    EXTENDS,
    WAITED_NS,
    FAILURE,
    CODE,
) = range(43)
HANDLE_WORDS = 43
IS_OUT, SEAT_WORDS = 0, 5

NO_FAILURE, LAUNCH_FAILED, REPLAY_FAILED, QUERY_FAILED, SILENT, HANGS, LOST = range(7)
"""What went wrong: a call of the driver; a launch that ended without a word; one that does not end; one that ended with
fewer records than slots that it took."""

_WORD = 0xFFFFFFFF
_HEAD_WORDS = layout.SLOT.itemsize // 4
_FREE, _ACTIVE, _PAUSED = layout.FREE, layout.ACTIVE, layout.PAUSED
_TICKET_OFFSET, _EXTENDS_OFFSET, _NODES_OFFSET = 0, 4, layout.RESULT.itemsize
_WRITE_THREADS = layout.WRITE_THREADS
assert layout.SLOT.names is not None
assert layout.SLOT.names[: layout.VISITED_BITS + 1] == (
    "status", "ticket", "collection", "k", "top_m", "search_width", "patience", "visited_bits",
)  # fmt: skip
assert [layout.COMMAND.fields[name][1] for name in ("slot", "status", "line")] == [0, 4, 8]  # type: ignore[index]


@compiled
def _head(own: Any, slot: int) -> Any:
    """The SLOT of a staged line, uint32: what the slot's query asks, as long as it has the slot."""
    return carray(pointer(own[LINES] + slot * own[LINE_BYTES]), _HEAD_WORDS, np.uint32)


@compiled
def _result(own: Any, slot: int) -> Any:
    return own[RESULTS] + slot * own[RESULT_BYTES]


@compiled
def _nodes(own: Any, slot: int) -> Any:
    return carray(pointer(_result(own, slot) + _NODES_OFFSET), own[MAX_K], np.int32)


@compiled
def _raw(own: Any, slot: int) -> Any:
    return carray(pointer(_result(own, slot) + _NODES_OFFSET + 4 * own[MAX_K]), own[MAX_K], np.float32)


@compiled
def table_of(own: Any) -> Any:
    return words_at(own[TABLE], STATES + own[SLOTS])


@compiled
def compared_of(own: Any) -> Any:
    return among.compared_at(own[COLLECTIONS], own[SEARCHES], own[KEYS], own[SLOTS], own[MAX_K])


@compiled
def active_of(own: Any) -> Any:
    return carray(pointer(own[ACTIVE]), own[SLOTS], np.int32)


@compiled
def _command(own: Any, slot: int, status: int, line: int) -> None:
    """Leave a command for the next launch. A slot has one at most: a later one overwrites what the earlier said."""
    places = words_at(own[PLACES], own[SLOTS])
    first = places[slot] == 0
    if first:
        own[PENDING] += 1
        places[slot] = own[PENDING]
    command = words_at(own[COMMANDS] + 16 * (places[slot] - 1), 2)
    command[0] = slot | (status << 32)
    if first or line:
        command[1] = line


# ---- launches


@compiled
def failed(own: Any, what: int, code: int) -> Any:
    """False; what went wrong stays in the handle."""
    own[FAILURE], own[CODE] = what, code
    return False


@compiled
def _write_slots(own: Any) -> Any:
    """Launch what carries out the commands. Whether that could be."""
    one, count, none = np.uint32(1), own[PENDING], np.uint32(0)
    grid, block = np.uint32(count), np.uint32(_WRITE_THREADS)
    code = call(
        own[LAUNCH], (own[WRITE], grid, one, one, block, one, one, none, own[STREAM], own[ARGUMENTS], np.int64(0))
    )  # fmt: skip
    if code:
        return failed(own, LAUNCH_FAILED, code)
    places, commands = words_at(own[PLACES], own[SLOTS]), words_at(own[COMMANDS], 2 * count)
    for i in range(count):
        places[commands[2 * i] & _WORD] = 0
    own[PENDING] = 0
    return True


@compiled
def begin_wait(own: Any) -> Any:
    """The time at which a wait for the device begins."""
    now = monotonic_ns(own[TIME])
    own[LOOK_AT] = now + own[LOOK_NS]
    return now


@compiled
def waited(own: Any, begin: int) -> Any:
    """Nanoseconds since the wait began; FAILED, once the launch that is under way cannot end any more."""
    now = monotonic_ns(own[TIME])
    if now < own[LOOK_AT]:
        return now - begin
    own[LOOK_AT] = now + own[LOOK_NS]
    code = call(own[QUERY], (own[STREAM],))
    if code == 0 and load_acquire(own[PROGRESS]) != own[LAUNCHES]:
        failed(own, SILENT, 0)
    elif code != 0 and code != NOT_READY:
        failed(own, QUERY_FAILED, code)
    elif now - begin > own[GIVE_UP_NS]:
        failed(own, HANGS, 0)
    else:
        return now - begin
    return FAILED


@compiled
def _launch(own: Any, graph: int) -> Any:
    """Replay, and look at the pinned word until the launch has ended. Whether it did."""
    code = call(own[REPLAY], (graph, own[STREAM]))
    if code:
        return failed(own, REPLAY_FAILED, code)
    own[LAUNCHES] = wanted = (own[LAUNCHES] + 1) & _WORD
    asks = own[ARRIVED] != 0 and own[LIMIT] > 1
    begin = begin_wait(own)
    # SYNC POINT: progress. The kernel stores it last, with release at system scope.
    while load_acquire(own[PROGRESS]) != wanted:
        if asks and call(own[ARRIVED], (own[ARRIVED_ARGUMENT],)):
            store_release(own[DOORBELL], 1)
            asks = False
        if waited(own, begin) < 0:
            return False
    store_release(own[DOORBELL], 0)
    total = load_acquire(own[PROGRESS] + 4)
    own[EXTENDS] = (total - own[TOTAL_EXTENDS]) & _WORD
    own[TOTAL_EXTENDS] = total
    own[WAITED_NS] += monotonic_ns(own[TIME]) - begin
    return True


# ---- the functions


@compiled
def take_in(own: Any, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    """Prepare a query in the staged line of the slot that it gets, or INVALID."""
    if not 0 <= collection < MAX_COLLECTIONS:
        return INVALID
    form = words_at(own[FORMS] + 8 * FORM_FIELDS * collection, FORM_FIELDS)
    if form[DIM] == 0:
        return INVALID
    table = table_of(own)
    slot = slot_changes.next_free(table)
    query = carray(pointer(vector), form[DIM], np.float32)
    line = carray(pointer(own[LINES] + slot * own[LINE_BYTES]), own[LINE_BYTES], np.uint8)
    if not write_query(query, form, line[4 * _HEAD_WORDS :]):
        return INVALID
    compared = compared_of(own)
    degree = compared.collections[collection, DEGREE]
    among.begin(compared.slots[slot], collection, k, degree == 0)
    layout.write_head(_head(own, slot), own[NEXT_TICKET], collection, degree, k, top_m, width, patience)
    own[NEXT_TICKET] = own[NEXT_TICKET] % _WORD + 1
    slot_changes.take(table, active_of(own), slot)
    return slot


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    own = words_at(handle, HANDLE_WORDS)
    slot = take_in(own, vector, collection, k, top_m, width, patience)
    if slot != INVALID and not compared_of(own).slots[slot, SCANNING]:
        _command(own, slot, _ACTIVE, own[DEVICE_LINES] + slot * own[LINE_BYTES])
    return slot


@compiled
def keep_to(own: Any, slot: int, allowed: int, passing: int) -> Any:
    """Restrict a query. Whether the host compares its rows from now on."""
    compared, head = compared_of(own), _head(own, slot)
    search = compared.slots[slot]
    search[ALLOWED], search[PASSING] = allowed, passing
    if search[SCANNING]:
        return False
    about = compared.collections[np.int64(head[layout.COLLECTION_NUMBER])]
    length = walk_length(np.int64(head[layout.TOP_M]), passing, about[SIZE], own[MAX_K])
    if length:
        head[layout.K] = head[layout.TOP_M] = length
        head[layout.VISITED_BITS] = layout.visited_bits(length, about[DEGREE])
    else:
        search[SCANNING] = 1
    return length == 0


@c_function("int64(int64, int64, int64, int64)")
def restrict(handle: int, slot: int, allowed: int, passing: int) -> Any:
    own = words_at(handle, HANDLE_WORDS)
    if keep_to(own, slot, allowed, passing):
        _command(own, slot, _FREE, 0)
    return 0


@compiled
def _compare(own: Any, compared: Any, slot: int) -> Any:
    """One extend of a slot whose rows are compared. Whether it is done."""
    search = compared.slots[slot]
    search[SPENT] += 1
    store_release(_result(own, slot) + _EXTENDS_OFFSET, search[SPENT])
    if not compare(compared, slot):
        return False
    among.write_compared(compared, slot, _nodes(own, slot), _raw(own, slot))
    return True


@compiled
def _walked(own: Any, compared: Any, slot: int) -> Any:
    """Whether a slot that the device searches is done: too little may have been found, and is compared then."""
    result, search = _result(own, slot), compared.slots[slot]
    if words_at(own[SEATS] + 8 * SEAT_WORDS * slot, SEAT_WORDS)[IS_OUT]:
        return False
    if load_acquire(result + _TICKET_OFFSET) != _head(own, slot)[layout.TICKET]:
        return False
    if search[ALLOWED] == 0:
        return True
    walked = _nodes(own, slot)[: np.int64(_head(own, slot)[layout.K])]
    if among.passed(search, walked) >= min(search[WANTED], search[PASSING]):
        return True
    search[SCANNING], search[SPENT] = 1, load_acquire(result + _EXTENDS_OFFSET)
    return False


@compiled
def finish_done(own: Any, report: int) -> Any:
    """Take what is done out of the active slots and into the report, after the two words that it begins with; rows that
    the host compares are compared, an extend's. How many are done."""
    table, active, compared = table_of(own), active_of(own), compared_of(own)
    kept = done = 0
    for i in range(table[ACTIVE_COUNT]):
        slot = active[i]
        scanning = compared.slots[slot, SCANNING]
        if not (_compare(own, compared, slot) if scanning else _walked(own, compared, slot)):
            active[kept] = slot
            kept += 1
            continue
        slot_changes.finish(table, slot)
        finished = words_at(report + 16 + 16 * done, 2)
        finished[0], finished[1] = slot, load_acquire(_result(own, slot) + _EXTENDS_OFFSET)
        done += 1
    table[ACTIVE_COUNT] = kept
    return done


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    own = words_at(handle, HANDLE_WORDS)
    table, active, told, compared = table_of(own), active_of(own), words_at(report, 2), compared_of(own)
    count = table[ACTIVE_COUNT]
    highest, walking = -1, 0
    for i in range(count):
        if not compared.slots[active[i], SCANNING]:
            highest = max(highest, active[i])
            walking += 1
    told[0], told[1] = 1, 0
    # SYNC POINT: the replay's end is waited for, and with it that commands have been read; without a replay they stay
    # here, for the host would write over what the device may be reading yet.
    if walking:
        if own[PENDING] and not _write_slots(own):
            return FAILED
        buckets = words_at(own[GRAPHS], 2 * own[BUCKETS])
        bucket = 0
        while buckets[2 * bucket] <= highest:
            bucket += 1
        if not _launch(own, buckets[2 * bucket + 1]):
            return FAILED
        told[0], told[1] = own[EXTENDS], buckets[2 * bucket] - walking
    return finish_done(own, report)


@c_function("int64(int64, int64, int64, int64)")
def harvest(handle: int, slot: int, ids: int, distances: int) -> Any:
    own = words_at(handle, HANDLE_WORDS)
    compared, number = compared_of(own), np.int64(_head(own, slot)[layout.COLLECTION_NUMBER])
    search, about = compared.slots[slot], compared.collections[number]
    factor, offset = np.int64(about[FACTOR]).view(np.float64), np.int64(about[OFFSET]).view(np.float64)
    k, nodes, raw, names = search[WANTED], _nodes(own, slot), _raw(own, slot), words_at(own[IDS], MAX_COLLECTIONS)
    to_ids, to_distances = words_at(ids, k), carray(pointer(distances), k, np.float32)
    found = 0
    for i in range(k if search[SCANNING] else np.int64(_head(own, slot)[layout.K])):
        node = np.int64(nodes[i])
        if node < 0 or found == k:
            break
        if may_be_result(search[ALLOWED], node):
            to_ids[found] = node if names[number] == 0 else words_at(names[number] + 8 * node, 1)[0]
            to_distances[found] = np.float64(raw[i]) * factor + offset
            found += 1
    return found


@c_function("int64(int64, int64, int64)")
def change(handle: int, slot: int, what: int) -> Any:
    own = words_at(handle, HANDLE_WORDS)
    slot_changes.change(table_of(own), active_of(own), slot, what)
    if compared_of(own).slots[slot, SCANNING] and what != RELEASE:
        return 0  # the device knows nothing of it
    _command(own, slot, _PAUSED if what == PAUSE else _ACTIVE if what == RESUME else _FREE, 0)
    return 0


@c_function("int64(int64, int64)")
def launch(handle: int, graph: int) -> Any:
    """Replay a graph, whichever slots are active, and wait for its end. 0, or FAILED."""
    return 0 if _launch(words_at(handle, HANDLE_WORDS), graph) else FAILED
