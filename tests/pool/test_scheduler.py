"""The scheduler: prefill's reserve, orders, deadlines, and that every query leaves exactly once."""

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc import Stage
from runtime.errors import Overloaded
from runtime.pool.scheduler import Queued, Scheduler

NEVER = 1 << 62
STAGES = st.sampled_from(["prefill", "decode"])


def queued(stage: Stage, name: int, *, deadline: int = NEVER, arrival: int = 0) -> Queued[int]:
    return Queued(stage, deadline, arrival, name)


def filled(made: Scheduler[int], *queries: Queued[int]) -> Scheduler[int]:
    for query in queries:
        made.add(query)
    return made


def taken(made: Scheduler[int], now: int = 0) -> list[int]:
    return [query.query for query in made.next(now)[0]]


def test_prefill_goes_by_deadline_and_decode_by_arrival() -> None:
    made = filled(
        Scheduler(8, 0.5, 100),
        *(queued("prefill", name, deadline=deadline) for name, deadline in ((1, 30), (2, 10), (3, 20))),
        *(queued("decode", name, deadline=deadline) for name, deadline in ((4, 30), (5, 10), (6, 20))),
    )
    order = taken(made)
    assert [name for name in order if name < 4] == [2, 3, 1]
    assert [name for name in order if name >= 4] == [4, 5, 6]


def test_equal_deadlines_keep_the_order_of_arrival() -> None:
    made = filled(Scheduler(4, 1.0, 100), *(queued("prefill", name, deadline=5) for name in range(4)))
    assert taken(made) == [0, 1, 2, 3]


@given(st.integers(1, 64), st.floats(0.0, 1.0))
def test_prefill_has_its_reserve_of_an_empty_pool_however_long_decode_waits(slots: int, reserve: float) -> None:
    made: Scheduler[int] = Scheduler(slots, reserve, 1000)
    filled(made, *(queued("decode", name, arrival=0) for name in range(slots)))
    filled(made, *(queued("prefill", name, arrival=1) for name in range(slots)))
    made.next(2)
    assert made.running == {"prefill": math.ceil(reserve * slots), "decode": slots - math.ceil(reserve * slots)}


@given(st.integers(1, 64), st.floats(0.0, 1.0), STAGES)
def test_a_share_that_one_stage_cannot_use_goes_to_the_other(slots: int, reserve: float, stage: Stage) -> None:
    made = filled(Scheduler(slots, reserve, 1000), *(queued(stage, name) for name in range(slots + 5)))
    assert len(taken(made)) == slots
    assert made.running[stage] == slots


def test_every_slot_that_comes_free_is_prefills_until_it_has_its_reserve() -> None:
    made = filled(Scheduler(4, 0.5, 100), *(queued("decode", name, arrival=0) for name in range(8)))
    made.next(0)
    filled(made, *(queued("prefill", name, arrival=9) for name in range(10, 14)))
    order = []
    for _ in range(4):
        made.finished("decode")
        order += taken(made, 10)
    assert order == [10, 11, 4, 5]  # then the older one


def test_beyond_the_reserve_the_older_query_goes_first() -> None:
    made = filled(
        Scheduler(3, 0.0, 100),
        queued("prefill", 1, arrival=5),
        queued("decode", 2, arrival=4),
        queued("decode", 3, arrival=6),
    )
    assert taken(made) == [2, 1, 3]


def test_a_query_whose_deadline_has_come_is_expired_and_takes_no_slot() -> None:
    made = filled(
        Scheduler(1, 0.0, 100),
        queued("prefill", 1, deadline=10),
        queued("prefill", 2, deadline=11),
        queued("decode", 3, deadline=10),
        queued("decode", 4, deadline=11, arrival=-1),
    )
    chosen, expired = made.next(10)
    assert [query.query for query in chosen] == [4]
    assert sorted(query.query for query in expired) == [1, 3]
    assert [query.query for query in made.next(11)[1]] == [2]


def test_late_queries_behind_the_front_are_found_in_the_same_round() -> None:
    made = filled(
        Scheduler(2, 0.0, 100),
        queued("decode", 1),
        queued("decode", 2, deadline=5),
        queued("decode", 3),
    )
    chosen, expired = made.next(5)
    assert [query.query for query in chosen] == [1, 3]
    assert [query.query for query in expired] == [2]


def test_more_waiting_than_the_capacity_is_refused_and_what_waits_stays() -> None:
    made = filled(Scheduler(1, 0.5, 2), queued("prefill", 1), queued("decode", 2))
    with pytest.raises(Overloaded, match="2 queries wait, and 2 may"):
        made.add(queued("prefill", 3))
    assert made.waiting == {"prefill": 1, "decode": 1}


class EveryQueryLeavesOnce(RuleBasedStateMachine):
    """Against a plain model of the two queues, under any order of calls."""

    @initialize(slots=st.integers(1, 6), reserve=st.floats(0.0, 1.0), capacity=st.integers(1, 12))
    def start(self, slots: int, reserve: float, capacity: int) -> None:
        self.slots, self.reserved, self.capacity = slots, math.ceil(reserve * slots), capacity
        self.scheduler: Scheduler[int] = Scheduler(slots, reserve, capacity)
        self.prefill: list[Queued[int]] = []
        self.decode: deque[Queued[int]] = deque()
        self.running: list[Queued[int]] = []
        self.now = self.names = 0
        self.left: list[int] = []  # taken, expired or removed
        self.accepted: list[int] = []

    @rule(stage=STAGES, slack=st.integers(-2, 20))
    def add(self, stage: Stage, slack: int) -> None:
        self.names += 1
        query = queued(stage, self.names, deadline=self.now + slack, arrival=self.now)
        if len(self.prefill) + len(self.decode) >= self.capacity:
            with pytest.raises(Overloaded):
                self.scheduler.add(query)
            return
        self.scheduler.add(query)
        self.accepted.append(query.query)
        (self.prefill if stage == "prefill" else self.decode).append(query)

    @rule(by=st.integers(0, 8))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule()
    def next(self) -> None:
        before = len(self.running)
        owed = self.reserved - sum(query.stage == "prefill" for query in self.running)
        chosen, expired = self.scheduler.next(self.now)
        assert all(query.deadline_ns <= self.now for query in expired)
        assert all(query.deadline_ns > self.now for query in chosen)
        for query in [*chosen, *expired]:
            (self.prefill if query.stage == "prefill" else self.decode).remove(query)
            self.left.append(query.query)
        self.running += chosen
        prefill = [query for query in chosen if query.stage == "prefill"]
        decode = [query for query in chosen if query.stage == "decode"]
        # earliest deadline first; first come, first served
        assert prefill == sorted(prefill, key=lambda query: (query.deadline_ns, query.query))
        assert all(query.deadline_ns >= last.deadline_ns for query in self.prefill for last in prefill[-1:])
        assert decode == sorted(decode, key=lambda query: query.query)
        assert all(query.query > last.query for query in self.decode for last in decode[-1:])
        # no slot stays free while a query waits, and prefill has what it is owed before decode has any
        if self.prefill or self.decode:
            assert len(self.running) == self.slots
        if self.prefill:
            assert len(prefill) >= min(owed, self.slots - before)
        assert all(query.deadline_ns > self.now for query in self.prefill)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        query = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.scheduler.finished(query.stage)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(1, self.names + 1))
        waiting = [query for query in (*self.prefill, *self.decode) if query.query == name]
        assert self.scheduler.remove(lambda query: query == name) == (name if waiting else None)
        for query in waiting:
            (self.prefill if query.stage == "prefill" else self.decode).remove(query)
            self.left.append(name)

    @invariant()
    def counts_agree_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.waiting == {"prefill": len(self.prefill), "decode": len(self.decode)}
        running = [query.stage for query in self.running]
        assert self.scheduler.running == {"prefill": running.count("prefill"), "decode": running.count("decode")}
        assert len(self.running) <= self.slots
        waiting = [query.query for query in (*self.prefill, *self.decode)]
        assert sorted(self.left + waiting) == self.accepted


TestEveryQueryLeavesOnce = EveryQueryLeavesOnce.TestCase
TestEveryQueryLeavesOnce.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
