"""The CUDA engine's functions for compiled loops where its blocks device on the device (gpu/kernels/resident.cu).

The host tells the device of a query by an entry in one of two rings, and of what is to become of it by its goal, the
extends that it may come to: it pauses a query by a goal of 0, and makes it go on by a greater one. A slot is the
device's from its entry to its record; in between the host writes its goal alone. Slots are given out by who calls this,
as any engine's are, and the device takes from its rings what it has blocks for, what is to prioritize first.

With a limit of one extend a launch every active query gets an entry for each extend, whose end is waited for. With more
a query has one entry, and goes on until it is done: `extend` returns when one is, or when something has arrived.

A launch ends when its life is over, with slots recorded as they are then, and entries left in the rings; the next
`extend` that needs it launches again. `stop` ends one at once: what allocates or frees device memory waits for it.
"""

from typing import Any

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu.tables import SCANNING
from gpu.cuda import backend as of
from gpu.cuda.backend import (
    accept_query,
    active_of,
    apply_filter,
    begin_wait,
    failed,
    report_finished,
    scans_of,
    table_of,
    waited,
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
# A state, behind ON_DEVICE: whether the slot's line must still be fetched; whether it has a result; whether it is to be
# begun before others; and the extends that its query has come to.
NEW, DONE, PRIORITIZED, REACHED = range(of.ON_DEVICE + 1, of.SLOT_STATE_WORDS)

_ASK_NS = 2_000  # between two questions whether something has arrived: one costs twenty looks at the records
_WORD = 0xFFFFFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_ALL = _WORD  # no query comes to so many extends
_ACTIVE = int(SlotState.ACTIVE)
assert RECORD.names == ("extends", "slot")
assert PROGRESS.names[:4] == ("launches", "extends", "taken", "recorded")  # type: ignore[index]


@compiled
def _device(words: Any) -> Any:
    return words_at(words[of.RESIDENT], RESIDENT_WORDS)


@compiled
def _slot_state(words: Any, slot: int) -> Any:
    return words_at(words[of.SLOT_STATES] + 8 * of.SLOT_STATE_WORDS * slot, of.SLOT_STATE_WORDS)


@compiled
def _set_goal(device: Any, slot: int, goal: int) -> None:
    store_release(device[AT_GOALS] + 4 * slot, goal)


@compiled
def _push(words: Any, device: Any, slot: int) -> None:
    """Give a slot to the device."""
    state = _slot_state(words, slot)
    ring = PREFILL_RING if state[PRIORITIZED] else DECODE_RING
    position = device[PUSHED + ring]
    entry = (position // device[ENTRIES] % MAX_LAP + 1) << LAP_SHIFT | (IS_NEW if state[NEW] else 0) | slot
    # SYNC POINT: whoever reads the entry with acquire sees the slot's line and goal.
    store_release(device[AT_RINGS] + 4 * (ring * device[ENTRIES] + position % device[ENTRIES]), entry)
    device[PUSHED + ring] = (position + 1) & _WORD
    state[NEW], state[of.ON_DEVICE] = 0, 1
    device[IN_FLIGHT] += 1


@compiled
def _collect(words: Any, device: Any) -> Any:
    """Take back the slots that the device has recorded. How many active ones of them are done.

    Those that are not (the launch has ended, or they were to pause and then not) `_submit` gives to the device again.
    """
    table, done = table_of(words), 0
    while True:
        record = device[AT_RECORDS] + 8 * (device[SEEN] % device[ENTRIES])
        # SYNC POINT: what the device wrote of the slot, result and state, is there.
        word = load_acquire(record + 4)
        if word >> LAP_SHIFT != device[SEEN] // device[ENTRIES] % MAX_LAP + 1:
            return done
        device[SEEN] = (device[SEEN] + 1) & _WORD
        slot, extends = word & _SLOT_MASK, load_acquire(record)
        state = _slot_state(words, slot)
        device[ADVANCED] += extends - state[REACHED]
        state[of.ON_DEVICE], state[REACHED] = 0, extends
        device[IN_FLIGHT] -= 1
        if word & IS_DONE:
            state[DONE] = 1
            done += table[STATES + slot] == _ACTIVE


@compiled
def _end_launch(words: Any, device: Any) -> Any:
    """Take note of the end of a launch. Whether all that it took is recorded."""
    device[RUNNING] = 0
    untaken = (device[PUSHED] + device[PUSHED + 1] - load_acquire(words[of.PROGRESS] + 8)) & _WORD
    if load_acquire(words[of.PROGRESS] + 12) != device[SEEN] or untaken != device[IN_FLIGHT]:
        return failed(words, of.RECORDS_MISSING, device[IN_FLIGHT] - untaken)
    return True


@compiled
def _poll(words: Any, device: Any) -> Any:
    """Take what is recorded, and launch if there is something to do and no launch to do it. How many active slots are
    done; or FAILED."""
    done = 0
    if device[RUNNING] and load_acquire(words[of.PROGRESS]) == words[of.LAUNCHES]:  # records come before the word
        done = _collect(words, device)
        if not _end_launch(words, device):
            return FAILED
    if device[IN_FLIGHT] and not device[RUNNING]:
        code = call(words[of.REPLAY], (words_at(words[of.GRAPHS], 2)[1], words[of.STREAM]))
        if code:
            failed(words, of.REPLAY_FAILED, code)
            return FAILED
        words[of.LAUNCHES] = (words[of.LAUNCHES] + 1) & _WORD
        device[RUNNING] = 1
    return done + _collect(words, device)


@compiled
def _submit(words: Any, device: Any) -> Any:
    """Goals and entries of the active slots. How many of them the device searches, and how many of these are done."""
    table, active, scans = table_of(words), active_of(words), scans_of(words)
    walking = done = 0
    for i in range(table[ACTIVE_COUNT]):
        slot = active[i]
        if scans.slots[slot, SCANNING]:
            continue
        walking += 1
        state = _slot_state(words, slot)
        if state[DONE]:
            done += 1
            continue
        _set_goal(device, slot, state[REACHED] + 1 if words[of.LIMIT] == 1 else _ALL)
        if not state[of.ON_DEVICE]:
            _push(words, device, slot)
    return walking, done


@compiled
def _wait(words: Any, device: Any, done: int, all_walk: bool) -> Any:
    """Until all slots are back, of one extend; else until an active one is done, something has arrived, or rows are to
    be compared meanwhile. Whether that went well."""
    asks = words[of.INTERRUPT] != 0 and words[of.LIMIT] > 1
    begin, past, ask_at = begin_wait(words), 0, 0
    while True:
        found = _poll(words, device)
        if found < 0:
            return False
        done += found
        if device[IN_FLIGHT] == 0 or (words[of.LIMIT] > 1 and (done or not all_walk)):
            break
        if asks and past >= ask_at:
            if call(words[of.INTERRUPT], (words[of.INTERRUPT_ARGUMENT],)):
                break
            ask_at = past + _ASK_NS
        past = waited(words, begin)
        if past < 0:
            return False
    words[of.WAITED_NS] += monotonic_ns(words[of.TIME]) - begin
    return True


# ---- the functions


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    words = words_at(handle, of.HANDLE_WORDS)
    slot = accept_query(words, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        state = _slot_state(words, slot)
        state[:] = 0
        state[NEW] = 1
    return slot


@c_function("int64(int64, int64)")
def prioritize(handle: int, slot: int) -> Any:
    _slot_state(words_at(handle, of.HANDLE_WORDS), slot)[PRIORITIZED] = 1
    return 0


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    apply_filter(words_at(handle, of.HANDLE_WORDS), slot, allowed, allowed_count)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    words = words_at(handle, of.HANDLE_WORDS)
    device, told = _device(words), words_at(report, 2)
    walking, done = _submit(words, device)
    told[0], told[1] = 1, 0
    if words[of.FAILURE] != of.NO_FAILURE:
        return FAILED
    if walking:
        if not _wait(words, device, done, walking == table_of(words)[ACTIVE_COUNT]):
            return FAILED
        told[0] = device[ADVANCED] // walking
        device[ADVANCED] -= told[0] * walking
    words[of.EXTENDS] = told[0]
    return report_finished(words, report)


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    words = words_at(handle, of.HANDLE_WORDS)
    device = _device(words)
    state = _slot_state(words, slot)
    if state[of.ON_DEVICE] and action != RESUME:  # to go on is for the next extend to say
        _set_goal(device, slot, 0)
    begin = begin_wait(words)
    while action == RELEASE and state[of.ON_DEVICE]:
        if words[of.FAILURE] != of.NO_FAILURE or _poll(words, device) < 0 or waited(words, begin) < 0:
            return FAILED
    slot_changes.change(table_of(words), active_of(words), slot, action)
    return 0


@c_function("int64(int64)")
def stop(handle: int) -> Any:
    """End the launch that is under way, if one is; active queries go on with the next. 0, or FAILED."""
    words = words_at(handle, of.HANDLE_WORDS)
    device = _device(words)
    if not device[RUNNING]:
        return 0
    for slot in range(words[of.SLOTS]):
        if _slot_state(words, slot)[of.ON_DEVICE]:
            _set_goal(device, slot, 0)
    store_release(words[of.DOORBELL], 1)
    begin = begin_wait(words)
    while load_acquire(words[of.PROGRESS]) != words[of.LAUNCHES]:
        if waited(words, begin) < 0:
            return FAILED
    store_release(words[of.DOORBELL], 0)
    _collect(words, device)
    return 0 if _end_launch(words, device) else FAILED
