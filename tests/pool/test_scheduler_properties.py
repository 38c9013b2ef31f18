"""What the scheduler keeps under any order of calls, and within what time a decode query is answered."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool.estimate import Kind
from runtime.pool.policy import Policy
from runtime.pool.queues import NEVER_NS, Entry
from runtime.pool.scheduler import Scheduler
from tests.pool.schedulers import KIND, LONG, STAGES, entry


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Against a plain model: who waits, who is active, who is paused."""

    @initialize(
        slots=st.integers(1, 6),
        spare=st.integers(0, 3),
        reserve=st.floats(0.0, 1.0),
        queue=st.integers(1, 12),
        due_in=st.integers(0, 20),
        aging=st.integers(0, 10),
        max_pauses=st.integers(0, 3),
        stall=st.integers(1, 30),
        each=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def start(self, slots: int, spare: int, reserve: float, queue: int, due_in: int, aging: int, max_pauses: int,
              stall: int, each: float) -> None:  # fmt: skip
        self.policy = Policy(
            slots=slots, spare=spare, reserve=reserve, queue=queue, prefill_target_ns=due_in, aging_ns=aging,
            max_pauses=max_pauses, decode_stall_ns=stall,
        )  # fmt: skip
        self.scheduler: Scheduler[int] = Scheduler(self.policy)
        if each:
            for active in (1, 2) * 5:
                self.scheduler.cost.learn(active, 0.2 + each * active)
        self.waiting: list[Entry[int]] = []
        self.active: list[Entry[int]] = []
        self.paused: list[Entry[int]] = []
        self.pauses: dict[int, int] = {}
        self.now = self.names = 0
        self.stalled_since = 0
        self.accepted: list[int] = []
        self.gone: list[int] = []

    @rule(
        stage=STAGES,
        count=st.integers(1, 6),
        slack=st.one_of(st.integers(-2, 60), st.just(NEVER_NS)),
        kind=st.sampled_from([KIND, KIND, LONG]),
    )
    def arrive(self, stage: Stage, count: int, slack: int, kind: Kind) -> None:
        for _ in range(count):
            self.add(stage, slack, kind)

    def add(self, stage: Stage, slack: int, kind: Kind) -> None:
        self.names += 1
        made = entry(stage, self.names, deadline=min(self.now + slack, NEVER_NS), arrival=self.now, kind=kind)
        try:
            self.scheduler.add(made, self.now)
        except Overloaded:
            decode = sum(one.stage == "decode" for one in self.waiting)
            full = stage == "decode" and decode >= self.policy.decode_queue
            assert full or len(self.waiting) >= self.policy.queue
        except DeadlineExceeded:
            assert slack < NEVER_NS, "nobody without a deadline is refused"
        else:
            assert made.deadline_ns > self.now
            self.accepted.append(made.query)
            self.waiting.append(made)

    @rule(by=st.integers(0, 12))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.scheduler.advanced(by)

    @rule(reserve=st.floats(0.0, 1.0))
    def the_reserve_changes(self, reserve: float) -> None:
        self.scheduler.reserve = reserve

    @rule()
    def next(self) -> None:
        waiting, was_active = list(self.waiting), list(self.active)
        width = self.scheduler.width
        changes = self.scheduler.next(self.now)
        for one in changes.late:
            assert one.deadline_ns < NEVER_NS
            self.waiting.remove(one)
            self.gone.append(one.query)
        for one in changes.admitted:
            self.waiting.remove(one)
            self.active.append(one)
        for one in changes.resumed:
            self.paused.remove(one)
            self.active.append(one)
        for one in changes.paused:
            assert one.stage == "decode"
            self.active.remove(one)
            self.paused.append(one)
            self.pauses[one.query] = self.pauses.get(one.query, 0) + 1
        self.check_orders(waiting, changes.admitted, changes.late)
        self.check_shares(width, was_active, [*changes.admitted, *changes.resumed])

    def check_orders(self, waiting: list[Entry[int]], admitted: list[Entry[int]], late: list[Entry[int]]) -> None:
        """By turns; decode queries that are alike by their arrival, active and paused ones too."""
        for stage in ("prefill", "decode"):
            begun = [(one.start_by_ns, one.query) for one in admitted if one.stage == stage]
            assert begun == sorted(begun)
            for one in self.waiting:
                assert one.stage != stage or not begun or (one.start_by_ns, one.query) > begun[-1]
        for kind in (KIND, LONG):
            alike = [
                [one.query for one in ones if (one.stage, one.kind) == ("decode", kind)]
                for ones in (self.active, self.paused, self.waiting)
            ]
            assert max(alike[0] + alike[1], default=0) < min(alike[2], default=1 << 30)

    def check_shares(self, width: int, was_active: list[Entry[int]], started: list[Entry[int]]) -> None:
        """While prefill waits with less than it is owed, no decode query gets a place but the one that is overdue."""
        prefill = sum(one.stage == "prefill" for one in self.active)
        begun = [one for one in started if one.stage == "decode" and one in self.active]
        room = len(self.active) + len(self.paused) < self.policy.engine_slots
        if any(one.stage == "prefill" for one in self.waiting) and prefill < self.scheduler.reserved(width) and room:
            assert len(begun) <= 1
            assert not begun or not any(one.stage == "decode" for one in was_active)
        waits = any(one.stage == "prefill" for one in self.waiting)
        if waits and room:
            assert len(self.active) >= width or self.paused

    @precondition(lambda self: self.active)
    @rule(data=st.data(), answered=st.booleans())
    def leave(self, data: st.DataObject, answered: bool) -> None:
        one = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        if answered:
            self.scheduler.finished(one, 103 if one.kind is LONG else 13)
        else:
            self.scheduler.left(one)
        self.gone.append(one.query)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def cancel_paused(self, data: st.DataObject) -> None:
        one = self.paused.pop(data.draw(st.integers(0, len(self.paused) - 1)))
        self.scheduler.left(one)
        self.gone.append(one.query)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(1, self.names + 1))
        waiting = [one for one in self.waiting if one.query == name]
        assert self.scheduler.remove(lambda query: query == name) == (name if waiting else None)
        for one in waiting:
            self.waiting.remove(one)
            self.gone.append(name)

    @invariant()
    def counts_agree_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        stages = [one.stage for one in self.waiting]
        assert self.scheduler.waiting == {"prefill": stages.count("prefill"), "decode": stages.count("decode")}
        stages = [one.stage for one in self.active]
        assert self.scheduler.running == {"prefill": stages.count("prefill"), "decode": stages.count("decode")}
        assert self.scheduler.paused == len(self.paused)
        assert len(self.active) <= self.policy.slots
        assert len(self.paused) <= self.policy.slots
        assert len(self.active) + len(self.paused) <= self.policy.engine_slots
        assert all(count <= self.policy.max_pauses for count in self.pauses.values())
        here = [one.query for one in (*self.waiting, *self.active, *self.paused)]
        assert sorted(self.gone + here) == self.accepted


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


EXTENDS = 4  # of every query, in the flood below


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    spare=st.integers(0, 2),
    reserve=st.floats(0.0, 1.0),
    prefill_target_ns=st.integers(0, 20),
    aging_ns=st.integers(0, 50),
    max_pauses=st.integers(0, 3),
    stall=st.integers(1, 20),
    ahead=st.integers(0, 5),
    burst=st.integers(1, 3),
)
def test_every_decode_query_is_answered_within_the_bound_however_much_prefill_comes(
    ahead: int, burst: int, stall: int, **policy: Any
) -> None:
    made: Scheduler[int] = Scheduler(Policy(**policy, queue=400, decode_stall_ns=stall))
    decode = [entry("decode", -1 - number) for number in range(ahead + 1)]
    for one in decode:
        made.add(one, 0)
    bound = (ahead + 1) * (stall + 2 * EXTENDS + 2)
    left: dict[Entry[int], int] = {}
    active: set[Entry[int]] = set()
    answered: dict[int, int] = {}
    for now in range(bound + 1):  # an extend takes 1
        for number in range(burst):
            if made.waiting["prefill"] < 100:
                made.add(Entry("prefill", NEVER_NS, now, now * burst + number, KIND), now)
        changes = made.next(now)
        left.update(dict.fromkeys(changes.admitted, EXTENDS))
        active |= {*changes.admitted, *changes.resumed}
        active -= {*changes.paused}
        made.advanced(1)
        for one in list(active):
            left[one] -= 1
            if left[one] == 0:
                active.remove(one)
                answered[one.query] = now + 1
                made.finished(one, EXTENDS)
    assert all(answered.get(one.query, math.inf) <= bound for one in decode)


def test_a_query_that_has_no_slot_cannot_leave_one() -> None:
    with pytest.raises(ValueError, match="no slot"):
        Scheduler[int](Policy(slots=1)).left(entry("decode", 1))
