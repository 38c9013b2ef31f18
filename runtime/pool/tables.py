"""Memory of the scheduling policy and the loop: plain arrays addressed by column, with their queues and estimates.

An *entry* is a query in the pool, from its arrival to its answer. It waits in a queue, or occupies a slot of the engine
in which it is active or paused.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.slots import MAX_SLOTS
from ipc.memory.intrinsics import floats, words
from runtime.pool.compiled import compiled
from runtime.pool.settings import RULE_NAMES, Policy

NEVER_NS = 1 << 62
PREFILL, DECODE, PAUSED_LIST = 0, 1, 2  # stages, as `ipc` codes them; the list of paused queries

# Columns of an entry, int64. Times are monotonic ns.
# Set by the caller of `add`: STAGE, ARRIVAL, DEADLINE (NEVER_NS: none), CLASS_A and CLASS_B (the query class: all
# parameters on which its number of extends depends).
# Set by the policy: START_BY (its key in its queue: of equal keys the smaller SERIAL goes first), CLASS (its row of
# estimates), EXTENDS (expected), BEGAN (the extend at which it began, or would have begun without its pauses), PAUSES,
# STATE, LIST_INDEX (its index in its list). From CALLER on: the caller's own columns.
(
    STAGE,
    ARRIVAL,
    DEADLINE,
    CLASS_A,
    CLASS_B,
    START_BY,
    SERIAL,
    CLASS,
    EXTENDS,
    BEGAN,
    PAUSES,
    STATE,
    LIST_INDEX,
    CALLER,
) = range(14)
CALLER_WORDS = 17
ENTRY_WORDS = CALLER + CALLER_WORDS
FREE, WAITING, ACTIVE, PAUSED, BATCH_WAITING = range(5)  # the last one under `static` alone

# Words. SLOTS … RULES: settings, see `Policy`. FREE_ENTRIES, QUEUED (2: prefill, decode), LISTED (3: active prefill,
# active decode, paused) and CHANGED (4: admitted, preempted, resumed, late): lengths of the arrays below.
# TOTAL_EXTENDS: extends so far; DECODE_RAN_NS: when a decode query was last active, or none was pending; BURST: whether
# more prefill queries than reserved slots were present at once, and some still are.
(
    SLOTS,
    ENGINE_SLOTS,
    QUEUE,
    DECODE_QUEUE,
    TARGET_NS,
    AGING_NS,
    FLUSH_PREFILL_NS,
    FLUSH_NS,
    MAX_PAUSES,
    MISSED_NS,
    KEEP_RESERVE,
    RULES,
    FREE_ENTRIES,
    SERIALS,
    TOTAL_EXTENDS,
    DECODE_RAN_NS,
    CLASS_COUNT,
    BURST,
    QUEUED,
) = range(19)
QUEUED_PREFILL, QUEUED_DECODE, LISTED = range(QUEUED, QUEUED + 3)
ACTIVE_PREFILL, ACTIVE_DECODE, PAUSED_COUNT, CHANGED = range(LISTED, LISTED + 4)
LAST_VIRTUAL_DEADLINE = CHANGED + 4  # of each size class: decode queries whose expected extends have so many bits
WORDS = LAST_VIRTUAL_DEADLINE + 32
TRINITY, PAPER, FIFO, STATIC = range(4)
ADMITTED, PREEMPTED, RESUMED, LATE = range(4)  # rows of `changes`

# Floats. RESERVE: r. CREDIT: what prefill may use beyond ⌈rN⌉, in ns of the whole batch. The rest: the cost model of an
# extend.
(RESERVE, CREDIT, COST_COUNT, COST_A, COST_T, COST_AA, COST_AT, FIXED_NS, EACH_NS) = range(9)
FLOATS = 9
MAX_CLASSES = 1024  # clients choose parameters freely, so the number of classes is bounded


class Tables(NamedTuple):
    """Arrays of a policy."""

    entries: npt.NDArray[np.int64]  # [entries, ENTRY_WORDS]
    words: npt.NDArray[np.int64]  # [WORDS]
    floats: npt.NDArray[np.float64]  # [FLOATS]
    free: npt.NDArray[np.int64]  # [entries]: stack of free entries
    queues: npt.NDArray[np.int64]  # [2, entries]: Q_pre and Q_dec, heaps of entries
    lists: npt.NDArray[np.int64]  # [3, engine slots]: active prefill, active decode, paused
    changes: npt.NDArray[np.int64]  # [4, entries]: admitted, preempted, resumed, late by the last `schedule`
    classes: npt.NDArray[np.int64]  # [MAX_CLASSES, 2]: hash table of CLASS_A and CLASS_B; 0 and 0: empty
    means: npt.NDArray[np.float64]  # [MAX_CLASSES, 2]: mean extends, and over how many queries


def new_tables(policy: Policy) -> Tables:
    """Allocate the arrays and store the policy's settings in them."""
    engine_slots = policy.engine_slots or min(2 * policy.slots, MAX_SLOTS)
    entries = policy.queue + engine_slots + 1
    made = Tables(
        entries=np.zeros((entries, ENTRY_WORDS), np.int64),
        words=np.zeros(WORDS, np.int64),
        floats=np.zeros(FLOATS, np.float64),
        free=np.arange(entries)[::-1].astype(np.int64),
        queues=np.zeros((2, entries), np.int64),
        lists=np.zeros((3, engine_slots), np.int64),
        changes=np.zeros((4, entries), np.int64),
        classes=np.zeros((MAX_CLASSES, 2), np.int64),
        means=np.zeros((MAX_CLASSES, 2), np.float64),
    )
    made.words[: RULES + 1] = (
        policy.slots,
        engine_slots,
        policy.queue,
        policy.decode_queue,
        policy.prefill_target_ns,
        policy.aging_ns,
        policy.flush_prefill_ns,
        policy.flush_ns,
        policy.max_pauses,
        policy.missed_ns,
        policy.keep_reserve,
        RULE_NAMES.index(policy.rules),
    )
    made.words[FREE_ENTRIES] = entries
    made.words[DECODE_RAN_NS] = -1
    made.floats[RESERVE] = policy.reserve
    return made


def handle_of(tables: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Return addresses and shapes of the arrays, int64 [arrays, 3]: one argument costs less to pass than all of them.

    The tables must outlive it.
    """
    return np.array([(array.ctypes.data, *array.shape, 1)[:3] for array in tables], np.int64)


@partial(compiled, returns_array=True)
def tables_at(handle: Any) -> Any:
    """Return the tables that a handle from `handle_of` describes."""
    return Tables(
        words(handle[0, 0], (handle[0, 1], handle[0, 2])),
        words(handle[1, 0], handle[1, 1]),
        floats(handle[2, 0], handle[2, 1]),
        words(handle[3, 0], handle[3, 1]),
        words(handle[4, 0], (handle[4, 1], handle[4, 2])),
        words(handle[5, 0], (handle[5, 1], handle[5, 2])),
        words(handle[6, 0], (handle[6, 1], handle[6, 2])),
        words(handle[7, 0], (handle[7, 1], handle[7, 2])),
        floats(handle[8, 0], (handle[8, 1], handle[8, 2])),
    )


# ---- free stack, queues (Q_pre and Q_dec: heaps by START_BY, then SERIAL), and lists of active and paused entries


@compiled
def precedes(entries: Any, a: int, b: int) -> Any:
    """Return whether entry `a` goes before `b`."""
    if entries[a, START_BY] != entries[b, START_BY]:
        return entries[a, START_BY] < entries[b, START_BY]
    return entries[a, SERIAL] < entries[b, SERIAL]


@compiled
def _sift_up(entries: Any, heap: Any, index: int) -> None:
    entry = heap[index]
    while index > 0 and precedes(entries, entry, heap[(index - 1) // 2]):
        heap[index] = heap[(index - 1) // 2]
        index = (index - 1) // 2
    heap[index] = entry


@compiled
def _sift_down(entries: Any, heap: Any, index: int, count: int) -> None:
    entry = heap[index]
    while 2 * index + 1 < count:
        child = 2 * index + 1
        if child + 1 < count and precedes(entries, heap[child + 1], heap[child]):
            child += 1
        if not precedes(entries, heap[child], entry):
            break
        heap[index] = heap[child]
        index = child
    heap[index] = entry


@compiled
def push(tables: Any, queue: int, entry: int) -> None:
    """Push an entry onto a queue."""
    count = tables.words[QUEUED + queue]
    tables.queues[queue, count] = entry
    tables.words[QUEUED + queue] = count + 1
    _sift_up(tables.entries, tables.queues[queue], count)


@compiled
def pop(tables: Any, queue: int) -> Any:
    """Pop the first entry of a queue that is not empty."""
    heap = tables.queues[queue]
    first = heap[0]
    count = tables.words[QUEUED + queue] = tables.words[QUEUED + queue] - 1
    if count:
        heap[0] = heap[count]
        _sift_down(tables.entries, heap, 0, count)
    return first


@compiled
def remove(tables: Any, queue: int, entry: int) -> None:
    """Remove an entry from any position of its queue."""
    heap = tables.queues[queue]
    index = 0
    while heap[index] != entry:
        index += 1
    count = tables.words[QUEUED + queue] = tables.words[QUEUED + queue] - 1
    if index < count:
        heap[index] = heap[count]
        _sift_down(tables.entries, heap, index, count)
        _sift_up(tables.entries, heap, index)


@compiled
def new_entry(t: Any) -> Any:
    """Allocate an entry. There is one for each query that may wait or occupy a slot, and one more."""
    t.words[FREE_ENTRIES] -= 1
    return t.free[t.words[FREE_ENTRIES]]


@compiled
def free_entry(t: Any, entry: int) -> None:
    """Free an entry that is in no queue and no slot."""
    t.entries[entry, STATE] = FREE
    t.free[t.words[FREE_ENTRIES]] = entry
    t.words[FREE_ENTRIES] += 1


@compiled
def release(t: Any, entry: int) -> None:
    """Remove an entry from its queue or its list."""
    if t.entries[entry, STATE] == WAITING:
        remove(t, queue_of(t, entry), entry)
    elif t.entries[entry, STATE] == PAUSED:
        remove_from_list(t, PAUSED_LIST, entry)
    else:
        remove_from_list(t, t.entries[entry, STAGE], entry)
    t.entries[entry, STATE] = FREE


@compiled
def queue_of(t: Any, entry: int) -> Any:
    """Return the queue of an entry."""
    return DECODE if t.words[RULES] >= FIFO else t.entries[entry, STAGE]


@compiled
def add_to_list(t: Any, which: int, entry: int) -> None:
    """Append an entry to the list of active prefill, active decode or paused queries."""
    t.entries[entry, LIST_INDEX] = t.words[LISTED + which]
    t.lists[which, t.words[LISTED + which]] = entry
    t.words[LISTED + which] += 1


@compiled
def remove_from_list(t: Any, which: int, entry: int) -> None:
    """Remove an entry from its list; the last one of the list moves to its index."""
    t.words[LISTED + which] -= 1
    last, index = t.lists[which, t.words[LISTED + which]], t.entries[entry, LIST_INDEX]
    t.lists[which, index] = last
    t.entries[last, LIST_INDEX] = index


@compiled
def record_change(t: Any, change: int, entry: int) -> None:
    """Append an entry to the changes of the current schedule."""
    t.changes[change, t.words[CHANGED + change]] = entry
    t.words[CHANGED + change] += 1


# ---- estimates: extends of a query class, cost of an extend
#
# - Ê: extends of a query class, a running mean over completed queries. The prior of a new class follows CAGRA's rule:
#   every entry of top_m is expanded, and a few more.
# - T_ext(a): cost of an extend with `a` active slots, a line `fixed + each·a` in ns, by least squares over the last few
#   hundred with exponential forgetting. On a GPU `each` is about 0 until saturation, on a CPU it is nearly everything.
#   Before the first extend both are 0, and only slots count.

_MEMORY = 64.0  # queries after which an old one has weight 1/e
_EXTENDS = 256.0  # extends after which an old one has weight 1/e
_INERTIA = 16.0  # slots²: the variance of active slots needed to change the ratio of fixed to per-slot cost
_OUTLIER = 4.0  # an extend's cost is clipped to this many times the expected one


@compiled
def class_a(collection: int, top_m: int) -> Any:
    """Return the first word of a query class."""
    return (np.int64(collection) + 1) << 32 | np.int64(top_m)


@compiled
def class_b(width: int, patience: int) -> Any:
    """Return the second word of a query class."""
    return np.int64(width) << 32 | np.int64(patience)


@compiled
def class_row(tables: Any, a: int, b: int) -> Any:
    """Return the row of estimates of a query class, adding a new class. The table is reset when three quarters full."""
    if tables.words[CLASS_COUNT] > 3 * MAX_CLASSES // 4:
        tables.classes[:] = 0
        tables.words[CLASS_COUNT] = 0
    row = (a * 31 + (a >> 32) * 17 + b * 7 + (b >> 32)) % MAX_CLASSES
    while tables.classes[row, 0] != 0:
        if tables.classes[row, 0] == a and tables.classes[row, 1] == b:
            return row
        row = (row + 1) % MAX_CLASSES
    tables.classes[row, 0], tables.classes[row, 1] = a, b
    tables.means[row, 0] = (a & 0xFFFFFFFF) / max(b >> 32, 1) + 3.0
    tables.means[row, 1] = 0.0
    tables.words[CLASS_COUNT] += 1
    return row


@compiled
def learn_extends(tables: Any, row: int, extends: int) -> None:
    """Update a class's mean with a completed query."""
    count = min(tables.means[row, 1] + 1.0, _MEMORY)
    tables.means[row, 1] = count
    tables.means[row, 0] = extends if count == 1.0 else tables.means[row, 0] + (extends - tables.means[row, 0]) / count


@compiled
def extend_ns(tables: Any, active: float) -> Any:
    """Return T_ext(active)."""
    return tables.floats[FIXED_NS] + tables.floats[EACH_NS] * active


@compiled
def learn_cost(tables: Any, active: float, took_ns: float) -> None:
    """Update the cost model with an extend of `active` slots (of several extends: the mean)."""
    cost = tables.floats
    expected = extend_ns(tables, active)
    if cost[COST_COUNT] > 8 and expected > 0.0:
        took_ns = min(took_ns, _OUTLIER * expected)  # the process was descheduled
    cost[COST_COUNT] = min(cost[COST_COUNT] + 1.0, _EXTENDS)
    weight = 1.0 / cost[COST_COUNT]
    cost[COST_A] += (active - cost[COST_A]) * weight
    cost[COST_T] += (took_ns - cost[COST_T]) * weight
    cost[COST_AA] += (active * active - cost[COST_AA]) * weight
    cost[COST_AT] += (active * took_ns - cost[COST_AT]) * weight
    mean, total = cost[COST_A], cost[COST_T]
    # With little variance in active slots the line keeps its shape (the ratio of its parts) and is only scaled: the
    # machine has become faster or slower then.
    each, known = cost[EACH_NS], extend_ns(tables, mean)
    shaped = each * total / known if each > 0.0 and known > 0.0 else 0.0
    each = (cost[COST_AT] - mean * total + _INERTIA * shaped) / (cost[COST_AA] - mean * mean + _INERTIA)
    cost[EACH_NS] = min(max(each, 0.0), total / mean)
    cost[FIXED_NS] = total - cost[EACH_NS] * mean
