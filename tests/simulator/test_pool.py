"""Tests of the simulated pool: sharing a GPU with a model, groups of pools, bursts and cancelled queries."""

from functools import partial
from random import Random

import pytest

from runtime.node.worker_config import PoolSection
from runtime.pool.settings import Policy
from runtime.simulator.stages.events import Events
from runtime.simulator.stages.pool import Pools
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.times.service import ServiceTimes

TIMES = ServiceTimes(extend_s=20e-6, extend_slot_s=60e-6, query_s=0.0, round_s=0.0, wake_s=0.0, ring_s=0.0, embed_s=0.0)
NEVER_NS = 1 << 62


class PoolHarness:
    """Pools of two slots; records when each decode query (by its number of extends) was answered."""

    def __init__(self, gpu: Gpu, *, pools: int = 1, capacity: int = 8) -> None:
        self.events = Events()
        rules = Policy(slots=2)
        self.pools = Pools(
            self.events,
            TIMES,
            PoolSection(top_m=64),
            [(rules, gpu) for _ in range(pools)],
            Random(0),
            capacity=capacity,
        )
        self.group = self.pools.group(range(pools))
        self.answered_us: dict[int, float] = {}

    def submit(self, *extends: int) -> list[int]:
        return [self._ask(count) for count in extends]

    def ask_more(self, *extends: int) -> None:
        self.submit(*extends)

    def _ask(self, extends: int) -> int:
        note = partial(self._note, extends)
        return self.pools.submit_at(self.events.now_ns, self.group, "decode", NEVER_NS, note, extends=extends)

    def _note(self, extends: int, status: str) -> None:
        assert status == "ok"
        self.answered_us[extends] = self.events.now_ns / 1e3


def test_the_model_is_charged_for_concurrent_extends_even_after_queries_left_a_round() -> None:
    gpu = Gpu(slowdown=2.0)
    gpu.model_busy = True
    harness = PoolHarness(gpu)
    harness.submit(2, 40, 3, 4, 5, 41)
    harness.events.run()
    assert sorted(harness.answered_us) == [2, 3, 4, 5, 40, 41]
    (pool,) = harness.pools.pools
    assert gpu.debt_ns == pytest.approx(pool.counters.busy_ns / 2, rel=1e-6)
    assert pool.counters.member_steps == 2 + 3 + 4 + 5 + 40 + 41


def test_arrivals_during_the_last_extend_of_a_query_get_its_slot_afterwards() -> None:
    harness = PoolHarness(Gpu())
    harness.submit(3, 1000)
    harness.events.at(400_000, partial(harness.ask_more, 10, 11, 12))  # the third extend: 280 to 420 µs
    harness.events.run()
    assert harness.answered_us[10] < 5_000 < harness.answered_us[1000]


def test_queries_use_the_pools_of_a_group_round_robin() -> None:
    harness = PoolHarness(Gpu(), pools=3)
    harness.submit(*range(10, 22))
    harness.events.run()
    assert [pool.counters.served for pool in harness.pools.pools] == [4, 4, 4]


def test_more_concurrent_queries_than_the_initial_capacity_are_all_answered() -> None:
    harness = PoolHarness(Gpu(), capacity=2)
    harness.submit(*range(5, 25))
    harness.events.at(300_000, partial(harness.ask_more, *range(30, 60)))
    harness.events.run()
    assert sorted(harness.answered_us) == [*range(5, 25), *range(30, 60)]


@pytest.mark.parametrize("at_ns", [0, 10_000, 200_000])
def test_a_cancelled_query_is_never_answered_whether_in_flight_waiting_or_active(
    at_ns: int,
) -> None:
    harness = PoolHarness(Gpu())
    _, active, waiting = harness.submit(50, 51, 52)
    for number in (active, waiting):
        harness.events.at(at_ns, partial(harness.pools.cancel, number))
    harness.events.run()
    assert sorted(harness.answered_us) == [50]
    assert not harness.pools.pools[0].counters.queries
