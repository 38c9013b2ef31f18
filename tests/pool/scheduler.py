"""Python interface of the pool's compiled policy for tests: queries are objects, and rejections are exceptions."""

from dataclasses import dataclass, field

from ipc import STAGES, Stage
from ipc.native.records import address_of
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool import policy, queues, tables
from runtime.pool.compiled import compiled
from runtime.pool.estimates import extend_ns, learn_cost
from runtime.pool.settings import Policy
from runtime.pool.tables import NEVER_NS, Tables, active_count, new_tables, tables_at


@dataclass(slots=True, eq=False)
class Entry:
    """A query, by number: arrival and deadline (NEVER_NS: none) in monotonic ns, and its search parameters."""

    stage: Stage
    arrival_ns: int
    query: int
    deadline_ns: int = NEVER_NS
    collection: int = 0
    top_m: int = 64
    search_width: int = 4
    patience: int = 0
    number: int = -1  # its row in the tables while it is in the pool


@dataclass(slots=True)
class Changes:
    """Changes before the next extend. `late` queries left the queue: they can no longer meet their deadlines."""

    admitted: list[Entry] = field(default_factory=list)
    paused: list[Entry] = field(default_factory=list)
    resumed: list[Entry] = field(default_factory=list)
    late: list[Entry] = field(default_factory=list)


class Scheduler:
    """The queries of one pool under a `Policy`.

    A caller adds every query (`add`), requests the active queries before each extend (`next`), and reports extends
    (`advanced`) and ended queries (`finished`, `left`).
    """

    def __init__(self, settings: Policy) -> None:
        self.tables: Tables = new_tables(settings)
        self._handle = address_of(self.tables)
        self._entries: dict[int, Entry] = {}

    @property
    def waiting(self) -> dict[Stage, int]:
        return {stage: self.tables.queues[code].count for code, stage in enumerate(STAGES)}

    @property
    def running(self) -> dict[Stage, int]:
        return {stage: self.tables.active[code].count for code, stage in enumerate(STAGES)}

    @property
    def paused(self) -> int:
        return self.tables.paused.count

    @property
    def busy(self) -> bool:
        return bool(self._entries)

    def add(self, entry: Entry, now_ns: int) -> None:
        """Enqueue a query. Raises `Overloaded` for a full queue, `DeadlineExceeded` for a deadline in the past."""
        number = _add(
            self._handle, STAGES.index(entry.stage), entry.arrival_ns, entry.deadline_ns, entry.collection, entry.top_m,
            entry.search_width, entry.patience, now_ns,
        )  # fmt: skip
        if number == -policy.OVERLOADED:
            raise Overloaded(f"the pool's queue is full: {sum(self.waiting.values())} queries wait")
        if number == -policy.TOO_LATE:
            raise DeadlineExceeded("the query's deadline has passed")
        entry.number = number
        self._entries[number] = entry

    def next(self, now_ns: int) -> Changes:
        """Assign the slots of the next extend."""
        if not _schedule(self._handle, now_ns):
            return Changes()
        t = self.tables
        admitted, paused, resumed, late = (
            [self._entries[changed.numbers[i]] for i in range(changed.count)]
            for changed in (t.admitted, t.preempted, t.resumed, t.late)
        )
        for entry in late:
            self._free(entry)
        return Changes(admitted, paused, resumed, late)

    def advanced(self, extends: int, took_ns: float) -> None:
        """Report that every active query advanced by `extends`, which took `took_ns` in total."""
        _advanced(self._handle, extends, int(took_ns))

    def finished(self, entry: Entry, extends: int) -> None:
        """Report that a query was answered after `extends` and has left its slot."""
        _finished(self._handle, entry.number, extends)
        self._forget(entry)

    def left(self, entry: Entry) -> None:
        """Report that a query left its queue or slot without an answer. Raises ValueError if it is in neither."""
        if self._entries.get(entry.number) is not entry:
            raise ValueError("the query is not in the pool")
        _left(self._handle, entry.number)
        self._forget(entry)

    def learn_cost(self, active: float, took_ns: float) -> None:
        """Report the duration of an extend of `active` slots in a calibration."""
        _learn_cost(self._handle, float(active), float(took_ns))

    def extend_ns(self, active: float) -> float:
        """Return T_ext: the expected duration of an extend of `active` slots."""
        return float(_extend_ns(self._handle, float(active)))

    def _free(self, entry: Entry) -> None:
        _free(self._handle, entry.number)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.number]
        entry.number = -1


@compiled
def _add(
    handle: int,
    stage: int,
    arrival: int,
    deadline: int,
    collection: int,
    top_m: int,
    width: int,
    patience: int,
    now: int,
) -> int:
    t = tables_at(handle)
    number = queues.new_entry(t)
    entry = t.entries[number]
    entry.stage, entry.arrival_ns, entry.deadline_ns = stage, arrival, deadline
    entry.scope = collection
    entry.top_m, entry.search_width, entry.patience = top_m, width, patience
    verdict = policy.add(t, number, now)
    if verdict == policy.ACCEPTED:
        return number
    queues.free_entry(t, number)
    return -verdict


@compiled
def _schedule(handle: int, now: int) -> int:
    t = tables_at(handle)
    policy.schedule(t, now)
    return t.admitted.count + t.preempted.count + t.resumed.count + t.late.count


@compiled
def _advanced(handle: int, extends: int, took_ns: int) -> None:
    t = tables_at(handle)
    policy.advance(t, t.active[tables.PREFILL].count, active_count(t), extends, took_ns)


@compiled
def _finished(handle: int, number: int, extends: int) -> None:
    t = tables_at(handle)
    policy.finish(t, number, extends)
    queues.free_entry(t, number)


@compiled
def _left(handle: int, number: int) -> None:
    t = tables_at(handle)
    queues.release(t, number)
    queues.free_entry(t, number)


@compiled
def _free(handle: int, number: int) -> None:
    queues.free_entry(tables_at(handle), number)


@compiled
def _learn_cost(handle: int, active: float, took_ns: float) -> None:
    learn_cost(tables_at(handle).cost, active, took_ns)


@compiled
def _extend_ns(handle: int, active: float) -> float:
    return extend_ns(tables_at(handle).cost, active)
