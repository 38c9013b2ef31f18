"""What the policy and the loop work on: plain arrays, made once, named by columns, with queues and estimates in them.

An *entry* is a query in the pool, from its arrival to its answer. It waits in a queue, or has a slot of the engine, in
which it is active or paused.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.slots import MAX_SLOTS
from ipc.memory.instructions import floats, words
from runtime.pool.compiled import compiled
from runtime.pool.settings import RULE_NAMES, Policy

NEVER_NS = 1 << 62
PREFILL, DECODE, HELD_BACK = 0, 1, 2  # stages, as `ipc` codes them; the list of paused queries

# Columns of an entry, int64. Times are monotonic ns. Written by whoever adds it: STAGE, ARRIVAL, DEADLINE (NEVER_NS:
# none), KIND_A and KIND_B (what decides how many extends it takes). The policy's: START_BY (its key in its queue; of
# two equal ones the smaller SERIAL goes first), KIND (its row of estimates), EXTENDS (expected), BEGAN (the count of
# extends at which it began, or would have without its pauses), PAUSES, STATE, PLACE in its list. From OWN on: the
# caller's.
(
    STAGE,
    ARRIVAL,
    DEADLINE,
    KIND_A,
    KIND_B,
    START_BY,
    SERIAL,
    KIND,
    EXTENDS,
    BEGAN,
    PAUSES,
    STATE,
    PLACE,
    OWN,
) = range(14)
OWN_WORDS = 16
ENTRY_WORDS = OWN + OWN_WORDS
FREE, WAITING, ACTIVE, PAUSED, DONE_WAITING = range(5)  # the last one under `static` alone

# Words. SLOTS … RULES: settings, see `Policy`. Then counts: of free entries, of each queue (QUEUED: prefill's, then
# decode's), of the lists (LISTED: active prefill, active decode, paused), of the last schedule's changes (CHANGED:
# admitted, paused, resumed, late); DONE: extends so far; RAN_NS: when a decode query was active, or none wanted to be;
# BURST: whether more prefill queries were there at once than are reserved slots, and some still are.
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
    LOST_NS,
    RULES,
    FREE_ENTRIES,
    SERIALS,
    DONE,
    RAN_NS,
    KINDS_KNOWN,
    BURST,
    QUEUED,
) = range(18)
LISTED = QUEUED + 2
CHANGED = LISTED + 3
LAST_TURN = CHANGED + 4  # of the decode queries whose expected extends have so many bits
WORDS = LAST_TURN + 32
TRINITY, PAPER, FIFO, STATIC = range(4)
ADMITTED, PAUSING, RESUMED, LATE = range(4)  # kinds of change

# Floats. RESERVE: r. CREDIT: what prefill may take beyond ⌈rN⌉, in ns of the whole batch. The rest: what extends cost.
(RESERVE, CREDIT, COST_COUNT, COST_A, COST_T, COST_AA, COST_AT, FIXED_NS, EACH_NS) = range(9)
FLOATS = 9
KINDS = 1024  # clients choose parameters freely; what is learnt of them is bounded


class Tables(NamedTuple):
    """The arrays of a policy."""

    entries: npt.NDArray[np.int64]  # [entries, ENTRY_WORDS]
    words: npt.NDArray[np.int64]  # [WORDS]
    floats: npt.NDArray[np.float64]  # [FLOATS]
    free: npt.NDArray[np.int64]  # [entries]: those that are free, a stack
    queues: npt.NDArray[np.int64]  # [2, entries]: Q_pre and Q_dec, heaps of entries
    lists: npt.NDArray[np.int64]  # [3, engine slots]: active prefill, active decode, paused
    changes: npt.NDArray[np.int64]  # [4, entries]: see CHANGED
    kinds: npt.NDArray[np.int64]  # [KINDS, 2]: KIND_A and KIND_B of what was seen; 0 and 0: none yet
    means: npt.NDArray[np.float64]  # [KINDS, 2]: mean extends, and of how many queries


def new_tables(policy: Policy) -> Tables:
    """The arrays, with the policy's settings in them."""
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
        kinds=np.zeros((KINDS, 2), np.int64),
        means=np.zeros((KINDS, 2), np.float64),
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
        policy.lost_ns,
        RULE_NAMES.index(policy.rules),
    )
    made.words[FREE_ENTRIES] = entries
    made.words[RAN_NS] = -1
    made.floats[RESERVE] = policy.reserve
    return made


def handle_of(tables: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Addresses and shapes of the arrays, int64 [arrays, 3]: one argument costs less to hand over than all of them.

    The tables must outlive it.
    """
    return np.array([(array.ctypes.data, *array.shape, 1)[:3] for array in tables], np.int64)


@partial(compiled, returns_array=True)
def tables_at(handle: Any) -> Any:
    """The tables that `handle_of` described."""
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


# ---- where entries stand: free, in Q_pre or Q_dec (heaps by START_BY, and of equal ones by SERIAL), or in the list of
# who is active or paused


@compiled
def before(entries: Any, a: int, b: int) -> Any:
    """Whether entry `a` goes before `b`."""
    if entries[a, START_BY] != entries[b, START_BY]:
        return entries[a, START_BY] < entries[b, START_BY]
    return entries[a, SERIAL] < entries[b, SERIAL]


@compiled
def _rise(entries: Any, heap: Any, place: int) -> None:
    entry = heap[place]
    while place > 0 and before(entries, entry, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = entry


@compiled
def _sink(entries: Any, heap: Any, place: int, count: int) -> None:
    entry = heap[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and before(entries, heap[child + 1], heap[child]):
            child += 1
        if not before(entries, heap[child], entry):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = entry


@compiled
def push(tables: Any, queue: int, entry: int) -> None:
    """Put an entry into a queue."""
    count = tables.words[QUEUED + queue]
    tables.queues[queue, count] = entry
    tables.words[QUEUED + queue] = count + 1
    _rise(tables.entries, tables.queues[queue], count)


@compiled
def take(tables: Any, queue: int) -> Any:
    """Take the first entry out of a queue that is not empty."""
    heap = tables.queues[queue]
    first = heap[0]
    count = tables.words[QUEUED + queue] = tables.words[QUEUED + queue] - 1
    if count:
        heap[0] = heap[count]
        _sink(tables.entries, heap, 0, count)
    return first


@compiled
def take_out(tables: Any, queue: int, entry: int) -> None:
    """Take an entry out of its queue, wherever it stands."""
    heap = tables.queues[queue]
    place = 0
    while heap[place] != entry:
        place += 1
    count = tables.words[QUEUED + queue] = tables.words[QUEUED + queue] - 1
    if place < count:
        heap[place] = heap[count]
        _sink(tables.entries, heap, place, count)
        _rise(tables.entries, heap, place)


@compiled
def new_entry(t: Any) -> Any:
    """An entry to be filled; there is one for each query that may wait or have a slot, and one more."""
    t.words[FREE_ENTRIES] -= 1
    return t.free[t.words[FREE_ENTRIES]]


@compiled
def free_entry(t: Any, entry: int) -> None:
    """The query of an entry that has left queue and slot has ended."""
    t.entries[entry, STATE] = FREE
    t.free[t.words[FREE_ENTRIES]] = entry
    t.words[FREE_ENTRIES] += 1


@compiled
def leave(t: Any, entry: int) -> None:
    """A query has left its queue or its slot: it was cancelled, or its client is gone."""
    if t.entries[entry, STATE] == WAITING:
        take_out(t, queue_of(t, entry), entry)
    elif t.entries[entry, STATE] == PAUSED:
        unlist(t, HELD_BACK, entry)
    else:
        unlist(t, t.entries[entry, STAGE], entry)
    t.entries[entry, STATE] = FREE


@compiled
def queue_of(t: Any, entry: int) -> Any:
    """The queue that an entry waits in."""
    return DECODE if t.words[RULES] >= FIFO else t.entries[entry, STAGE]


@compiled
def list_in(t: Any, which: int, entry: int) -> None:
    """It is active or paused from now on."""
    t.entries[entry, PLACE] = t.words[LISTED + which]
    t.lists[which, t.words[LISTED + which]] = entry
    t.words[LISTED + which] += 1


@compiled
def unlist(t: Any, which: int, entry: int) -> None:
    """Its place goes to the last of the list."""
    t.words[LISTED + which] -= 1
    last, place = t.lists[which, t.words[LISTED + which]], t.entries[entry, PLACE]
    t.lists[which, place] = last
    t.entries[last, PLACE] = place


@compiled
def note(t: Any, kind: int, entry: int) -> None:
    """A change of the schedule that is being made."""
    t.changes[kind, t.words[CHANGED + kind]] = entry
    t.words[CHANGED + kind] += 1


# ---- what is learnt: how many extends a query takes, and how long an extend takes
#
# - Ê: the extends of queries that ask alike, a running mean over those that finished. One not seen yet is assumed to
#   follow CAGRA's rule: every entry of top_m is expanded, and a few more.
# - T_ext(a): an extend with `a` active slots, as a line `fixed + each·a` in ns, by least squares over the last few
#   hundred, older ones forgotten exponentially. On a GPU `each` is about 0 until it saturates, on a CPU it is nearly
#   everything. Before the first extend all is 0, and only slots count.

_MEMORY = 64.0  # queries after which an old one counts for 1/e
_EXTENDS = 256.0  # the same of extends
_INERTIA = 16.0  # slots², how much spread it takes to change what is fixed in proportion to what is not
_OUTLIER = 4.0  # an extend that took longer than this many times what was expected counts as that long


@compiled
def kind_a(collection: int, top_m: int) -> Any:
    """The first word of what queries that ask alike have in common."""
    return (np.int64(collection) + 1) << 32 | np.int64(top_m)


@compiled
def kind_b(width: int, patience: int) -> Any:
    """The second one."""
    return np.int64(width) << 32 | np.int64(patience)


@compiled
def row_of_kind(tables: Any, a: int, b: int) -> Any:
    """The row of estimates for queries that ask so; made if there is none."""
    if tables.words[KINDS_KNOWN] > 3 * KINDS // 4:
        tables.kinds[:] = 0
        tables.words[KINDS_KNOWN] = 0
    row = (a * 31 + (a >> 32) * 17 + b * 7 + (b >> 32)) % KINDS
    while tables.kinds[row, 0] != 0:
        if tables.kinds[row, 0] == a and tables.kinds[row, 1] == b:
            return row
        row = (row + 1) % KINDS
    tables.kinds[row, 0], tables.kinds[row, 1] = a, b
    tables.means[row, 0] = (a & 0xFFFFFFFF) / max(b >> 32, 1) + 3.0
    tables.means[row, 1] = 0.0
    tables.words[KINDS_KNOWN] += 1
    return row


@compiled
def learn_extends(tables: Any, row: int, extends: int) -> None:
    """A query of a kind took so many."""
    count = min(tables.means[row, 1] + 1.0, _MEMORY)
    tables.means[row, 1] = count
    tables.means[row, 0] = extends if count == 1.0 else tables.means[row, 0] + (extends - tables.means[row, 0]) / count


@compiled
def extend_ns(tables: Any, active: float) -> Any:
    """T_ext(active)."""
    return tables.floats[FIXED_NS] + tables.floats[EACH_NS] * active


@compiled
def learn_cost(tables: Any, active: float, took_ns: float) -> None:
    """An extend of `active` slots (of several, their mean) took so long."""
    cost = tables.floats
    expected = extend_ns(tables, active)
    if cost[COST_COUNT] > 8 and expected > 0.0:
        took_ns = min(took_ns, _OUTLIER * expected)  # the process lost its core for a while
    cost[COST_COUNT] = min(cost[COST_COUNT] + 1.0, _EXTENDS)
    weight = 1.0 / cost[COST_COUNT]
    cost[COST_A] += (active - cost[COST_A]) * weight
    cost[COST_T] += (took_ns - cost[COST_T]) * weight
    cost[COST_AA] += (active * active - cost[COST_AA]) * weight
    cost[COST_AT] += (active * took_ns - cost[COST_AT]) * weight
    mean, total = cost[COST_A], cost[COST_T]
    # The less the numbers of active slots differed, the more the line keeps its shape: what has changed then is how
    # fast the machine is.
    each, known = cost[EACH_NS], extend_ns(tables, mean)
    shaped = each * total / known if each > 0.0 and known > 0.0 else 0.0
    each = (cost[COST_AT] - mean * total + _INERTIA * shaped) / (cost[COST_AA] - mean * mean + _INERTIA)
    cost[EACH_NS] = min(max(each, 0.0), total / mean)
    cost[FIXED_NS] = total - cost[EACH_NS] * mean
