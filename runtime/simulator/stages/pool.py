"""Simulated vector pools: production's policy over batches of extends on the virtual clock (`pool_core`)."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from ipc import STAGES, Stage
from ipc.native.records import Array, address_of, array_from, array_over, new_array
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.worker_config import SEARCH_WIDTH, PoolSection
from runtime.pool.compiled import compiled
from runtime.pool.estimates import learn_cost
from runtime.pool.settings import Policy
from runtime.pool.sizing import LOOP_NS, ExtendCost, fewest_slots
from runtime.pool.tables import DECODE, PREFILL, Tables, new_tables, tables_at
from runtime.simulator.stages import pool_core as core
from runtime.simulator.stages import pool_tables as at
from runtime.simulator.stages.events import Events, ns
from runtime.simulator.stages.schedule import ANSWERED, OUT_OF_CAPACITY
from runtime.simulator.times.service import ServiceTimes

_MOST_SLOTS = 512
_RANDOM_BATCH = 1 << 10  # numbers of extends drawn at a time
_CAPACITY = 1 << 10  # initial number of queries in flight
Reply = Callable[[str], None]
_WAIT = PoolMetrics.WAIT["prefill"]


def slots_of(limits: PoolSection, times: ServiceTimes) -> int:
    """Return the number of slots: as configured, or as a pool with these extend times would choose it."""
    if isinstance(limits.slots, int):
        return limits.slots
    sizes = [1 << power for power in range(_MOST_SLOTS.bit_length())]
    return fewest_slots([ExtendCost(size, times.extend_time_s(size) * 1e9 + LOOP_NS) for size in sizes])


@compiled
def _learn(tables: int, active: float, took_ns: float) -> None:
    """Record the duration of a calibration extend with `active` queries."""
    learn_cost(tables_at(tables).cost, active, took_ns)


class SimPool:
    """One pool worker: its policy's tables and its counters."""

    def __init__(self, policy: Policy, times: ServiceTimes) -> None:
        self.tables = new_tables(policy)
        for active in (1, 2, 4, 8) * 4:  # a real pool measures this before its first query
            _learn(address_of(self.tables), float(active), (times.extend_time_s(active) + times.round_s) * 1e9)
        self.members = new_array(at.Member, self.tables.entry_count)
        self.waits = np.zeros(len(_WAIT.buckets) + 1)  # of prefill queries for a slot, in the buckets of their metric
        self.counters = at.Pool()

    @property
    def waiting(self) -> tuple[int, int]:
        """Numbers of prefill and decode queries that wait for a slot."""
        return self.tables.queues[PREFILL].count, self.tables.queues[DECODE].count

    def set_knobs(self, reserve: float, flush_prefill_s: float) -> None:
        """Set the reserve r and the flush timeout τ_pre."""
        self.tables.reserve, self.tables.flush_prefill_ns = reserve, ns(flush_prefill_s)


class Pools:
    """All pool workers of a node. Queries use the default search parameters of `limits`.

    Queries arrive through a ring and are distributed round-robin over the pools of a *group*.
    """

    def __init__(
        self,
        events: Events,
        times: ServiceTimes,
        limits: PoolSection,
        pools: Sequence[tuple[Policy, at.Gpu]],
        random: Random,
        *,
        capacity: int = _CAPACITY,
    ) -> None:
        self._events, self._random = events, random
        self._ring_ns = ns(times.ring_s)
        self.top_m = limits.top_m
        self.pools = [SimPool(policy, times) for policy, _ in pools]
        self._replies: dict[int, Reply] = {}
        self._gpus = [gpu for _, gpu in pools]
        most = max(policy.slots for policy, _ in pools)
        self._state = at.State(
            schedule=events.schedule,
            capacity=capacity,
            queries=new_array(at.Query, capacity),
            free_count=capacity,
            free=array_over(int, np.arange(capacity, dtype=np.int64)[::-1].copy()),
            pools=new_array(at.Pool, len(pools)),
            groups=new_array(at.Group, len(pools) + len(STAGES)),
            extend_s=array_over(float, np.array([times.extend_time_s(active) for active in range(most + 1)])),
            edge_count=len(_WAIT.buckets),
            edges=array_over(float, np.array(_WAIT.buckets)),
            ring_ns=self._ring_ns,
            search_width=SEARCH_WIDTH,
            min_extends=-(-limits.top_m // SEARCH_WIDTH),
        )
        self.handle = address_of(self._state)
        for number, ((_, gpu), pool) in enumerate(zip(pools, self.pools, strict=True)):
            self._state.pools[number] = at.Pool(
                number=number,
                tables=array_from(Tables, address_of(pool.tables)),
                members=pool.members,
                gpu=array_from(at.Gpu, address_of(gpu)),
                waits=array_over(float, pool.waits),
                round_s=times.round_s,
                query_s=times.query_s,
                wake_ns=ns(times.wake_s),
                idle=True,
            )
            pool.counters = self._state.pools[number]
        self._groups: list[Array[int]] = []
        self._draw_extends()
        events.pools = self.handle
        events.handlers[ANSWERED] = self._reply
        events.handlers[OUT_OF_CAPACITY] = lambda subject, status: self.ensure_capacity(0)
        events.ensure_capacity(capacity)

    def group(self, pools: Sequence[int]) -> int:
        """Create a group of the pools with these indices: there is one for each pool and each stage."""
        self._groups.append(array_over(int, np.array(pools, np.int64)))
        self._state.groups[len(self._groups) - 1] = at.Group(count=len(pools), pools=self._groups[-1])
        return len(self._groups) - 1

    def submit(self, group: int, stage: Stage, at_ns: int, deadline_ns: int, reply: Reply) -> int:
        """Submit a query at `at_ns`; `reply` is called with its status. Return its number, for `cancel` before that."""
        return self.submit_at(at_ns + self._ring_ns, group, stage, deadline_ns, reply)

    def submit_at(
        self,
        at_ns: int,
        group: int,
        stage: Stage,
        deadline_ns: int,
        reply: Reply,
        *,
        extends: int = 0,
        top_m: int = 0,
    ) -> int:
        """Submit a query that reaches its pool at `at_ns`. `extends` 0: drawn; `top_m` 0: the default."""
        number = core.submit(
            self.handle, STAGES.index(stage), group, at_ns, deadline_ns, extends, top_m or self.top_m, -1
        )
        if number < 0:
            self._grow()
            return self.submit_at(at_ns, group, stage, deadline_ns, reply, extends=extends, top_m=top_m)
        self._replies[number] = reply
        return number

    def times_of(self, number: int) -> tuple[int, int]:
        """Return when a query was admitted to a slot and when it was answered, until its number is reused."""
        query = self._state.queries[number]
        return query.begun_ns, query.ended_ns

    def cancel(self, number: int) -> None:
        """Cancel a query: its reply is not called."""
        del self._replies[number]
        core.cancel(self.handle, number)

    def _reply(self, number: int, status: int) -> None:
        """Call the reply of a query."""
        self._replies.pop(number)(core.STATUSES[status])

    def ensure_capacity(self, queries: int) -> None:
        """Provide capacity for events, for more than `queries` new queries, and for their random numbers."""
        self._events.ensure_capacity()
        if self._state.free_count <= queries > 0:
            self._grow()
        if self._state.drawn_used == self._state.drawn_count:
            self._draw_extends()

    def _draw_extends(self) -> None:
        """Draw for each of the next queries how many extends it takes beyond the minimum."""
        drawn = np.array([self._random.randint(1, 3) for _ in range(_RANDOM_BATCH)], np.int64)
        self._state.drawn, self._state.drawn_count, self._state.drawn_used = array_over(int, drawn), len(drawn), 0

    def _grow(self) -> None:
        """Double the capacity."""
        s, count = self._state, self._state.capacity
        queries, free = new_array(at.Query, 2 * count), new_array(int, 2 * count)
        for number in range(count):
            queries[number] = s.queries[number]
        for i in range(s.free_count):
            free[i] = s.free[i]
        for number in range(count, 2 * count):
            free[s.free_count] = number
            s.free_count += 1
        s.queries, s.free, s.capacity = queries, free, 2 * count
        self._events.ensure_capacity(2 * count)
