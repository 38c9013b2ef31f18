"""What the policy and the loop work on: plain arrays, made once, named by columns.

An *entry* is a query in the pool, from its arrival to its answer. It waits in a queue, or has a slot of the engine, in
which it is active or paused.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.slots import MAX_SLOTS
from ipc.memory.instructions import floats, floats2, words, words2
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
# BURST: whether more prefill queries were there at once than are reserved slots, and some still are; SINCE_NS: since
# when BUSY_NS counts.
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
    RULES,
    FREE_ENTRIES,
    SERIALS,
    DONE,
    RAN_NS,
    KINDS_KNOWN,
    BURST,
    SINCE_NS,
    QUEUED,
) = range(18)
LISTED = QUEUED + 2
CHANGED = LISTED + 3
LAST_TURN = CHANGED + 4  # of the decode queries whose expected extends have so many bits
WORDS = LAST_TURN + 32
TRINITY, PAPER, FIFO, STATIC = range(4)
ADMITTED, PAUSING, RESUMED, LATE = range(4)  # kinds of change

# Floats. RESERVE: r. CREDIT: what prefill may take beyond ⌈rN⌉, in ns of the whole batch. BUSY_NS: how long the pool
# was busy. The rest: what extends cost.
(RESERVE, CREDIT, BUSY_NS, COST_COUNT, COST_A, COST_T, COST_AA, COST_AT, FIXED_NS, EACH_NS) = range(10)
FLOATS = 10
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
        words2(handle[0, 0], handle[0, 1], handle[0, 2]),
        words(handle[1, 0], handle[1, 1]),
        floats(handle[2, 0], handle[2, 1]),
        words(handle[3, 0], handle[3, 1]),
        words2(handle[4, 0], handle[4, 1], handle[4, 2]),
        words2(handle[5, 0], handle[5, 1], handle[5, 2]),
        words2(handle[6, 0], handle[6, 1], handle[6, 2]),
        words2(handle[7, 0], handle[7, 1], handle[7, 2]),
        floats2(handle[8, 0], handle[8, 1], handle[8, 2]),
    )
