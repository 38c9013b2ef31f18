"""Simulated vector pools: production's policy over batches of extends on the virtual clock (`pool_core`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from ipc import STAGES, Stage
from ipc.native.records import address_of, new_array
from runtime.node.config import PoolSection
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.compiled import compiled
from runtime.pool.settings import Policy
from runtime.pool.sizing import LOOP_NS, ExtendCost, fewest_slots
from runtime.pool.tables import DECODE, NEVER_NS, PREFILL, learn_cost, new_tables, tables_at
from runtime.simulator.events import NEXT, Events, ns
from runtime.simulator.stages import pool_core as core
from runtime.simulator.stages.gpu import Gpu
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


@dataclass(frozen=True, slots=True)
class PoolRules:
    """A pool's policy; `first`: the stage that has strict priority (a naive policy)."""

    policy: Policy
    first: Stage | None = None


@compiled
def _learn(tables: int, active: float, took_ns: float) -> None:
    """Record the duration of a calibration extend with `active` queries."""
    learn_cost(tables_at(tables).cost, active, took_ns)


class SimPool:
    """One pool worker: its policy's tables and its counters."""

    def __init__(self, rules: PoolRules, times: ServiceTimes) -> None:
        self.rules = rules
        self.tables = new_tables(rules.policy)
        for active in (1, 2, 4, 8) * 4:  # a real pool measures this before its first query
            _learn(address_of(self.tables), float(active), (times.extend_time_s(active) + times.round_s) * 1e9)
        self.members = new_array(core.Member, self.tables.entry_count)
        self.words = np.zeros(core.POOL_WORDS, np.int64)
        self.waits = np.zeros(len(_WAIT.buckets) + 1)

    @property
    def reserve(self) -> float:
        """The reserve r."""
        return self.tables.reserve

    @property
    def waiting(self) -> tuple[int, int]:
        """Numbers of prefill and decode queries that wait for a slot."""
        return self.tables.queues[PREFILL].count, self.tables.queues[DECODE].count

    def set_knobs(self, reserve: float, flush_prefill_s: float) -> None:
        """Set the reserve r and the flush timeout τ_pre."""
        self.tables.reserve, self.tables.flush_prefill_ns = reserve, ns(flush_prefill_s)

    @property
    def wait_counts(self) -> list[float]:
        """Histogram of prefill queries' waits for a slot, in the buckets of their metric."""
        counts: list[float] = self.waits.tolist()
        return counts

    @property
    def wait_ns(self) -> int:
        """Total wait of all queries for a slot."""
        return int(self.words[core.WAITED])

    @property
    def busy_ns(self) -> int:
        return int(self.words[core.BUSY])

    @property
    def slot_steps(self) -> int:
        """Sum of active queries over all extends."""
        return int(self.words[core.MEMBER_STEPS])

    @property
    def served(self) -> int:
        return int(self.words[core.SERVED])

    @property
    def empty(self) -> bool:
        """Whether no query waits or has a slot."""
        return not self.words[core.QUERIES]


class Pools:
    """All pool workers of a node. Queries use the default search parameters of `limits`.

    Queries arrive through a ring and are distributed round-robin over the pools of a *group*.
    """

    def __init__(
        self,
        events: Events,
        times: ServiceTimes,
        limits: PoolSection,
        pools: Sequence[tuple[PoolRules, Gpu]],
        random: Random,
        *,
        capacity: int = _CAPACITY,
    ) -> None:
        self._events, self._random = events, random
        self._ring_ns = ns(times.ring_s)
        self.top_m = limits.top_m
        self.pools = [SimPool(rules, times) for rules, _ in pools]
        self._replies: dict[int, Reply] = {}
        self._gpus = [gpu for _, gpu in pools]
        count = len(pools)
        most = max(rules.policy.slots for rules, _ in pools)
        self._state = core.State(
            words=np.zeros(core.WORDS, np.int64),
            queries=np.zeros((capacity, core.QUERY_WORDS), np.int64),
            free=np.arange(capacity, dtype=np.int64)[::-1].copy(),
            arriving=np.zeros(capacity, np.int64),
            answers=np.zeros(capacity, np.int64),
            pools=np.zeros((count, core.POOL_WORDS), np.int64),
            costs=np.array([(gpu.slowdown, times.round_s, times.query_s) for gpu in self._gpus]),
            extend_s=np.array([times.extend_time_s(active) for active in range(most + 1)]),
            policies=np.array([(address_of(pool.tables), address_of(pool.members)) for pool in self.pools]),
            groups=np.zeros((0, 2 + count), np.int64),
            drawn=np.zeros(0, np.int64),
            waits=np.zeros((count, len(_WAIT.buckets) + 1)),
            edges=np.array(_WAIT.buckets),
        )
        self._state.words[core.FREE] = capacity
        self._state.words[core.RING_NS] = ns(times.ring_s)
        self._state.words[core.SEARCH_WIDTH] = limits.search_width
        self._state.words[core.MIN_EXTENDS] = -(-limits.top_m // limits.search_width)
        for number, ((rules, gpu), pool) in enumerate(zip(pools, self.pools, strict=True)):
            pool.words, pool.waits = self._state.pools[number], self._state.waits[number]
            for column, value in {
                core.END: NEVER_NS,
                core.WAKE: NEVER_NS,
                core.WOKEN: -1,
                core.IDLE: 1,
                core.WAKE_NS: ns(times.wake_s),
                core.GPU: gpu.words.ctypes.data,
                core.PREFERRED: -1 if rules.first is None else STAGES.index(rules.first),
            }.items():
                pool.words[column] = value
        self._draw_extends()
        events.source = self

    def group(self, pools: Sequence[int]) -> int:
        """Create a group of the pools with these indices."""
        row = np.zeros((1, 2 + len(self.pools)), np.int64)
        row[0, 1 : 2 + len(pools)] = len(pools), *pools
        self._replace_arrays(groups=np.concatenate([self._state.groups, row]))
        return len(self._state.groups) - 1

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
        number: int = core.submit(
            self.handle, stage == "decode", group, at_ns, deadline_ns, extends, top_m or self.top_m, -1
        )
        if number < 0:
            self._grow()
            return self.submit_at(at_ns, group, stage, deadline_ns, reply, extends=extends, top_m=top_m)
        self._replies[number] = reply
        self._events.expect(at_ns)
        return number

    def times_of(self, number: int) -> tuple[int, int]:
        """Return when a query was admitted to a slot and when it was answered, until its number is reused."""
        one = self._state.queries[number]
        return int(one[core.BEGUN]), int(one[core.ENDED])

    def cancel(self, number: int) -> None:
        """Cancel a query: its reply is not called."""
        del self._replies[number]
        core.cancel(self.handle, number)

    def run(self, until_ns: int, planned: int) -> bool:
        """Process events up to `until_ns` or the next reply, and set the clock to the reply."""
        now, self._events.clock[NEXT], number, status = core.run(self.handle, until_ns)
        if number >= 0:
            self._events.now_ns = now
            self.reply(number, status)
        else:
            self.ensure_capacity(0)
        return True

    def reply(self, number: int, status: int) -> None:
        """Call the reply of a query."""
        self._replies.pop(number)(core.STATUSES[status])

    def ensure_capacity(self, queries: int) -> None:
        """Provide capacity for more than `queries` new queries, and their random numbers."""
        words = self._state.words
        if words[core.FREE] <= queries > 0:
            self._grow()
        if words[core.DRAWN] == len(self._state.drawn):
            self._draw_extends()

    def _draw_extends(self) -> None:
        """Draw for each of the next queries how many extends it takes beyond the minimum."""
        self._replace_arrays(drawn=np.array([self._random.randint(1, 3) for _ in range(_RANDOM_BATCH)], np.int64))
        self._state.words[core.DRAWN] = 0

    def _grow(self) -> None:
        """Double the capacity."""
        old, w = self._state, self._state.words
        count = len(old.queries)

        def unwrapped(ring: Any, first: int) -> Any:
            return np.concatenate([np.roll(ring, -first), np.zeros(count, np.int64)])

        arriving, answers = unwrapped(old.arriving, w[core.ARRIVING_HEAD]), unwrapped(old.answers, w[core.ANSWERS_HEAD])
        w[core.ARRIVING_HEAD] = w[core.ANSWERS_HEAD] = 0
        new = np.arange(count, 2 * count, dtype=np.int64)
        free = np.concatenate([old.free[: w[core.FREE]], new, np.zeros(count - w[core.FREE], np.int64)])
        w[core.FREE] += count
        queries = np.concatenate([old.queries, np.zeros_like(old.queries)])
        self._replace_arrays(queries=queries, free=free, arriving=arriving, answers=answers)

    def _replace_arrays(self, **arrays: Any) -> None:
        self._state = self._state._replace(**arrays)
        self.handle = core.handle_of(self._state)
