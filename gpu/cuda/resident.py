"""The CUDA engine's C functions for its resident form, a persistent kernel (gpu/kernels/resident.cu).

The host submits a slot by pushing an entry to one of two rings, and controls it by its goal, the number of extends that
its query may reach: 0 pauses the query, a larger goal resumes it. The device owns a slot from its entry to its record;
meanwhile the host writes only its goal. As in any engine the caller assigns slots; the device takes entries from the
rings as blocks become free, prioritised queries first.

With a limit of one extend per launch, every active query is submitted for each extend, and the call waits for all of
them. With a higher limit, a query is submitted once and runs to its end; `extend` returns when a query has finished or
on an interrupt.

A launch ends after its lifetime. Slots are then recorded in their current state, entries may remain in the rings, and
the next `extend` launches again if needed. `stop` ends a launch at once, before device memory is allocated or freed.
"""

from typing import Any

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu.tables import SCANNING
from gpu.cuda import backend
from gpu.cuda.backend import (
    accept_query,
    active_of,
    apply_filter,
    begin_wait,
    failed,
    poll_wait,
    report_finished,
    scans_of,
    table_of,
)
from gpu.cuda.layout import DECODE_RING, IS_DONE, IS_NEW, LAP_SHIFT, MAX_LAP, PREFILL_RING, PROGRESS, RECORD, SLOT_BITS
from gpu.engine import FAILED, INVALID, RELEASE, RESUME
from gpu.intrinsics import call, load_acquire, monotonic_ns, store_release, words_at
from gpu.slots import ACTIVE_COUNT, STATES, SlotState

# Words of the resident form's state, int64. AT_RINGS, AT_GOALS, AT_RECORDS: addresses in pinned memory (`layout`), with
# ENTRIES in each ring and among the records. RUNNING: 1 while a launch is running. IN_FLIGHT: slots owned by the
# device. PUSHED: entries pushed so far, by ring. SEEN: records consumed so far. ADVANCED: extends of single slots that
# are not reported yet.
AT_RINGS, AT_GOALS, AT_RECORDS, ENTRIES, RUNNING, IN_FLIGHT, PUSHED, _, SEEN, ADVANCED = range(10)
RESIDENT_WORDS = 10
# Words of a slot's state, behind ON_DEVICE. NEW: the device has not fetched the slot's line yet. DONE: it has a result.
# PRIORITIZED: it uses the prefill ring. REACHED: extends of its query so far.
NEW, DONE, PRIORITIZED, REACHED = range(backend.ON_DEVICE + 1, backend.SLOT_STATE_WORDS)

_WORD = 0xFFFFFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_UNLIMITED = _WORD  # a goal that no query reaches
_ACTIVE = int(SlotState.ACTIVE)
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
    store_release(resident[AT_GOALS] + 4 * slot, goal)


@compiled
def _push(words: Any, resident: Any, slot: int) -> None:
    """Submit a slot to the device."""
    state = _slot_state(words, slot)
    ring = PREFILL_RING if state[PRIORITIZED] else DECODE_RING
    position = resident[PUSHED + ring]
    entry = (position // resident[ENTRIES] % MAX_LAP + 1) << LAP_SHIFT | (IS_NEW if state[NEW] else 0) | slot
    # SYNC POINT: a reader that loads the entry with acquire sees the slot's line and goal.
    store_release(resident[AT_RINGS] + 4 * (ring * resident[ENTRIES] + position % resident[ENTRIES]), entry)
    resident[PUSHED + ring] = (position + 1) & _WORD
    state[NEW], state[backend.ON_DEVICE] = 0, 1
    resident[IN_FLIGHT] += 1


@compiled
def _collect(words: Any, resident: Any) -> Any:
    """Consume the device's records and take their slots back. Returns the number of active ones that have finished.

    The others (after the end of a launch, or a pause that was revoked) are resubmitted by `_submit`.
    """
    table, done = table_of(words), 0
    while True:
        record = resident[AT_RECORDS] + 8 * (resident[SEEN] % resident[ENTRIES])
        # SYNC POINT: the slot's result and state, written by the device before, are visible.
        word = load_acquire(record + 4)
        if word >> LAP_SHIFT != resident[SEEN] // resident[ENTRIES] % MAX_LAP + 1:
            return done
        resident[SEEN] = (resident[SEEN] + 1) & _WORD
        slot, extends = word & _SLOT_MASK, load_acquire(record)
        state = _slot_state(words, slot)
        resident[ADVANCED] += extends - state[REACHED]
        state[backend.ON_DEVICE], state[REACHED] = 0, extends
        resident[IN_FLIGHT] -= 1
        if word & IS_DONE:
            state[DONE] = 1
            done += table[STATES + slot] == _ACTIVE


@compiled
def _end_launch(words: Any, resident: Any) -> Any:
    """Register the end of a launch. Returns whether every slot that it took has been recorded."""
    resident[RUNNING] = 0
    untaken = (resident[PUSHED] + resident[PUSHED + 1] - load_acquire(words[backend.PROGRESS] + 8)) & _WORD
    if load_acquire(words[backend.PROGRESS] + 12) != resident[SEEN] or untaken != resident[IN_FLIGHT]:
        return failed(words, backend.RECORDS_MISSING, resident[IN_FLIGHT] - untaken)
    return True


@compiled
def _poll(words: Any, resident: Any) -> Any:
    """Consume records, and launch if slots are submitted but no launch is running. Returns the number of active slots
    that have finished, or FAILED."""
    done = 0
    if (
        resident[RUNNING] and load_acquire(words[backend.PROGRESS]) == words[backend.LAUNCHES]
    ):  # its last records precede the progress word
        done = _collect(words, resident)
        if not _end_launch(words, resident):
            return FAILED
    if resident[IN_FLIGHT] and not resident[RUNNING]:
        code = call(words[backend.REPLAY], (words_at(words[backend.GRAPHS], 2)[1], words[backend.STREAM]))
        if code:
            failed(words, backend.REPLAY_FAILED, code)
            return FAILED
        words[backend.LAUNCHES] = (words[backend.LAUNCHES] + 1) & _WORD
        resident[RUNNING] = 1
    return done + _collect(words, resident)


@compiled
def _submit(words: Any, resident: Any) -> Any:
    """Set goals of the active slots and submit them. Returns how many the device searches, and how many finished."""
    table, active, scans = table_of(words), active_of(words), scans_of(words)
    searching = done = 0
    for i in range(table[ACTIVE_COUNT]):
        slot = active[i]
        if scans.slots[slot, SCANNING]:
            continue
        searching += 1
        state = _slot_state(words, slot)
        if state[DONE]:
            done += 1
            continue
        _set_goal(resident, slot, state[REACHED] + 1 if words[backend.LIMIT] == 1 else _UNLIMITED)
        if not state[backend.ON_DEVICE]:
            _push(words, resident, slot)
    return searching, done


@compiled
def _wait(words: Any, resident: Any, done: int, all_on_device: bool) -> Any:
    """Wait until all slots are back (limit 1), else until an active one has finished or an interrupt. Does not wait if
    the host has slots to scan. Returns whether it succeeded."""
    polls = words[backend.INTERRUPT] != 0 and words[backend.LIMIT] > 1
    begin, elapsed, poll_at = begin_wait(words), 0, 0
    while True:
        found = _poll(words, resident)
        if found < 0:
            return False
        done += found
        if resident[IN_FLIGHT] == 0 or (words[backend.LIMIT] > 1 and (done or not all_on_device)):
            break
        if polls and elapsed >= poll_at:
            if call(words[backend.INTERRUPT], (words[backend.INTERRUPT_ARGUMENT],)):
                break
            poll_at = elapsed + backend.INTERRUPT_POLL_NS
        elapsed = poll_wait(words, begin)
        if elapsed < 0:
            return False
    words[backend.WAITED_NS] += monotonic_ns(words[backend.TIME]) - begin
    return True


# ---- the functions


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    slot = accept_query(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        state = _slot_state(words, slot)
        state[:] = 0
        state[NEW] = 1
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
    searching, done = _submit(words, resident)
    counts[0], counts[1] = 1, 0
    if words[backend.FAILURE] != backend.NO_FAILURE:
        return FAILED
    if searching:
        if not _wait(words, resident, done, searching == table_of(words)[ACTIVE_COUNT]):
            return FAILED
        counts[0] = resident[ADVANCED] // searching
        resident[ADVANCED] -= counts[0] * searching
    words[backend.EXTENDS] = counts[0]
    return report_finished(words, report)


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    words = words_at(handle, backend.HANDLE_WORDS)
    resident = _resident(words)
    state = _slot_state(words, slot)
    if state[backend.ON_DEVICE] and action != RESUME:  # the next extend sets the goal of a resumed query
        _set_goal(resident, slot, 0)
    begin = begin_wait(words)
    while action == RELEASE and state[backend.ON_DEVICE]:
        if words[backend.FAILURE] != backend.NO_FAILURE or _poll(words, resident) < 0 or poll_wait(words, begin) < 0:
            return FAILED
    slot_changes.change(table_of(words), active_of(words), slot, action)
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
    store_release(words[backend.DOORBELL], 1)
    begin = begin_wait(words)
    while load_acquire(words[backend.PROGRESS]) != words[backend.LAUNCHES]:
        if poll_wait(words, begin) < 0:
            return FAILED
    store_release(words[backend.DOORBELL], 0)
    _collect(words, resident)
    return 0 if _end_launch(words, resident) else FAILED
