"""The simulated vector pools: production's policy over batches of extends on the virtual clock (`pool_core`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from ipc import STAGES, Stage
from runtime.node.config import PoolSection
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import tables as at
from runtime.pool.compiled import compiled
from runtime.pool.settings import Policy
from runtime.pool.sizing import ExtendCost, fewest_slots
from runtime.pool.tables import NEVER_NS, handle_of, learn_cost, new_tables, tables_at
from runtime.simulator.events import NEXT, Events, ns
from runtime.simulator.stages import pool_core as core
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.times.service import ServiceTimes

_MOST_SLOTS = 512
_DRAWN = 1 << 10  # extends at a time
_ASKS = 1 << 10  # at first
Reply = Callable[[str], None]
_WAIT = PoolMetrics.WAIT["prefill"]


def slots_of(limits: PoolSection, times: ServiceTimes) -> int:
    """N: as configured, or as a pool would find it with these extends."""
    if isinstance(limits.slots, int):
        return limits.slots
    sizes = [1 << power for power in range(_MOST_SLOTS.bit_length())]
    return fewest_slots([ExtendCost(size, times.extend_time_s(size) * 1e9) for size in sizes])


@dataclass(frozen=True, slots=True)
class PoolRules:
    """A pool's policy; `first`: the stage that goes before the other (one of the naive orders)."""

    policy: Policy
    first: Stage | None = None


@compiled
def _learn(handle: Any, active: float, took_ns: float) -> None:
    """An extend of so many took so long, in a calibration."""
    learn_cost(tables_at(handle), active, took_ns)


class SimPool:
    """One pool worker: its policy's tables, and what it has counted."""

    def __init__(self, rules: PoolRules, times: ServiceTimes) -> None:
        self.rules = rules
        self.tables = new_tables(rules.policy)
        for active in (1, 2, 4, 8) * 4:  # as a pool has measured it before its first query
            _learn(handle_of(self.tables), float(active), (times.extend_time_s(active) + times.round_s) * 1e9)
        self.words = np.zeros(core.POOL_WORDS, np.int64)
        self.waits = np.zeros(len(_WAIT.buckets) + 1)

    @property
    def reserve(self) -> float:
        """r."""
        return float(self.tables.floats[at.RESERVE])

    @property
    def waiting(self) -> tuple[int, int]:
        """Queries of prefill and of decode that wait for a slot."""
        prefill, decode = self.tables.words[at.QUEUED : at.QUEUED + 2].tolist()
        return prefill, decode

    def set_knobs(self, reserve: float, flush_prefill_s: float) -> None:
        """Set r and τ_pre."""
        self.tables.floats[at.RESERVE] = reserve
        self.tables.words[at.FLUSH_PREFILL_NS] = ns(flush_prefill_s)

    @property
    def wait_counts(self) -> list[float]:
        """Prefill queries' waits for a slot, by the buckets of their metric."""
        found: list[float] = self.waits.tolist()
        return found

    @property
    def wait_ns(self) -> int:
        """All queries' waits for a slot."""
        return int(self.words[core.WAITED])

    @property
    def busy_ns(self) -> int:
        return int(self.words[core.BUSY])

    @property
    def slot_steps(self) -> int:
        """Extends, each times the queries active in it."""
        return int(self.words[core.MEMBER_STEPS])

    @property
    def served(self) -> int:
        return int(self.words[core.SERVED])

    @property
    def empty(self) -> bool:
        """Whether no query waits or has a slot."""
        return not self.words[core.QUERIES]


class Pools:
    """All pool workers of a node, which are asked with the parameters that `limits` has as defaults.

    Queries come through a ring, and find the pools of a *group* in turn.
    """

    def __init__(
        self,
        events: Events,
        times: ServiceTimes,
        limits: PoolSection,
        pools: Sequence[tuple[PoolRules, Gpu]],
        random: Random,
        *,
        asks: int = _ASKS,
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
            asks=np.zeros((asks, core.ASK_WORDS), np.int64),
            free=np.arange(asks, dtype=np.int64)[::-1].copy(),
            coming=np.zeros(asks, np.int64),
            leaving=np.zeros(asks, np.int64),
            pools=np.zeros((count, core.POOL_WORDS), np.int64),
            costs=np.array([(gpu.slowdown, times.round_s, times.query_s) for gpu in self._gpus]),
            extend_s=np.array([times.extend_time_s(active) for active in range(most + 1)]),
            handles=np.concatenate([handle_of(pool.tables) for pool in self.pools]),
            groups=np.zeros((0, 2 + count), np.int64),
            drawn=np.zeros(0, np.int64),
            waits=np.zeros((count, len(_WAIT.buckets) + 1)),
            edges=np.array(_WAIT.buckets),
        )
        self._state.words[core.FREE] = asks
        self._state.words[core.RING_NS] = ns(times.ring_s)
        self._state.words[core.SEARCH_WIDTH] = limits.search_width
        self._state.words[core.EXTENDS_LEAST] = -(-limits.top_m // limits.search_width)
        for number, ((rules, gpu), pool) in enumerate(zip(pools, self.pools, strict=True)):
            pool.words, pool.waits = self._state.pools[number], self._state.waits[number]
            for column, value in {
                core.END: NEVER_NS,
                core.WAKE: NEVER_NS,
                core.WOKEN: -1,
                core.RESTING: 1,
                core.WAKE_NS: ns(times.wake_s),
                core.GPU: gpu.words.ctypes.data,
                core.PREFERRED: -1 if rules.first is None else STAGES.index(rules.first),
            }.items():
                pool.words[column] = value
        self._draw()
        events.beside = self

    def group(self, pools: Sequence[int]) -> int:
        """A new group, of the pools with these numbers."""
        row = np.zeros((1, 2 + len(self.pools)), np.int64)
        row[0, 1 : 2 + len(pools)] = len(pools), *pools
        self._renew(groups=np.concatenate([self._state.groups, row]))
        return len(self._state.groups) - 1

    def ask(self, group: int, stage: Stage, at_ns: int, deadline_ns: int, reply: Reply) -> int:
        """A vector is asked for at a moment; `reply` is told the status. The query's number, until then, to `forget`
        it."""
        return self.ask_at(at_ns + self._ring_ns, group, stage, deadline_ns, reply)

    def ask_at(
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
        """A query is at its pool `at_ns`. 0 extends: as its `top_m` has it, and
        some; `top_m` 0: the pool's own."""
        number: int = core.ask(
            self.handle, stage == "decode", group, at_ns, deadline_ns, extends, top_m or self.top_m, -1
        )
        if number < 0:
            self._make_room()
            return self.ask_at(at_ns, group, stage, deadline_ns, reply, extends=extends, top_m=top_m)
        self._replies[number] = reply
        self._events.expect(at_ns)
        return number

    def times_of(self, number: int) -> tuple[int, int]:
        """When a query was given a slot, and when it was answered; until its number is another's."""
        one = self._state.asks[number]
        return int(one[core.BEGUN]), int(one[core.ENDED])

    def forget(self, number: int) -> None:
        """No reply is wanted any more."""
        del self._replies[number]
        core.forget(self.handle, number)

    def run(self, until_ns: int, planned: int) -> bool:
        """Let happen what does up to a moment, or to the next reply, and set the clock to that."""
        now, self._events.clock[NEXT], number, status = core.run(self.handle, until_ns)
        if number >= 0:
            self._events.now_ns = now
            self.reply(number, status)
        else:
            self.have_room(0)
        return True

    def reply(self, number: int, status: int) -> None:
        """Tell who asked."""
        self._replies.pop(number)(core.STATUSES[status])

    def have_room(self, asks: int) -> None:
        """For more than so many queries, and with what they draw."""
        words = self._state.words
        if words[core.FREE] <= asks > 0:
            self._make_room()
        if words[core.DRAWN] == len(self._state.drawn):
            self._draw()

    def _draw(self) -> None:
        """How many extends more than its parameters say each of the next queries takes."""
        self._renew(drawn=np.array([self._random.randint(1, 3) for _ in range(_DRAWN)], np.int64))
        self._state.words[core.DRAWN] = 0

    def _make_room(self) -> None:
        """For twice as many asks."""
        old, w = self._state, self._state.words
        count = len(old.asks)

        def straight(ring: Any, first: int) -> Any:
            return np.concatenate([np.roll(ring, -first), np.zeros(count, np.int64)])

        coming, leaving = straight(old.coming, w[core.CAME_FIRST]), straight(old.leaving, w[core.LEFT_FIRST])
        w[core.CAME_FIRST] = w[core.LEFT_FIRST] = 0
        new = np.arange(count, 2 * count, dtype=np.int64)
        free = np.concatenate([old.free[: w[core.FREE]], new, np.zeros(count - w[core.FREE], np.int64)])
        w[core.FREE] += count
        asks = np.concatenate([old.asks, np.zeros_like(old.asks)])
        self._renew(asks=asks, free=free, coming=coming, leaving=leaving)

    def _renew(self, **arrays: Any) -> None:
        self._state = self._state._replace(**arrays)
        self.handle = handle_of(self._state)
