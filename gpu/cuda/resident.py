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
    scans_of,
    table_of,
)
from gpu.cuda.layout import (
    DECODE_RING,
    IS_DONE,
    IS_IN_PLACE,
    IS_NEW,
    LAP_SHIFT,
    MAX_LAP,
    PREFILL_RING,
    PROGRESS,
    RECORD,
    SLOT_BITS,
)
from gpu.engine import FAILED, INVALID, RELEASE, RESUME
from gpu.slots import ACTIVE_COUNT, STATES, SlotState
from ipc.native.arrays import int64_at as words_at
from ipc.native.intrinsics import call_int, load_acquire_u32, monotonic_ns, store_release_u32

# Words of the resident form's state, int64. AT_RINGS, AT_GOALS, AT_RECORDS: addresses in pinned memory (`layout`), with
# ENTRIES in each ring and among the records. RUNNING: 1 while a launch is running. IN_FLIGHT: slots owned by the
# device. PUSHED: entries pushed so far, by ring. SEEN: records consumed so far. ADVANCED: extends of single slots that
# are not reported yet. AT_QUEUE, QUEUED: slots that the next `extend` looks at. AT_FINISHED, FINISHED: slots with
# results to be reported, some of which may have been paused or released since. SCANS: whether the host may have slots
# to scan.
(
    AT_RINGS,
    AT_GOALS,
    AT_RECORDS,
    ENTRIES,
    RUNNING,
    IN_FLIGHT,
    PUSHED,
    _,
    SEEN,
    ADVANCED,
    AT_QUEUE,
    QUEUED,
    AT_FINISHED,
    FINISHED,
    SCANS,
) = range(15)
RESIDENT_WORDS = 15
FINISHED_PER_SLOT = 3  # at most: collected before an extend, resumed with a result, and collected during it
# Words of a slot's state, behind ON_DEVICE. NEW: the flags of its entry until the device has the slot's line, then 0.
# DONE: it has a result. PRIORITIZED: it uses the prefill ring. REACHED: extends of its query so far. IN_QUEUE: it is
# among AT_QUEUE. PLACE: its index among the active slots.
NEW, DONE, PRIORITIZED, REACHED, IN_QUEUE, PLACE = range(backend.ON_DEVICE + 1, backend.SLOT_STATE_WORDS - 1)

_WORD = 0xFFFFFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_UNLIMITED = _WORD  # a goal that no query reaches
_ACTIVE, _PAUSED = int(SlotState.ACTIVE), int(SlotState.PAUSED)
assert RECORD.names == ("extends", "slot")
assert PROGRESS.names[:4] == ("launches", "extends", "taken", "recorded")  # type: ignore[index]


@compiled
def _resident(words: Any) -> Any:
    return words_at(words[backend.RESIDENT], RESIDENT_WORDS)


@compiled
def _slot_state(words: Any, slot: int) -> Any:
    return words_at(words[backend.SLOT_STATES] + 8 * backend.SLOT_STATE_WORDS * slot, backend.SLOT_STATE_WORDS)


@compiled
def _set_goal(resident: Any, slot: int, goal: int) -> None:
    store_release_u32(resident[AT_GOALS] + 4 * slot, goal)


@compiled
def _push(words: Any, resident: Any, slot: int) -> None:
    """Submit a slot to the device."""
    state = _slot_state(words, slot)
    ring = PREFILL_RING if state[PRIORITIZED] else DECODE_RING
    position = resident[PUSHED + ring]
    entry = (position // resident[ENTRIES] % MAX_LAP + 1) << LAP_SHIFT | state[NEW] | slot
    # SYNC POINT: a reader that loads the entry with acquire sees the slot's line and goal.
    store_release_u32(resident[AT_RINGS] + 4 * (ring * resident[ENTRIES] + position % resident[ENTRIES]), entry)
    resident[PUSHED + ring] = (position + 1) & _WORD
    state[NEW], state[backend.ON_DEVICE] = 0, 1
    resident[IN_FLIGHT] += 1


@compiled
def _enqueue(words: Any, resident: Any, slot: int) -> None:
    """Have the next `extend` look at a slot."""
    state = _slot_state(words, slot)
    if not state[IN_QUEUE]:
        state[IN_QUEUE] = 1
        words_at(resident[AT_QUEUE], words[backend.SLOTS])[resident[QUEUED]] = slot
        resident[QUEUED] += 1


@compiled
def _begin(words: Any, slot: int, flags: int) -> None:
    """Begin the query of a slot that was just assigned; `flags`: of its first entry."""
    state = _slot_state(words, slot)
    queued = state[IN_QUEUE]
    state[:] = 0
    state[NEW], state[IN_QUEUE], state[PLACE] = flags, queued, table_of(words)[ACTIVE_COUNT] - 1
    _enqueue(words, _resident(words), slot)


@compiled
def _add_finished(words: Any, resident: Any, slot: int) -> None:
    words_at(resident[AT_FINISHED], FINISHED_PER_SLOT * words[backend.SLOTS])[resident[FINISHED]] = slot
    resident[FINISHED] += 1


@compiled
def _collect(words: Any, resident: Any) -> None:
    """Consume the device's records and take their slots back.

    Active ones without a result (after the end of a launch, or a pause that was revoked) are submitted again.
    """
    table = table_of(words)
    while True:
        record = resident[AT_RECORDS] + 8 * (resident[SEEN] % resident[ENTRIES])
        # SYNC POINT: the slot's result and state, written by the device before, are visible.
        word = load_acquire_u32(record + 4)
        if word >> LAP_SHIFT != resident[SEEN] // resident[ENTRIES] % MAX_LAP + 1:
            return
        resident[SEEN] = (resident[SEEN] + 1) & _WORD
        slot, extends = word & _SLOT_MASK, load_acquire_u32(record)
        state = _slot_state(words, slot)
        resident[ADVANCED] += extends - state[REACHED]
        state[backend.ON_DEVICE], state[REACHED] = 0, extends
        resident[IN_FLIGHT] -= 1
        if word & IS_DONE:
            state[DONE] = 1
        if table[STATES + slot] != _ACTIVE:
            continue
        if state[DONE]:
            _add_finished(words, resident, slot)
        else:
            _enqueue(words, resident, slot)


@compiled
def _end_launch(words: Any, resident: Any) -> Any:
    """Register the end of a launch. Returns whether every slot that it took has been recorded."""
    resident[RUNNING] = 0
    untaken = (resident[PUSHED] + resident[PUSHED + 1] - load_acquire_u32(words[backend.PROGRESS] + 8)) & _WORD
    if load_acquire_u32(words[backend.PROGRESS] + 12) != resident[SEEN] or untaken != resident[IN_FLIGHT]:
        return failed(words, backend.RECORDS_MISSING, resident[IN_FLIGHT] - untaken)
    return True


@compiled
def _poll(words: Any, resident: Any) -> Any:
    """Consume records, and launch if slots are submitted but no launch is running. Returns whether it succeeded."""
    if (
        resident[RUNNING] and load_acquire_u32(words[backend.PROGRESS]) == words[backend.LAUNCHES]
    ):  # its last records precede the progress word
        _collect(words, resident)
        if not _end_launch(words, resident):
            return False
    if resident[IN_FLIGHT] and not resident[RUNNING]:
        code = call_int(words[backend.REPLAY], (words_at(words[backend.GRAPHS], 2)[1], words[backend.STREAM]))
        if code:
            return failed(words, backend.REPLAY_FAILED, code)
        words[backend.LAUNCHES] = (words[backend.LAUNCHES] + 1) & _WORD
        resident[RUNNING] = 1
    _collect(words, resident)
    return True


@compiled
def _submit(words: Any, resident: Any) -> None:
    """Set the goals of queued slots and submit them; with a limit of one extend, of all active slots."""
    table, active, scans = table_of(words), active_of(words), scans_of(words)
    single = words[backend.LIMIT] == 1
    for i in range(table[ACTIVE_COUNT] if single else 0):
        _enqueue(words, resident, active[i])
    queue, count = words_at(resident[AT_QUEUE], words[backend.SLOTS]), resident[QUEUED]
    resident[QUEUED] = 0
    for i in range(count):
        slot = queue[i]
        state = _slot_state(words, slot)
        state[IN_QUEUE] = 0
        if table[STATES + slot] != _ACTIVE:
            continue
        if scans.slots[slot].scanning:
            resident[SCANS] = 1
        elif state[DONE]:
            _add_finished(words, resident, slot)
        else:
            _set_goal(resident, slot, state[REACHED] + 1 if single else _UNLIMITED)
            if not state[backend.ON_DEVICE]:
                _push(words, resident, slot)


@compiled
def _wait(words: Any, resident: Any) -> Any:
    """Wait until all slots are back (limit 1), else until one has finished or an interrupt. Does not wait if the host
    has slots to scan. Returns whether it succeeded."""
    several = words[backend.LIMIT] > 1
    polls = words[backend.INTERRUPT] != 0 and several
    begin, elapsed, poll_at = begin_wait(words), 0, 0
    while True:
        if not _poll(words, resident):
            return False
        if resident[IN_FLIGHT] == 0 or (several and (resident[FINISHED] or resident[SCANS])):
            break
        if polls and elapsed >= poll_at:
            if call_int(words[backend.INTERRUPT], (words[backend.INTERRUPT_ARGUMENT],)):
                break
            poll_at = elapsed + backend.INTERRUPT_POLL_NS
        elapsed = poll_wait(words, begin)
        if elapsed < 0:
            return False
    words[backend.WAITED_NS] += monotonic_ns() - begin
    return True


@compiled
def _deactivate(words: Any, slot: int) -> None:
    """Remove a slot from the active ones, whose order changes."""
    table, active = table_of(words), active_of(words)
    place, last = _slot_state(words, slot)[PLACE], table[ACTIVE_COUNT] - 1
    active[place] = active[last]
    _slot_state(words, active[place])[PLACE] = place
    table[ACTIVE_COUNT] = last


@compiled
def _report(words: Any, resident: Any, report: int) -> Any:
    """Report the slots with results, in the order in which they have finished. Returns their number."""
    table, scans = table_of(words), scans_of(words)
    slots = words_at(resident[AT_FINISHED], FINISHED_PER_SLOT * words[backend.SLOTS])
    done = 0
    for i in range(resident[FINISHED]):
        slot = slots[i]
        state = _slot_state(words, slot)
        if table[STATES + slot] != _ACTIVE or not state[DONE]:
            continue
        if not found_enough(words, scans, slot):
            resident[SCANS] = 1
            continue
        slot_changes.finish(table, slot)
        _deactivate(words, slot)
        finished = words_at(report + 16 + 16 * done, 2)
        finished[0], finished[1] = slot, state[REACHED]
        done += 1
    resident[FINISHED] = 0
    return done


@compiled
def _scan_and_report(words: Any, resident: Any, report: int) -> Any:
    """Make an extend of the slots that the host scans, and report all finished ones. Returns their number."""
    done = report_finished(words, report)
    active, scans = active_of(words), scans_of(words)
    resident[FINISHED] = resident[SCANS] = 0
    for i in range(table_of(words)[ACTIVE_COUNT]):
        _slot_state(words, active[i])[PLACE] = i
        resident[SCANS] |= scans.slots[active[i]].scanning
    return done


@compiled
def _searching(words: Any, resident: Any) -> Any:
    """Return how many active slots the device searches."""
    active, scans, count = active_of(words), scans_of(words), table_of(words)[ACTIVE_COUNT]
    scanning = 0
    for i in range(count if resident[SCANS] else 0):
        scanning += scans.slots[active[i]].scanning
    return count - scanning


# ---- the functions


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    slot = accept_query(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        _begin(words, slot, IS_NEW)
    return slot


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit_in_place(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    slot = accept_in_place(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        _begin(words, slot, IS_NEW | IS_IN_PLACE)
    return slot


@c_function("int64(int64, int64)")
def prioritize(handle: int, slot: int) -> Any:
    _slot_state(words_at(handle, backend.HANDLE_WORDS), slot)[PRIORITIZED] = 1
    return 0


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    apply_filter(words_at(handle, backend.HANDLE_WORDS), slot, allowed, allowed_count)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    resident, counts = _resident(words), words_at(report, 2)
    _submit(words, resident)
    counts[0], counts[1] = 1, 0
    if words[backend.FAILURE] != backend.NO_FAILURE:
        return FAILED
    searching = _searching(words, resident)
    if searching:
        if not _wait(words, resident):
            return FAILED
        counts[0] = resident[ADVANCED] // searching
        resident[ADVANCED] -= counts[0] * searching
    words[backend.EXTENDS] = counts[0]
    if resident[SCANS]:
        return _scan_and_report(words, resident, report)
    return _report(words, resident, report)


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    resident, table = _resident(words), table_of(words)
    state = _slot_state(words, slot)
    if state[backend.ON_DEVICE] and action != RESUME:  # the next extend sets the goal of a resumed query
        _set_goal(resident, slot, 0)
    begin = begin_wait(words)
    while action == RELEASE and state[backend.ON_DEVICE]:
        if words[backend.FAILURE] != backend.NO_FAILURE or not _poll(words, resident) or poll_wait(words, begin) < 0:
            return FAILED
    if table[STATES + slot] == _ACTIVE:
        _deactivate(words, slot)
        table[STATES + slot] = _PAUSED
    slot_changes.change(table, active_of(words), slot, action)
    if action == RESUME:
        state[PLACE] = table[ACTIVE_COUNT] - 1
        _enqueue(words, resident, slot)
    return 0


@c_function("int64(int64)")
def stop(handle: int) -> Any:
    """End a running launch; active queries continue with the next one. Returns 0 or FAILED."""
    words = words_at(handle, backend.HANDLE_WORDS)
    resident = _resident(words)
    if not resident[RUNNING]:
        return 0
    for slot in range(words[backend.SLOTS]):
        if _slot_state(words, slot)[backend.ON_DEVICE]:
            _set_goal(resident, slot, 0)
    store_release_u32(words[backend.DOORBELL], 1)
    begin = begin_wait(words)
    while load_acquire_u32(words[backend.PROGRESS]) != words[backend.LAUNCHES]:
        if poll_wait(words, begin) < 0:
            return FAILED
    store_release_u32(words[backend.DOORBELL], 0)
    _collect(words, resident)
    return 0 if _end_launch(words, resident) else FAILED
