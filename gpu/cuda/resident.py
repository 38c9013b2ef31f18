"""The CUDA engine's C functions for its resident form, a persistent kernel (gpu/kernels/resident.cu).

The host submits a slot by pushing an entry to one of two rings, and controls it by its goal, the number of extends that
its query may reach: 0 pauses the query, a larger goal resumes it. The device owns a slot from its entry to its record;
meanwhile the host writes only its goal. As in any engine the caller assigns slots; the device takes entries from the
rings as blocks become free, prioritised queries first.

With a limit of one extend per launch, every active query is submitted for each extend, and the call waits for all of
them. With a higher limit, a query is submitted once and runs to its end; `extend` returns when a query has finished or
on an interrupt.

`extend` does nothing for queries that merely run: with hundreds of them, a pass over all would take longer than the
rest of a query's work on the host. Of pinned memory, in lines of 64 bytes, a query of d float32 and k results takes

    the host's writes     its line, 2 + d/16; an entry and a goal, 1/16 each if their neighbours come together
    the host's reads      nodes and distances, k/16 each, both at least 1; a record, 1/8 to 1
    the device's reads    its line; a goal in every extend; rings and doorbell, polled for all blocks by one warp
    the device's writes   head, nodes and distances of its result; a record

so 8 lines written at 96 dimensions and 50 at 768, and 2 to 3 read. Of a query whose vector lies in the device's memory
only the head of the line is written and read: 2 lines at any dimension. The host has in its cache what it wrote last,
unless the device has read it since.

A launch ends after its lifetime. Slots are then recorded in their current state, entries may remain in the rings, and
the next `extend` launches again if needed. `stop` ends a launch at once, before device memory is allocated or freed.
"""

from typing import Any

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cuda import backend
from gpu.cuda.backend import (
    accept_in_place,
    accept_query,
    active_of,
    apply_filter,
    begin_wait,
    failed,
    found_enough,
    poll_wait,
    report_finished,
    table_of,
)
from gpu.cuda.filtered import scans_of
from gpu.cuda.host import Host, Resident, host_at
from gpu.cuda.layout import (
    DECODE_RING,
    IS_DONE,
    IS_IN_PLACE,
    IS_NEW,
    LAP_SHIFT,
    MAX_LAP,
    PREFILL_RING,
    SLOT_BITS,
)
from gpu.engine import FAILED, INVALID, RELEASE, RESUME, Report, report_at
from gpu.slots import SlotState
from ipc.native.intrinsics import call_int, monotonic_ns

FINISHED_PER_SLOT = 3  # at most: collected before an extend, resumed with a result, and collected during it
_WORD = 0xFFFFFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_UNLIMITED = _WORD  # a goal that no query reaches
_ACTIVE, _PAUSED = int(SlotState.ACTIVE), int(SlotState.PAUSED)


@compiled
def _push(host: Host, resident: Resident, slot: int) -> None:
    """Submit a slot to the device."""
    state = host.slot_states[slot]
    ring = PREFILL_RING if state.prioritized else DECODE_RING
    position = resident.pushed[ring]
    entry = (position // resident.entries % MAX_LAP + 1) << LAP_SHIFT | state.new | slot
    # SYNC POINT: a reader that loads the entry with acquire sees the slot's line and goal.
    resident.rings[ring * resident.entries + position % resident.entries] = entry
    resident.pushed[ring] = (position + 1) & _WORD
    state.new, state.on_device = 0, True
    resident.in_flight += 1


@compiled
def _enqueue(host: Host, resident: Resident, slot: int) -> None:
    """Have the next `extend` look at a slot."""
    state = host.slot_states[slot]
    if not state.in_queue:
        state.in_queue = True
        resident.queue[resident.queued] = slot
        resident.queued += 1


@compiled
def _begin(host: Host, slot: int, flags: int) -> None:
    """Begin the query of a slot that was just assigned; `flags`: of its first entry."""
    state = host.slot_states[slot]
    state.on_device = state.done = state.prioritized = False
    state.new, state.reached, state.place = flags, 0, table_of(host).active_count - 1
    _enqueue(host, host.resident, slot)


@compiled
def _add_finished(host: Host, resident: Resident, slot: int) -> None:
    resident.finished[resident.finished_count] = slot
    resident.finished_count += 1


@compiled
def _collect(host: Host, resident: Resident) -> None:
    """Consume the device's records and take their slots back.

    Active ones without a result (after the end of a launch, or a pause that was revoked) are submitted again.
    """
    table = table_of(host)
    while True:
        record = resident.records[resident.seen % resident.entries]
        # SYNC POINT: the slot's result and state, written by the device before, are visible.
        word = record.slot
        if word >> LAP_SHIFT != resident.seen // resident.entries % MAX_LAP + 1:
            return
        resident.seen = (resident.seen + 1) & _WORD
        slot, extends = word & _SLOT_MASK, record.extends
        state = host.slot_states[slot]
        resident.advanced += extends - state.reached
        state.on_device, state.reached = False, extends
        resident.in_flight -= 1
        if word & IS_DONE:
            state.done = True
        if table.states[slot] != _ACTIVE:
            continue
        if state.done:
            _add_finished(host, resident, slot)
        else:
            _enqueue(host, resident, slot)


@compiled
def _end_launch(host: Host, resident: Resident) -> Any:
    """Register the end of a launch. Returns whether every slot that it took has been recorded."""
    resident.running = False
    untaken = (resident.pushed[0] + resident.pushed[1] - host.progress[0].taken) & _WORD
    if host.progress[0].recorded != resident.seen or untaken != resident.in_flight:
        return failed(host, backend.RECORDS_MISSING, resident.in_flight - untaken)
    return True


@compiled
def _poll(host: Host, resident: Resident) -> Any:
    """Consume records, and launch if slots are submitted but no launch is running. Returns whether it succeeded."""
    if resident.running and host.progress[0].launches == host.launches:  # its last records precede the progress word
        _collect(host, resident)
        if not _end_launch(host, resident):
            return False
    if resident.in_flight and not resident.running:
        code = call_int(host.replay, (host.graphs[0].graph, host.stream))
        if code:
            return failed(host, backend.REPLAY_FAILED, code)
        host.launches = (host.launches + 1) & _WORD
        resident.running = True
    _collect(host, resident)
    return True


@compiled
def _submit(host: Host, resident: Resident) -> None:
    """Set the goals of queued slots and submit them; with a limit of one extend, of all active slots."""
    table, active, scans = table_of(host), active_of(host), scans_of(host)
    single = host.limit == 1
    for i in range(table.active_count if single else 0):
        _enqueue(host, resident, active[i])
    queue, count = resident.queue, resident.queued
    resident.queued = 0
    for i in range(count):
        slot = queue[i]
        state = host.slot_states[slot]
        state.in_queue = False
        if table.states[slot] != _ACTIVE:
            continue
        if scans.slots[slot].scanning:
            resident.scans = True
        elif state.done:
            _add_finished(host, resident, slot)
        else:
            resident.goals[slot] = state.reached + 1 if single else _UNLIMITED
            if not state.on_device:
                _push(host, resident, slot)


@compiled
def _wait(host: Host, resident: Resident) -> Any:
    """Wait until all slots are back (limit 1), else until one has finished or an interrupt. Does not wait if the host
    has slots to scan. Returns whether it succeeded."""
    several = host.limit > 1
    polls = host.interrupt != 0 and several
    begin, elapsed, poll_at = begin_wait(host), 0, 0
    while True:
        if not _poll(host, resident):
            return False
        if resident.in_flight == 0 or (several and (resident.finished_count or resident.scans)):
            break
        if polls and elapsed >= poll_at:
            if call_int(host.interrupt, (host.interrupt_argument,)):
                break
            poll_at = elapsed + backend.INTERRUPT_POLL_NS
        elapsed = poll_wait(host, begin)
        if elapsed < 0:
            return False
    host.waited_ns += monotonic_ns() - begin
    return True


@compiled
def _deactivate(host: Host, slot: int) -> None:
    """Remove a slot from the active ones, whose order changes."""
    table, active = table_of(host), active_of(host)
    position, last = host.slot_states[slot].place, table.active_count - 1
    active[position] = active[last]
    host.slot_states[active[position]].place = position
    table.active_count = last


@compiled
def _report(host: Host, resident: Resident, report: Report) -> Any:
    """Report the slots with results, in the order in which they have finished. Returns their number."""
    table, scans = table_of(host), scans_of(host)
    slots = resident.finished
    done = 0
    for i in range(resident.finished_count):
        slot = slots[i]
        state = host.slot_states[slot]
        if table.states[slot] != _ACTIVE or not state.done:
            continue
        if not found_enough(host, scans, slot):
            resident.scans = True
            continue
        slot_changes.finish(table, slot)
        _deactivate(host, slot)
        finished = report.finished[done]
        finished.slot, finished.extends = slot, state.reached
        done += 1
    resident.finished_count = 0
    return done


@compiled
def _scan_and_report(host: Host, resident: Resident, report: Report) -> Any:
    """Make an extend of the slots that the host scans, and report all finished ones. Returns their number."""
    done = report_finished(host, report)
    active, scans = active_of(host), scans_of(host)
    resident.finished_count, resident.scans = 0, False
    for i in range(table_of(host).active_count):
        host.slot_states[active[i]].place = i
        if scans.slots[active[i]].scanning:
            resident.scans = True
    return done


@compiled
def _searching(host: Host, resident: Resident) -> Any:
    """Return how many active slots the device searches."""
    active, scans, count = active_of(host), scans_of(host), table_of(host).active_count
    scanning = 0
    for i in range(count if resident.scans else 0):
        scanning += scans.slots[active[i]].scanning != 0
    return count - scanning


# ---- the functions


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    host = host_at(handle)
    slot = accept_query(host, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        _begin(host, slot, IS_NEW)
    return slot


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit_in_place(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    host = host_at(handle)
    slot = accept_in_place(host, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        _begin(host, slot, IS_NEW | IS_IN_PLACE)
    return slot


@c_function("int64(int64, int64)")
def prioritize(handle: int, slot: int) -> Any:
    host_at(handle).slot_states[slot].prioritized = True
    return 0


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    apply_filter(host_at(handle), slot, allowed, allowed_count)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    host = host_at(handle)
    resident, written = host.resident, report_at(report)
    _submit(host, resident)
    written.extends, written.padded = 1, 0
    if host.failure != backend.NO_FAILURE:
        return FAILED
    searching = _searching(host, resident)
    if searching:
        if not _wait(host, resident):
            return FAILED
        written.extends = resident.advanced // searching
        resident.advanced -= written.extends * searching
    host.extends = written.extends
    if resident.scans:
        return _scan_and_report(host, resident, written)
    return _report(host, resident, written)


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    host = host_at(handle)
    resident, table = host.resident, table_of(host)
    state = host.slot_states[slot]
    if state.on_device and action != RESUME:  # the next extend sets the goal of a resumed query
        resident.goals[slot] = 0
    begin = begin_wait(host)
    while action == RELEASE and state.on_device:
        if host.failure != backend.NO_FAILURE or not _poll(host, resident) or poll_wait(host, begin) < 0:
            return FAILED
    if table.states[slot] == _ACTIVE:
        _deactivate(host, slot)
        table.states[slot] = _PAUSED
    slot_changes.change(table, active_of(host), slot, action)
    if action == RESUME:
        state.place = table.active_count - 1
        _enqueue(host, resident, slot)
    return 0


@c_function("int64(int64)")
def stop(handle: int) -> Any:
    """End a running launch; active queries continue with the next one. Returns 0 or FAILED."""
    host = host_at(handle)
    resident = host.resident
    if not resident.running:
        return 0
    for slot in range(host.slots):
        if host.slot_states[slot].on_device:
            resident.goals[slot] = 0
    host.doorbell[0] = 1
    begin = begin_wait(host)
    while host.progress[0].launches != host.launches:
        if poll_wait(host, begin) < 0:
            return FAILED
    host.doorbell[0] = 0
    _collect(host, resident)
    return 0 if _end_launch(host, resident) else FAILED
