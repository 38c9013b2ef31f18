"""Memory of the scheduling policy: records of its queries, queues, estimates and settings.

An *entry* is a query in the pool, from its arrival to its answer. It waits in a queue, or occupies a slot of the engine
in which it is active or paused.
"""

from typing import Annotated

from gpu.slots import MAX_SLOTS
from ipc.native.records import Array, Record, new_array, record, record_at
from runtime.pool.compiled import compiled
from runtime.pool.settings import RULE_NAMES, Policy

NEVER_NS = 1 << 62
PREFILL, DECODE = 0, 1  # stages, as `ipc` codes them
FREE, WAITING, ACTIVE, PAUSED = range(4)  # states of an entry
TRINITY, PAPER = range(2)
MAX_CLASSES = 1024  # clients choose parameters freely, so the number of classes is bounded
_SIZE_CLASSES = 32


@record
class Entry(Record):
    """A query in the pool. Times are monotonic ns."""

    # set by the caller of `policy.add`; the last four are the query class: all on which the number of extends depends
    stage: int
    arrival_ns: int
    deadline_ns: int  # NEVER_NS: none
    scope: int
    top_m: int
    search_width: int
    patience: int
    # set by the policy
    # its key in its queue (of equal keys the smaller `serial` goes first): the latest start of a prefill query, or when
    # a missed one is tried; the virtual deadline of a decode query; the arrival where queries are not ordered otherwise
    start_by_ns: int
    serial: int
    missed: bool  # demoted behind all that can still meet their TTFT
    query_class: int  # number of its class
    extends: int  # expected
    began: int  # the extend at which it began, or would have without pauses; while paused: minus its completed ones
    aged: bool  # not paused any more
    state: int
    list_index: int  # in the list that it is in


@record
class EntryList(Record):
    """Entries, by number: a stack, a heap or a list."""

    count: int
    numbers: Array[int]


@record
class QueryClass(Record):
    """How many extends the queries of one class took."""

    used: bool
    scope: int
    top_m: int
    search_width: int
    patience: int
    mean_extends: float
    queries: float  # that the mean is over


@record
class CostModel(Record):
    """T_ext, and the means that its line is fitted to."""

    fixed_ns: float
    each_ns: float  # per active slot
    count: float  # extends that the means are over
    mean_active: float
    mean_ns: float
    mean_active_squared: float
    mean_active_ns: float  # of the products


@record
class Tables(Record):
    """A policy's settings (see `Policy`) and state."""

    slots: int
    engine_slots: int
    queue: int
    decode_queue: int
    target_ns: int
    aging_ns: int
    flush_prefill_ns: int
    missed_ns: int
    keep_reserve: bool
    rules: int
    reserve: float

    entry_count: int
    entries: Array[Entry]
    free: EntryList
    queues: Annotated[Array[EntryList], 2]  # Q_pre and Q_dec: heaps
    active: Annotated[Array[EntryList], 2]  # by stage
    paused: EntryList
    admitted: EntryList  # by the last `schedule`, as the next three
    preempted: EntryList  # of `paused`, those of now
    resumed: EntryList
    late: EntryList

    last_serial: int
    total_extends: int
    decode_ran_ns: int  # when a decode query was last active, or none was pending; below 0: never
    credit_ns: float  # what prefill may use beyond ⌈rN⌉, in time of the whole batch
    burst: bool  # more prefill queries than reserved slots were present at once, and some still are
    virtual_deadlines_ns: Annotated[Array[int], _SIZE_CLASSES]
    """The last one of each size class: decode queries whose expected extends have so many bits."""
    cost: CostModel
    class_count: int
    classes: Array[QueryClass]  # a hash table


tables_at = record_at(Tables)


def new_tables(policy: Policy) -> Tables:
    """Allocate the records and store the policy's settings in them."""
    engine_slots = policy.engine_slots or min(2 * policy.slots, MAX_SLOTS)
    count = policy.queue + engine_slots + 1
    made = Tables(
        slots=policy.slots,
        engine_slots=engine_slots,
        queue=policy.queue,
        decode_queue=policy.decode_queue,
        target_ns=policy.prefill_target_ns,
        aging_ns=policy.aging_ns,
        flush_prefill_ns=policy.flush_prefill_ns,
        missed_ns=policy.missed_ns,
        keep_reserve=policy.keep_reserve,
        rules=RULE_NAMES.index(policy.rules),
        reserve=policy.reserve,
        entry_count=count,
        entries=new_array(Entry, count),
        decode_ran_ns=-1,
        classes=new_array(QueryClass, MAX_CLASSES),
    )
    changes = made.admitted, made.preempted, made.resumed, made.late
    for entries in (made.free, made.queues[PREFILL], made.queues[DECODE], *changes):
        entries.numbers = new_array(int, count)
    for entries in (made.active[PREFILL], made.active[DECODE], made.paused):
        entries.numbers = new_array(int, engine_slots)
    for number in range(count):
        made.free.numbers[number] = count - 1 - number
    made.free.count = count
    return made


@compiled
def active_count(t: Tables) -> int:
    """Return the number of active queries."""
    return t.active[PREFILL].count + t.active[DECODE].count
