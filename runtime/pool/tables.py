"""Memory of the scheduling policy: records of its queries and settings, with their queues and estimates.

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

    # set by the caller of `policy.add`; the last five are the query class: all on which the number of extends depends
    stage: int
    arrival_ns: int
    deadline_ns: int  # NEVER_NS: none
    index: int
    scope: int
    top_m: int
    search_width: int
    patience: int
    # set by the policy
    start_by_ns: int  # its key in its queue: of equal keys the smaller `serial` goes first
    serial: int
    missed: bool  # demoted behind all that can still meet their TTFT
    query_class: int  # number of its class
    extends: int  # expected
    began: int  # the extend at which it began, or would have begun without its pauses
    pauses: int
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
    index: int
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
    max_pauses: int
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
    preempted: EntryList
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
        max_pauses=policy.max_pauses,
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


# ---- free stack, queues (heaps by `start_by_ns`, then `serial`), and lists of active and paused entries


@compiled
def precedes(t: Tables, a: int, b: int) -> bool:
    """Return whether entry `a` goes before `b`."""
    one, other = t.entries[a], t.entries[b]
    if one.start_by_ns != other.start_by_ns:
        return one.start_by_ns < other.start_by_ns
    return one.serial < other.serial


@compiled
def _sift_up(t: Tables, heap: Array[int], index: int) -> None:
    entry = heap[index]
    while index > 0 and precedes(t, entry, heap[(index - 1) // 2]):
        heap[index] = heap[(index - 1) // 2]
        index = (index - 1) // 2
    heap[index] = entry


@compiled
def _sift_down(t: Tables, heap: Array[int], index: int, count: int) -> None:
    entry = heap[index]
    while 2 * index + 1 < count:
        child = 2 * index + 1
        if child + 1 < count and precedes(t, heap[child + 1], heap[child]):
            child += 1
        if not precedes(t, heap[child], entry):
            break
        heap[index] = heap[child]
        index = child
    heap[index] = entry


@compiled
def push(t: Tables, queue: EntryList, number: int) -> None:
    """Push an entry onto a queue."""
    append(queue, number)
    _sift_up(t, queue.numbers, queue.count - 1)


@compiled
def pop(t: Tables, queue: EntryList) -> int:
    """Pop the first entry of a queue that is not empty."""
    heap = queue.numbers
    first = heap[0]
    queue.count -= 1
    if queue.count:
        heap[0] = heap[queue.count]
        _sift_down(t, heap, 0, queue.count)
    return first


@compiled
def remove(t: Tables, queue: EntryList, number: int) -> None:
    """Remove an entry from any position of its queue."""
    heap = queue.numbers
    index = 0
    while heap[index] != number:
        index += 1
    queue.count -= 1
    if index < queue.count:
        heap[index] = heap[queue.count]
        _sift_down(t, heap, index, queue.count)
        _sift_up(t, heap, index)


@compiled
def append(entries: EntryList, number: int) -> None:
    """Append an entry to a stack, or to the changes of the current schedule."""
    entries.numbers[entries.count] = number
    entries.count += 1


@compiled
def new_entry(t: Tables) -> int:
    """Allocate an entry. There is one for each query that may wait or occupy a slot, and one more."""
    t.free.count -= 1
    return t.free.numbers[t.free.count]


@compiled
def free_entry(t: Tables, number: int) -> None:
    """Free an entry that is in no queue and no slot."""
    t.entries[number].state = FREE
    append(t.free, number)


@compiled
def release(t: Tables, number: int) -> None:
    """Remove an entry from its queue or its list."""
    entry = t.entries[number]
    if entry.state == WAITING:
        remove(t, t.queues[entry.stage], number)
    elif entry.state == PAUSED:
        remove_from_list(t, t.paused, number)
    else:
        remove_from_list(t, t.active[entry.stage], number)
    entry.state = FREE


@compiled
def active_count(t: Tables) -> int:
    """Return the number of active queries."""
    return t.active[PREFILL].count + t.active[DECODE].count


@compiled
def add_to_list(t: Tables, entries: EntryList, number: int) -> None:
    """Append an entry to the list of active queries of its stage, or of paused ones."""
    t.entries[number].list_index = entries.count
    append(entries, number)


@compiled
def remove_from_list(t: Tables, entries: EntryList, number: int) -> None:
    """Remove an entry from its list; the last one of the list moves to its index."""
    entries.count -= 1
    last, index = entries.numbers[entries.count], t.entries[number].list_index
    entries.numbers[index] = last
    t.entries[last].list_index = index


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
def class_of(t: Tables, entry: Entry) -> int:
    """Return the number of an entry's query class, adding a new one. The table is reset when three quarters full."""
    if t.class_count > 3 * MAX_CLASSES // 4:
        for number in range(MAX_CLASSES):
            t.classes[number].used = False
        t.class_count = 0
    key = entry.index * 17 + entry.scope * 13 + entry.top_m * 31 + entry.search_width * 7 + entry.patience
    number = key % MAX_CLASSES
    found = t.classes[number]
    while found.used:
        if (
            found.index == entry.index
            and found.scope == entry.scope
            and found.top_m == entry.top_m
            and found.search_width == entry.search_width
            and found.patience == entry.patience
        ):
            return number
        number = (number + 1) % MAX_CLASSES
        found = t.classes[number]
    found.used, found.index, found.scope, found.top_m = True, entry.index, entry.scope, entry.top_m
    found.search_width, found.patience = entry.search_width, entry.patience
    found.mean_extends, found.queries = entry.top_m / max(entry.search_width, 1) + 3.0, 0.0
    t.class_count += 1
    return number


@compiled
def learn_extends(found: QueryClass, extends: int) -> None:
    """Update a class's mean with a completed query."""
    found.queries = count = min(found.queries + 1.0, _MEMORY)
    found.mean_extends = extends if count == 1.0 else found.mean_extends + (extends - found.mean_extends) / count


@compiled
def extend_ns(cost: CostModel, active: float) -> float:
    """Return T_ext(active)."""
    return cost.fixed_ns + cost.each_ns * active


@compiled
def learn_cost(cost: CostModel, active: float, took_ns: float) -> None:
    """Update the cost model with an extend of `active` slots (of several extends: the mean)."""
    expected = extend_ns(cost, active)
    if cost.count > 8 and expected > 0.0:
        took_ns = min(took_ns, _OUTLIER * expected)  # the process was descheduled
    cost.count = min(cost.count + 1.0, _EXTENDS)
    weight = 1.0 / cost.count
    cost.mean_active += (active - cost.mean_active) * weight
    cost.mean_ns += (took_ns - cost.mean_ns) * weight
    cost.mean_active_squared += (active * active - cost.mean_active_squared) * weight
    cost.mean_active_ns += (active * took_ns - cost.mean_active_ns) * weight
    mean, total = cost.mean_active, cost.mean_ns
    # With little variance in active slots the line keeps its shape (the ratio of its parts) and is only scaled: the
    # machine has become faster or slower then.
    each, known = cost.each_ns, extend_ns(cost, mean)
    shaped = each * total / known if each > 0.0 and known > 0.0 else 0.0
    each = (cost.mean_active_ns - mean * total + _INERTIA * shaped) / (
        cost.mean_active_squared - mean * mean + _INERTIA
    )
    cost.each_ns = min(max(each, 0.0), total / mean)
    cost.fixed_ns = total - cost.each_ns * mean
