"""Property tests of the policy: invariants under any order of calls, and the bound on a decode query's time."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool.settings import RULE_NAMES, Policy, Rules
from runtime.pool.tables import NEVER_NS
from tests.pool.scheduler import Entry, Scheduler
from tests.pool.scheduler_factories import LONG, STAGES, USUAL, entry


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Compares the policy with a simple model of waiting, active and paused queries."""

    @initialize(
        slots=st.integers(1, 6),
        spare=st.integers(0, 6),
        reserve=st.floats(0.0, 1.0),
        queue=st.integers(1, 12),
        due_in=st.integers(0, 20),
        aging=st.integers(1, 30),
        flush=st.sampled_from([0, 0, 3]),
        lost=st.sampled_from([20, 10**9]),
        each=st.sampled_from([0.0, 0.0, 0.3]),
        rules=st.sampled_from(["trinity", *RULE_NAMES]),
        keep=st.booleans(),
    )
    def start(self, slots: int, spare: int, reserve: float, queue: int, due_in: int, aging: int,
              flush: int, lost: int, each: float, rules: Rules, keep: bool) -> None:  # fmt: skip
        self.policy = Policy(
            slots=slots, engine_slots=slots + spare, reserve=reserve, queue=queue, prefill_target_ns=due_in,
            aging_ns=aging, flush_prefill_ns=flush,
            missed_ns=10**9 if flush else lost, rules=rules, keep_reserve=keep,
        )  # fmt: skip
        self.reserve = reserve
        self.scheduler = Scheduler(self.policy)
        if each:
            for active in (1, 2) * 5:
                self.scheduler.learn_cost(active, 0.2 + each * active)
        self.waiting: list[Entry] = []
        self.active: list[Entry] = []
        self.paused: list[Entry] = []
        self.now = self.names = 0
        self.may_yield = self.yields = False  # prefill to decode: the policy asks the first that waits
        self.accepted: list[int] = []
        self.gone: list[int] = []

    @rule(
        stage=STAGES,
        count=st.integers(1, 6),
        slack=st.one_of(st.integers(-2, 60), st.just(NEVER_NS)),
        top_m=st.sampled_from([USUAL, USUAL, LONG]),
    )
    def arrive(self, stage: Stage, count: int, slack: int, top_m: int) -> None:
        for _ in range(count):
            self.add(stage, slack, top_m)

    def add(self, stage: Stage, slack: int, top_m: int) -> None:
        self.names += 1
        made = entry(stage, self.names, deadline=min(self.now + slack, NEVER_NS), arrival=self.now, top_m=top_m)
        try:
            self.scheduler.add(made, self.now)
        except Overloaded:
            decode = sum(one.stage == "decode" for one in self.waiting)
            full = stage == "decode" and decode >= self.policy.decode_queue
            assert full or len(self.waiting) >= self.policy.queue
        except DeadlineExceeded:
            assert slack <= 0
        else:
            assert made.deadline_ns > self.now
            self.accepted.append(made.query)
            self.waiting.append(made)

    @rule(by=st.integers(1, 12))
    def time_passes(self, by: int) -> None:
        self.now += by
        if self.active:
            self.scheduler.advanced(by, by)

    @rule(reserve=st.floats(0.0, 1.0))
    def the_reserve_changes(self, reserve: float) -> None:
        self.scheduler.tables.reserve = self.reserve = reserve

    @rule()
    def next(self) -> None:
        waiting, was_active, was_paused = list(self.waiting), list(self.active), list(self.paused)
        credit = self.scheduler.tables.credit_ns
        flush = self.policy.flush_prefill_ns
        yields = [
            self.now < min(one.arrival_ns + flush, one.deadline_ns - flush)
            or self.now >= one.arrival_ns + self.policy.missed_ns
            for one in self.waiting
            if one.stage == "prefill" and one.deadline_ns > self.now
        ]
        self.may_yield, self.yields = any(yields), bool(yields) and all(yields)
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
        self.check_orders(changes.admitted)
        self.check_shares(credit, was_active, was_paused, [*changes.admitted, *changes.resumed])
        assert len(waiting) == len(self.waiting) + len(changes.admitted) + len(changes.late)

    def check_orders(self, admitted: list[Entry]) -> None:
        """Check that prefill is ordered by due time minus service time; decode by virtual deadline, then by arrival."""
        for stage in ("prefill", "decode"):
            begun = [self.turn(one) for one in admitted if one.stage == stage]
            assert begun == sorted(begun)
            for one in self.waiting:
                assert one.stage != stage or not begun or self.turn(one) > begun[-1]
        for top_m in (USUAL, LONG):
            alike = [
                [one.query for one in ones if (one.stage, one.top_m) == ("decode", top_m)]
                for ones in (self.active, self.paused, self.waiting)
            ]
            assert max(alike[0] + alike[1], default=0) < min(alike[2], default=1 << 30)

    def turn(self, one: Entry) -> tuple[int, int]:
        entry = self.scheduler.tables.entries[one.number]
        if one.stage == "decode" and self.policy.rules == "paper":
            assert entry.start_by_ns == one.arrival_ns
        elif one.stage == "prefill":
            assert not entry.missed or self.now - one.arrival_ns >= self.policy.missed_ns
            due = min(one.deadline_ns, one.arrival_ns + self.policy.prefill_target_ns)
            assert entry.missed or entry.start_by_ns <= due
        return entry.start_by_ns, one.query

    def check_shares(
        self, credit: float, was_active: list[Entry], was_paused: list[Entry], started: list[Entry]
    ) -> None:
        """Check that decode gets no slot, except for an overdue query, while prefill waits with less than its reserve,
        or beyond its own share where the reserve is kept; and that no slot is idle while a query waits that the engine
        has room for and that may have it."""
        prefill = sum(one.stage == "prefill" for one in self.active)
        begun = [one for one in started if one.stage == "decode" and one in self.active]
        room = len(self.active) + len(self.paused) < self.policy.engine_slots
        waits = any(one.stage == "prefill" for one in self.waiting)
        owed = self.policy.slots if credit > 0 else math.ceil(self.reserve * self.policy.slots)
        if waits and prefill < owed and room and not self.may_yield:
            assert len(begun) <= 1
            assert not begun or not any(one.stage == "decode" for one in was_active)
        decode, share = len(self.active) - prefill, self.policy.slots - math.ceil(self.reserve * self.policy.slots)
        keeps = self.policy.keep_reserve and self.policy.rules == "trinity" and not self.yields and (prefill or waits)
        if keeps and begun and not self.may_yield:
            assert decode <= max(share, 1)
        full = len(self.active) >= self.policy.slots or (keeps and decode >= max(share, 1))
        if self.waiting and room:
            assert full or (credit > 0 and prefill)
        if credit == 0 and not was_paused and not self.waiting:
            assert not self.paused or full

    @precondition(lambda self: self.active)
    @rule(data=st.data(), answered=st.booleans())
    def leave(self, data: st.DataObject, answered: bool) -> None:
        one = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        if answered:
            self.scheduler.finished(one, 103 if one.top_m == LONG else 13)
        else:
            self.scheduler.left(one)
        self.gone.append(one.query)

    @precondition(lambda self: self.paused or self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        there = self.paused if self.paused and (not self.waiting or data.draw(st.booleans())) else self.waiting
        one = there.pop(data.draw(st.integers(0, len(there) - 1)))
        self.scheduler.left(one)
        self.gone.append(one.query)

    @invariant()
    def counts_agree_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        decode = sum(one.stage == "decode" for one in self.waiting)
        assert self.scheduler.waiting == {"prefill": len(self.waiting) - decode, "decode": decode}
        stages = [one.stage for one in self.active]
        assert self.scheduler.running == {"prefill": stages.count("prefill"), "decode": stages.count("decode")}
        assert self.scheduler.paused == len(self.paused)
        assert len(self.active) <= self.policy.slots
        assert len(self.active) + len(self.paused) <= self.policy.engine_slots
        assert 0 <= self.scheduler.tables.credit_ns <= self.policy.aging_ns
        here = [one.query for one in (*self.waiting, *self.active, *self.paused)]
        assert sorted(self.gone + here) == self.accepted
        assert self.scheduler.busy == bool(here)


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=50, stateful_step_count=40)


EXTENDS = 4  # of every query in the flood below


@settings(max_examples=40)
@given(
    slots=st.integers(1, 4),
    spare=st.integers(0, 4),
    reserve=st.floats(0.0, 1.0),
    prefill_target_ns=st.integers(0, 20),
    aging_ns=st.integers(1, 20),
    rules=st.sampled_from(["trinity", "paper"]),
    ahead=st.integers(0, 5),
    burst=st.integers(1, 3),
)
def test_every_decode_query_is_answered_within_the_bound_under_any_prefill_load(
    ahead: int, burst: int, slots: int, spare: int, aging_ns: int, **policy: Any
) -> None:
    settings = Policy(slots=slots, engine_slots=slots + spare, queue=400, aging_ns=aging_ns, **policy)
    made = Scheduler(settings)
    decode = [entry("decode", -1 - number) for number in range(ahead + 1)]
    for one in decode:
        made.add(one, 0)
    bound = (ahead + 1) * (aging_ns + 2 * EXTENDS + 2)
    left: dict[Entry, int] = {}
    active: set[Entry] = set()
    answered: dict[int, int] = {}
    for now in range(bound + 1):  # an extend takes 1
        for number in range(burst):
            if made.waiting["prefill"] < 100:
                made.add(Entry("prefill", now, now * burst + number), now)
        changes = made.next(now)
        left.update(dict.fromkeys(changes.admitted, EXTENDS))
        active |= {*changes.admitted, *changes.resumed}
        active -= {*changes.paused}
        made.advanced(1, 1)
        for one in list(active):
            left[one] -= 1
            if left[one] == 0:
                active.remove(one)
                answered[one.query] = now + 1
                made.finished(one, EXTENDS)
    assert all(answered.get(one.query, math.inf) <= bound for one in decode)


def test_removing_an_unknown_query_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in the pool"):
        Scheduler(Policy(slots=1)).left(entry("decode", 1))
