"""The simulated pool beside a model on one GPU, and in a crowd; what happens to queries that nobody waits for."""

from functools import partial
from random import Random

import pytest

from runtime.node.config import PoolSection
from runtime.pool.settings import Policy
from runtime.simulator.events import Events
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.pool import PoolRules, Pools
from runtime.simulator.times.service import ServiceTimes

TIMES = ServiceTimes(extend_s=20e-6, extend_slot_s=60e-6, query_s=0.0, round_s=0.0, wake_s=0.0, ring_s=0.0, embed_s=0.0)
NEVER_NS = 1 << 62


class Stand:
    """Pools of two slots; when each decode query that they were asked (by its number of extends) was answered."""

    def __init__(self, gpu: Gpu, *, pools: int = 1, capacity: int = 8) -> None:
        self.events = Events()
        rules = PoolRules(Policy(slots=2))
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


def test_the_model_is_owed_what_extends_beside_it_would_take_alone_also_after_some_queries_have_left_a_round() -> None:
    gpu = Gpu(slowdown=2.0)
    gpu.model_busy = True
    stand = Stand(gpu)
    stand.submit(2, 40, 3, 4, 5, 41)
    stand.events.run()
    assert sorted(stand.answered_us) == [2, 3, 4, 5, 40, 41]
    (pool,) = stand.pools.pools
    assert gpu.take_debt_ns() == pytest.approx(pool.busy_ns / 2, rel=1e-6)
    assert pool.slot_steps == 2 + 3 + 4 + 5 + 40 + 41


def test_a_crowd_that_comes_in_the_very_extend_that_ends_a_query_has_its_slot_after_it() -> None:
    stand = Stand(Gpu())
    stand.submit(3, 1000)
    stand.events.at(400_000, partial(stand.ask_more, 10, 11, 12))  # the third extend of both: 280 to 420 µs
    stand.events.run()
    assert stand.answered_us[10] < 5_000 < stand.answered_us[1000]


def test_queries_find_the_pools_of_a_group_in_turn() -> None:
    stand = Stand(Gpu(), pools=3)
    stand.submit(*range(10, 22))
    stand.events.run()
    assert [pool.served for pool in stand.pools.pools] == [4, 4, 4]


def test_more_queries_at_a_time_than_there_was_room_for_at_first_are_all_answered() -> None:
    stand = Stand(Gpu(), capacity=2)
    stand.submit(*range(5, 25))
    stand.events.at(300_000, partial(stand.ask_more, *range(30, 60)))
    stand.events.run()
    assert sorted(stand.answered_us) == [*range(5, 25), *range(30, 60)]


@pytest.mark.parametrize("at_ns", [0, 10_000, 200_000])
def test_a_query_that_is_forgotten_on_its_way_waiting_or_in_its_slot_is_never_answered_and_leaves_nothing(
    at_ns: int,
) -> None:
    stand = Stand(Gpu())
    _, active, waiting = stand.submit(50, 51, 52)
    for number in (active, waiting):
        stand.events.at(at_ns, partial(stand.pools.cancel, number))
    stand.events.run()
    assert sorted(stand.answered_us) == [50]
    assert stand.pools.pools[0].empty
