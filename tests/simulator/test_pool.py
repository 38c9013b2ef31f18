"""The simulated pool beside a model on one GPU, and in a crowd."""

import pytest

from runtime.node.config import PoolSection
from runtime.pool.scheduler import Scheduler
from runtime.pool.settings import Policy
from runtime.simulator.events import Events
from runtime.simulator.stages.gpu import Gpu
from runtime.simulator.stages.pool import Search, SimPool
from runtime.simulator.times.service import ServiceTimes

TIMES = ServiceTimes(extend_s=20e-6, extend_slot_s=60e-6, query_s=0.0, round_s=0.0, wake_s=0.0, ring_s=0.0)


class Stand:
    """A pool of two slots; when each decode query that it was asked (by its number of extends) was answered."""

    def __init__(self, gpu: Gpu) -> None:
        self.events = Events()
        scheduler: Scheduler[Search] = Scheduler(Policy(slots=2))
        self.pool = SimPool(self.events, TIMES, scheduler, PoolSection(top_m=64), gpu)
        self.answered_us: dict[int, float] = {}

    def ask(self, *extends: int) -> None:
        for count in extends:
            search = Search("decode", count, self.events.now_ns, 1 << 62, lambda status, count=count: self._note(count))  # type: ignore[misc]
            self.pool.ask(search)

    def _note(self, extends: int) -> None:
        self.answered_us[extends] = self.events.now_ns / 1e3


def test_the_model_is_owed_what_extends_beside_it_would_take_alone_also_after_some_queries_have_left_a_round() -> None:
    gpu = Gpu(slowdown=2.0)
    gpu.model_busy = True
    stand = Stand(gpu)
    stand.ask(2, 40, 3, 4, 5, 41)
    stand.events.run()
    assert sorted(stand.answered_us) == [2, 3, 4, 5, 40, 41]
    assert gpu.take_debt_ns() == pytest.approx(stand.pool.batch.busy_ns / 2, rel=1e-6)
    assert stand.pool.batch.member_steps == 2 + 3 + 4 + 5 + 40 + 41


def test_a_crowd_that_comes_in_the_very_extend_that_ends_a_query_has_its_slot_after_it() -> None:
    stand = Stand(Gpu())
    stand.ask(3, 1000)
    stand.events.at(400_000, lambda: stand.ask(10, 11, 12))  # the third extend of both: 280 to 420 µs
    stand.events.run()
    assert stand.answered_us[10] < 5_000 < stand.answered_us[1000]
