"""The CUDA engine's functions for compiled loops where its blocks stay on the device (gpu/kernels/resident.cu).

The host tells the device of a query by an entry in one of two rings, and of what is to become of it by its goal, the
extends that it may come to: it pauses a query by a goal of 0, and makes it go on by a greater one. A slot is the
device's from its entry to its record; in between the host writes its goal alone. Slots are given out by who calls this,
as any engine's are, and the device takes from its rings what it has blocks for, what is to hurry first.

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
from gpu.cuda.backend import active_of, begin_wait, compared_of, failed, finish_done, keep_to, table_of, take_in, waited
from gpu.cuda.layout import DECODE_RING, IS_DONE, IS_NEW, LAP_SHIFT, MAX_LAP, PREFILL_RING, PROGRESS, RECORD, SLOT_BITS
from gpu.engine import FAILED, INVALID, RELEASE, RESUME
from gpu.instructions import call, load_acquire, monotonic_ns, store_release, words_at
from gpu.slots import ACTIVE_COUNT, STATES, SlotState

# What this has beside the handle, int64. AT_RINGS, AT_GOALS, AT_RECORDS: pinned memory, as the layout has it, with
# ENTRIES in each ring and among the records. STAYS: whether a launch is under way. OUT: slots that are the device's.
# PUSHED: entries, of each ring; SEEN: records. ADVANCED: extends of single slots that no report has told of.
AT_RINGS, AT_GOALS, AT_RECORDS, ENTRIES, STAYS, OUT, PUSHED, _, SEEN, ADVANCED = range(10)
STAY_WORDS = 10
# A seat, behind IS_OUT: whether the slot's line must still be fetched; whether it has a result; whether it is to be
# begun before others; and the extends that its query has come to.
NEW, DONE, HURRIES, REACHED = range(of.IS_OUT + 1, of.SEAT_WORDS)

_ASK_NS = 2_000  # between two questions whether something has arrived: one costs twenty looks at the records
_WORD = 0xFFFFFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_ALL = _WORD  # no query comes to so many extends
_ACTIVE = int(SlotState.ACTIVE)
assert RECORD.names == ("extends", "slot")
assert PROGRESS.names[:4] == ("launches", "extends", "taken", "recorded")  # type: ignore[index]


@compiled
def _stay(own: Any) -> Any:
    return words_at(own[of.STAY], STAY_WORDS)


@compiled
def _seat(own: Any, slot: int) -> Any:
    return words_at(own[of.SEATS] + 8 * of.SEAT_WORDS * slot, of.SEAT_WORDS)


@compiled
def _set_goal(stay: Any, slot: int, goal: int) -> None:
    store_release(stay[AT_GOALS] + 4 * slot, goal)


@compiled
def _push(own: Any, stay: Any, slot: int) -> None:
    """Give a slot to the device."""
    seat = _seat(own, slot)
    ring = PREFILL_RING if seat[HURRIES] else DECODE_RING
    position = stay[PUSHED + ring]
    entry = (position // stay[ENTRIES] % MAX_LAP + 1) << LAP_SHIFT | (IS_NEW if seat[NEW] else 0) | slot
    # SYNC POINT: whoever reads the entry with acquire sees the slot's line and goal.
    store_release(stay[AT_RINGS] + 4 * (ring * stay[ENTRIES] + position % stay[ENTRIES]), entry)
    stay[PUSHED + ring] = (position + 1) & _WORD
    seat[NEW], seat[of.IS_OUT] = 0, 1
    stay[OUT] += 1


@compiled
def _collect(own: Any, stay: Any) -> Any:
    """Take back the slots that the device has recorded. How many active ones of them are done.

    Those that are not (the launch has ended, or they were to pause and then not) `_send` gives to the device again.
    """
    table, done = table_of(own), 0
    while True:
        record = stay[AT_RECORDS] + 8 * (stay[SEEN] % stay[ENTRIES])
        # SYNC POINT: what the device wrote of the slot, result and state, is there.
        word = load_acquire(record + 4)
        if word >> LAP_SHIFT != stay[SEEN] // stay[ENTRIES] % MAX_LAP + 1:
            return done
        stay[SEEN] = (stay[SEEN] + 1) & _WORD
        slot, extends = word & _SLOT_MASK, load_acquire(record)
        seat = _seat(own, slot)
        stay[ADVANCED] += extends - seat[REACHED]
        seat[of.IS_OUT], seat[REACHED] = 0, extends
        stay[OUT] -= 1
        if word & IS_DONE:
            seat[DONE] = 1
            done += table[STATES + slot] == _ACTIVE


@compiled
def _over(own: Any, stay: Any) -> Any:
    """Take note of the end of a launch. Whether all that it took is recorded."""
    stay[STAYS] = 0
    untaken = (stay[PUSHED] + stay[PUSHED + 1] - load_acquire(own[of.PROGRESS] + 8)) & _WORD
    if load_acquire(own[of.PROGRESS] + 12) != stay[SEEN] or untaken != stay[OUT]:
        return failed(own, of.LOST, stay[OUT] - untaken)
    return True


@compiled
def _look(own: Any, stay: Any) -> Any:
    """Take what is recorded, and launch if there is something to do and no launch to do it. How many active slots are
    done; or FAILED."""
    done = 0
    if stay[STAYS] and load_acquire(own[of.PROGRESS]) == own[of.LAUNCHES]:  # records come before the word
        done = _collect(own, stay)
        if not _over(own, stay):
            return FAILED
    if stay[OUT] and not stay[STAYS]:
        code = call(own[of.REPLAY], (words_at(own[of.GRAPHS], 2)[1], own[of.STREAM]))
        if code:
            failed(own, of.REPLAY_FAILED, code)
            return FAILED
        own[of.LAUNCHES] = (own[of.LAUNCHES] + 1) & _WORD
        stay[STAYS] = 1
    return done + _collect(own, stay)


@compiled
def _send(own: Any, stay: Any) -> Any:
    """Goals and entries of the active slots. How many of them the device searches, and how many of these are done."""
    table, active, compared = table_of(own), active_of(own), compared_of(own)
    walking = done = 0
    for i in range(table[ACTIVE_COUNT]):
        slot = active[i]
        if compared.slots[slot, SCANNING]:
            continue
        walking += 1
        seat = _seat(own, slot)
        if seat[DONE]:
            done += 1
            continue
        _set_goal(stay, slot, seat[REACHED] + 1 if own[of.LIMIT] == 1 else _ALL)
        if not seat[of.IS_OUT]:
            _push(own, stay, slot)
    return walking, done


@compiled
def _wait(own: Any, stay: Any, done: int, all_walk: bool) -> Any:
    """Until all slots are back, of one extend; else until an active one is done, something has arrived, or rows are to
    be compared meanwhile. Whether that went well."""
    asks = own[of.ARRIVED] != 0 and own[of.LIMIT] > 1
    begin, past, ask_at = begin_wait(own), 0, 0
    while True:
        found = _look(own, stay)
        if found < 0:
            return False
        done += found
        if stay[OUT] == 0 or (own[of.LIMIT] > 1 and (done or not all_walk)):
            break
        if asks and past >= ask_at:
            if call(own[of.ARRIVED], (own[of.ARRIVED_ARGUMENT],)):
                break
            ask_at = past + _ASK_NS
        past = waited(own, begin)
        if past < 0:
            return False
    own[of.WAITED_NS] += monotonic_ns(own[of.TIME]) - begin
    return True


# ---- the functions


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    own = words_at(handle, of.HANDLE_WORDS)
    slot = take_in(own, vector, collection, k, top_m, width, patience)
    if slot != INVALID:
        seat = _seat(own, slot)
        seat[:] = 0
        seat[NEW] = 1
    return slot


@c_function("int64(int64, int64)")
def hurry(handle: int, slot: int) -> Any:
    _seat(words_at(handle, of.HANDLE_WORDS), slot)[HURRIES] = 1
    return 0


@c_function("int64(int64, int64, int64, int64)")
def restrict(handle: int, slot: int, allowed: int, passing: int) -> Any:
    keep_to(words_at(handle, of.HANDLE_WORDS), slot, allowed, passing)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    own = words_at(handle, of.HANDLE_WORDS)
    stay, told = _stay(own), words_at(report, 2)
    walking, done = _send(own, stay)
    told[0], told[1] = 1, 0
    if own[of.FAILURE] != of.NO_FAILURE:
        return FAILED
    if walking:
        if not _wait(own, stay, done, walking == table_of(own)[ACTIVE_COUNT]):
            return FAILED
        told[0] = stay[ADVANCED] // walking
        stay[ADVANCED] -= told[0] * walking
    own[of.EXTENDS] = told[0]
    return finish_done(own, report)


@c_function("int64(int64, int64, int64)")
def change(handle: int, slot: int, what: int) -> Any:
    own = words_at(handle, of.HANDLE_WORDS)
    stay = _stay(own)
    seat = _seat(own, slot)
    if seat[of.IS_OUT] and what != RESUME:  # to go on is for the next extend to say
        _set_goal(stay, slot, 0)
    begin = begin_wait(own)
    while what == RELEASE and seat[of.IS_OUT]:
        if own[of.FAILURE] != of.NO_FAILURE or _look(own, stay) < 0 or waited(own, begin) < 0:
            return FAILED
    slot_changes.change(table_of(own), active_of(own), slot, what)
    return 0


@c_function("int64(int64)")
def stop(handle: int) -> Any:
    """End the launch that is under way, if one is; active queries go on with the next. 0, or FAILED."""
    own = words_at(handle, of.HANDLE_WORDS)
    stay = _stay(own)
    if not stay[STAYS]:
        return 0
    for slot in range(own[of.SLOTS]):
        if _seat(own, slot)[of.IS_OUT]:
            _set_goal(stay, slot, 0)
    store_release(own[of.DOORBELL], 1)
    begin = begin_wait(own)
    while load_acquire(own[of.PROGRESS]) != own[of.LAUNCHES]:
        if waited(own, begin) < 0:
            return FAILED
    store_release(own[of.DOORBELL], 0)
    _collect(own, stay)
    return 0 if _over(own, stay) else FAILED
