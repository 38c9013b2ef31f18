"""The CUDA engine's C functions for compiled loops (`gpu.engine.Backend`), and the host of their handle.

A step launches `write_slots` for the commands that admissions, pauses and releases have written to pinned memory,
replays the CUDA graph of the smallest bucket that covers the active slots, and polls a pinned word until the launch has
ended. The driver's functions are called by address; nothing here synchronises. Queries are prepared in their slot's
staged line in pinned memory, which `write_slots` copies to the device; results are read from pinned memory.
"""

from typing import Any

import numpy as np

from gpu import slot_changes
from gpu.compiled import c_function, compiled, counted
from gpu.cpu.extend.filtered import SIGMAS_COMPARE, filtered_top_m, found_too_few, scan_rows
from gpu.cpu.extend.keys import may_be_result
from gpu.cpu.queries import write_query
from gpu.cuda import filtered, layout
from gpu.cuda.driver import NOT_READY
from gpu.cuda.filtered import scans_of
from gpu.cuda.host import Host, host_at
from gpu.cuda.layout import ResultHead, SlotHead, result_head_at, slot_head_at
from gpu.engine import FAILED, INVALID, PAUSE, RELEASE, RESUME, Report, report_at
from gpu.slots import MAX_COLLECTIONS, SlotStates, slot_states_at
from ipc.native.arrays import float32_at, int32_at, uint8_at
from ipc.native.arrays import int64_at as words_at
from ipc.native.intrinsics import call_int, monotonic_ns
from ipc.native.records import address

NO_FAILURE, LAUNCH_FAILED, REPLAY_FAILED, QUERY_FAILED, NOT_REPORTED, TIMED_OUT, RECORDS_MISSING = range(7)
"""Kinds of failure: a failed driver call (three of them); a launch that ended without reporting progress; a launch that
timed out; a resident launch that ended without a record of every slot that it took."""

INTERRUPT_POLL_NS = 2_000
"""Interval of interrupt polls, each of which costs twenty polls of the device's host."""

_WORD = 0xFFFFFFFF
_HEAD_BYTES, _RESULT_HEAD_BYTES = layout.SLOT.itemsize, layout.RESULT.itemsize
_FREE, _ACTIVE, _PAUSED = layout.FREE, layout.ACTIVE, layout.PAUSED
_WRITE_THREADS, _PREPARE_BYTES = layout.WRITE_THREADS, layout.PREPARE_BYTES


@compiled
def _head(host: Host, slot: int) -> SlotHead:
    """Return the head of a staged line: the parameters of the slot's query."""
    return slot_head_at(host.lines + slot * host.line_bytes)


@compiled
def _result(host: Host, slot: int) -> ResultHead:
    return result_head_at(host.results + slot * host.result_bytes)


@counted
def _nodes(host: Host, slot: int) -> Any:
    return int32_at(address(_result(host, slot)) + _RESULT_HEAD_BYTES, host.max_k)


@counted
def _raw(host: Host, slot: int) -> Any:
    return float32_at(address(_result(host, slot)) + _RESULT_HEAD_BYTES + 4 * host.max_k, host.max_k)


@compiled
def table_of(host: Host) -> SlotStates:
    return slot_states_at(host.table)


@counted
def active_of(host: Host) -> Any:
    return int32_at(host.active, host.slots)


@compiled
def _command(host: Host, slot: int, status: int, line: int) -> None:
    """Queue a command for the next launch. A slot has at most one: a later command replaces the earlier status."""
    places = host.places
    first = places[slot] == 0
    if first:
        host.pending += 1
        places[slot] = host.pending
    command = host.commands[places[slot] - 1]
    command.slot, command.status = slot, status
    if first or line:
        command.line = line


# ---- launches


@compiled
def failed(host: Host, kind: int, code: int) -> Any:
    """Record a failure in the handle. Returns False."""
    host.failure, host.code = kind, code
    return False


@compiled
def _write_slots(host: Host) -> Any:
    """Launch `write_slots` for the pending commands. Returns whether it succeeded."""
    one, count, shared_bytes = np.uint32(1), host.pending, np.uint32(_PREPARE_BYTES)
    grid, block = np.uint32(count), np.uint32(_WRITE_THREADS)
    code = call_int(
        host.launch,
        (host.write, grid, one, one, block, one, one, shared_bytes, host.stream, host.arguments, np.int64(0)),
    )  # fmt: skip
    if code:
        return failed(host, LAUNCH_FAILED, code)
    for i in range(count):
        host.places[host.commands[i].slot] = 0
    host.pending = 0
    return True


@compiled
def begin_wait(host: Host) -> Any:
    """Start a wait for the device. Returns the start time."""
    now = monotonic_ns()
    host.poll_at_ns = now + host.poll_ns
    return now


@compiled
def poll_wait(host: Host, begin: int) -> Any:
    """Return the ns since the wait began, or FAILED after an error or a timeout; polls the driver from time to time."""
    now = monotonic_ns()
    if now < host.poll_at_ns:
        return now - begin
    host.poll_at_ns = now + host.poll_ns
    code = call_int(host.query, (host.stream,))
    if code == 0 and host.progress[0].launches != host.launches:
        failed(host, NOT_REPORTED, 0)
    elif code != 0 and code != NOT_READY:
        failed(host, QUERY_FAILED, code)
    elif now - begin > host.timeout_ns:
        failed(host, TIMED_OUT, 0)
    else:
        return now - begin
    return FAILED


@compiled
def _launch(host: Host, graph: int) -> Any:
    """Replay a graph and poll until the launch has ended. Returns whether it succeeded."""
    code = call_int(host.replay, (graph, host.stream))
    if code:
        return failed(host, REPLAY_FAILED, code)
    host.launches = expected = (host.launches + 1) & _WORD
    polls = host.interrupt != 0 and host.limit > 1
    begin, elapsed, poll_at = begin_wait(host), 0, 0
    # SYNC POINT: progress. The kernel stores it last, with release at system scope.
    while host.progress[0].launches != expected:
        if polls and elapsed >= poll_at:
            poll_at = elapsed + INTERRUPT_POLL_NS
            if call_int(host.interrupt, (host.interrupt_argument,)):
                host.doorbell[0] = 1
                polls = False
        elapsed = poll_wait(host, begin)
        if elapsed < 0:
            return False
    host.doorbell[0] = 0
    total = host.progress[0].extends
    host.extends = (total - host.total_extends) & _WORD
    host.total_extends = total
    host.waited_ns += monotonic_ns() - begin
    return True


# ---- the functions


@compiled
def _is_loaded(host: Host, collection: int) -> Any:
    return 0 <= collection < MAX_COLLECTIONS and host.encodings[collection].dim != 0


@compiled
def accept_query(host: Host, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    """Assign a slot to a query and prepare it in the slot's staged line. Returns the slot, or INVALID."""
    if not _is_loaded(host, collection):
        return INVALID
    encoding = host.encodings[collection]
    slot = slot_changes.next_free(table_of(host))
    query = float32_at(vector, encoding.dim)
    line = uint8_at(host.lines + slot * host.line_bytes, host.line_bytes)
    if not write_query(query, encoding, line[_HEAD_BYTES:]):
        return INVALID
    _start_query(host, slot, collection, k, top_m, width, patience)
    return slot


@compiled
def accept_in_place(host: Host, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    """Assign a slot to a query which the device prepares from a vector in its memory. Returns the slot, or INVALID."""
    if not _is_loaded(host, collection) or scans_of(host).collections[collection].degree == 0:
        return INVALID  # without a graph the host scans the rows
    slot = slot_changes.next_free(table_of(host))
    _start_query(host, slot, collection, k, top_m, width, patience)
    _head(host, slot).vector = vector
    return slot


@compiled
def _start_query(host: Host, slot: int, collection: int, k: int, top_m: int, width: int, patience: int) -> None:
    """Write the head of a query's staged line and mark its slot as running."""
    scans = scans_of(host)
    degree = scans.collections[collection].degree
    filtered.start_query(scans.slots[slot], collection, k, degree == 0)
    layout.write_head(_head(host, slot), host.next_ticket, collection, degree, k, top_m, width, patience)
    host.next_ticket = host.next_ticket % _WORD + 1
    slot_changes.acquire(table_of(host), active_of(host), slot)


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    host = host_at(handle)
    slot = accept_query(host, vector, collection, k, top_m, width, patience)
    if slot != INVALID and not scans_of(host).slots[slot].scanning:
        _command(host, slot, _ACTIVE, host.device_lines + slot * host.line_bytes)
    return slot


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit_in_place(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    host = host_at(handle)
    slot = accept_in_place(host, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        line = host.device_lines + slot * host.line_bytes
        _command(host, slot, _ACTIVE, line | layout.LINE_IN_PLACE)
    return slot


@compiled
def apply_filter(host: Host, slot: int, allowed: int, allowed_count: int) -> Any:
    """Set a query's filter. Returns whether this switched it from a device graph search to a host scan."""
    scans, head = scans_of(host), _head(host, slot)
    search = scans.slots[slot]
    search.allowed, search.allowed_count = allowed, allowed_count
    if search.scanning:
        return False
    collection = scans.collections[head.collection]
    length = filtered_top_m(head.top_m, allowed_count, collection.size, host.max_k)
    if length:
        head.k = head.top_m = length
        head.visited_bits = layout.visited_bits(length, collection.degree)
    else:
        search.scanning = 1
    return length == 0


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    host = host_at(handle)
    if apply_filter(host, slot, allowed, allowed_count):
        _command(host, slot, _FREE, 0)
    return 0


@compiled
def _scan_step(host: Host, scans: Any, slot: int) -> Any:
    """Make one extend of a slot that the host scans. Returns whether it is finished."""
    search = scans.slots[slot]
    search.extends += 1
    _result(host, slot).extends = search.extends
    if not scan_rows(scans, slot):
        return False
    filtered.write_scan_result(scans, slot, _nodes(host, slot), _raw(host, slot))
    return True


@compiled
def _graph_search_done(host: Host, scans: Any, slot: int) -> Any:
    """Return whether a slot that the device searches is finished. Falls back to a scan if it found too few rows."""
    if host.slot_states[slot].on_device or _result(host, slot).ticket != _head(host, slot).ticket:
        return False
    return found_enough(host, scans, slot)


@compiled
def found_enough(host: Host, scans: Any, slot: int) -> Any:
    """Return whether a finished graph search found enough allowed rows. If not, it falls back to a scan."""
    search = scans.slots[slot]
    if search.allowed == 0:
        return True
    found_nodes = _nodes(host, slot)[: _head(host, slot).k]
    walked, passing = filtered.count_allowed(search, found_nodes)
    size = scans.collections[search.collection].size
    if not found_too_few(search, passing, walked, passing, size, SIGMAS_COMPARE):
        return True
    search.scanning, search.extends = 1, _result(host, slot).extends
    return False


@compiled
def report_finished(host: Host, report: Report) -> Any:
    """Move finished slots from the active list to the report, and make an extend of each slot that the host scans.

    Returns the number of finished slots.
    """
    table, active, scans = table_of(host), active_of(host), scans_of(host)
    kept = done = 0
    for i in range(table.active_count):
        slot = active[i]
        scanning = scans.slots[slot].scanning
        if not (_scan_step(host, scans, slot) if scanning else _graph_search_done(host, scans, slot)):
            active[kept] = slot
            kept += 1
            continue
        slot_changes.finish(table, slot)
        finished = report.finished[done]
        finished.slot, finished.extends = slot, _result(host, slot).extends
        done += 1
    table.active_count = kept
    return done


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    host = host_at(handle)
    active, scans, written = active_of(host), scans_of(host), report_at(report)
    count = table_of(host).active_count
    highest, searching = -1, 0
    for i in range(count):
        if not scans.slots[active[i]].scanning:
            highest = max(highest, active[i])
            searching += 1
    written.extends, written.padded = 1, 0
    # SYNC POINT: commands are launched only together with a replay, whose end is awaited: afterwards the device has
    # read them, and the host may overwrite them.
    if searching:
        if host.pending and not _write_slots(host):
            return FAILED
        number = 0
        while host.graphs[number].bucket <= highest:
            number += 1
        if not _launch(host, host.graphs[number].graph):
            return FAILED
        written.extends, written.padded = host.extends, host.graphs[number].bucket - searching
    return report_finished(host, written)


@c_function("int64(int64, int64, int64, int64)")
def read_result(handle: int, slot: int, ids: int, distances: int) -> Any:
    host = host_at(handle)
    search = host.searches[slot]
    if not search.scanning and _result(host, slot).invalid:
        return INVALID
    collection, names, k = host.collections[search.collection], host.ids[search.collection], search.k
    nodes, raw = _nodes(host, slot), _raw(host, slot)
    to_ids, to_distances = words_at(ids, k), float32_at(distances, k)
    count = 0
    for i in range(k if search.scanning else _head(host, slot).k):
        node = np.int64(nodes[i])
        if node < 0 or count == k:
            break
        if may_be_result(search.allowed, node):
            to_ids[count] = node if names == 0 else words_at(names + 8 * node, 1)[0]
            to_distances[count] = np.float64(raw[i]) * collection.factor + collection.offset
            count += 1
    return count


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    host = host_at(handle)
    slot_changes.change(table_of(host), active_of(host), slot, action)
    if scans_of(host).slots[slot].scanning and action != RELEASE:
        return 0  # the device does not have this slot
    _command(host, slot, _PAUSED if action == PAUSE else _ACTIVE if action == RESUME else _FREE, 0)
    return 0


@c_function("int64(int64, int64)")
def launch(handle: int, graph: int) -> Any:
    """Replay a graph and wait for its end. Returns 0 or FAILED."""
    return 0 if _launch(host_at(handle), graph) else FAILED
