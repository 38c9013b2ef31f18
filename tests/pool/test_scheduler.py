"""Tests of slot assignment: prefill's reserve, queue orders, deadlines, timeouts, and the paper's policy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.node.config import NodeConfig, SloSection
from runtime.pool.settings import Policy, policy_of
from tests.pool.scheduler import Scheduler
from tests.pool.scheduler_factories import LONG, STAGES, USUAL, entry, filled, measured, names, scheduler

MS = 1_000_000


def test_prefill_is_ordered_by_deadline_and_decode_by_arrival() -> None:
    made = filled(
        scheduler(8, 0.4),
        *(entry("prefill", name, deadline=deadline) for name, deadline in ((1, 30), (2, 10), (3, 20))),
        *(entry("decode", name, deadline=deadline) for name, deadline in ((4, 30), (5, 10), (6, 20))),
    )
    order = names(made.next(0).admitted)
    assert [name for name in order if name < 4] == [2, 3, 1]
    assert [name for name in order if name >= 4] == [4, 5, 6]


def test_equal_deadlines_are_served_by_arrival() -> None:
    made = filled(scheduler(4, 1.0), *(entry("prefill", name, deadline=5) for name in range(4)))
    assert names(made.next(0).admitted) == [0, 1, 2, 3]


def test_with_equal_deadlines_the_longer_query_goes_first() -> None:
    made = measured(scheduler(1, 1.0), 10, 10)
    filled(made, entry("prefill", 1, deadline=10**6), entry("prefill", 2, deadline=10**6, top_m=LONG))
    assert names(made.next(0).admitted) == [2]


def test_the_extends_of_a_query_are_the_estimate_of_its_class() -> None:
    made = measured(scheduler(1, 1.0), 10, 10)
    for name in range(200):  # usual queries take 300 extends instead of 13
        one = entry("prefill", name)
        filled(made, one)
        made.next(0)
        made.finished(one, 300)
    filled(made, entry("prefill", 1000, deadline=10**6, top_m=LONG), entry("prefill", 1001, deadline=10**6))
    assert names(made.next(0).admitted) == [1001]


@given(st.integers(1, 64), st.floats(0.0, 1.0))
def test_prefill_gets_its_reserve_of_an_empty_pool_regardless_of_decodes_queue(slots: int, reserve: float) -> None:
    made = scheduler(slots, reserve, queue=1000)
    filled(made, *(entry("decode", name, arrival=0) for name in range(slots)))
    filled(made, *(entry("prefill", name, arrival=1) for name in range(slots)))
    made.next(2)
    assert made.running == {"prefill": math.ceil(reserve * slots), "decode": slots - math.ceil(reserve * slots)}


@given(st.integers(1, 64), st.floats(0.0, 1.0), STAGES)
def test_an_unused_share_goes_to_the_other_stage(slots: int, reserve: float, stage: Stage) -> None:
    made = filled(scheduler(slots, reserve), *(entry(stage, name) for name in range(slots + 5)))
    assert len(made.next(0).admitted) == slots
    assert made.running[stage] == slots


def test_freed_slots_go_to_prefill_until_it_has_its_reserve() -> None:
    decode = [entry("decode", name, arrival=0) for name in range(8)]
    made = filled(scheduler(4, 0.5), *decode)
    made.next(0)
    filled(made, *(entry("prefill", name, arrival=9) for name in range(10, 14)))
    order = []
    for one in decode[:4]:
        made.finished(one, 10)
        order += names(made.next(10).admitted)
    assert order == [10, 11, 4, 5]


def test_a_query_past_its_deadline_is_late_and_takes_no_slot() -> None:
    made = filled(
        scheduler(1, 0.0),
        entry("prefill", 1, deadline=10),
        entry("prefill", 2, deadline=11),
        entry("decode", 3, deadline=10),
        entry("decode", 4, deadline=11),
        now=9,
    )
    changes = made.next(10)
    assert names(changes.admitted) == [4]
    assert sorted(names(changes.late)) == [1, 3]
    assert names(made.next(11).late) == [2]


def test_adding_a_query_past_its_deadline_is_rejected() -> None:
    with pytest.raises(DeadlineExceeded):
        scheduler(4, 0.3).add(entry("prefill", 1, deadline=1000), 1000)


def test_a_query_that_can_no_longer_meet_its_deadline_is_late_before_it() -> None:
    made = measured(scheduler(1, 0.0), 10, 10)  # 13 extends take 260 ns
    made.add(entry("prefill", 1, deadline=300), 0)
    assert names(made.next(50).late) == [1]


def test_a_full_queue_rejects_new_queries_and_keeps_waiting_ones() -> None:
    made = filled(scheduler(1, 0.5, queue=2), entry("prefill", 1), entry("decode", 2))
    with pytest.raises(Overloaded, match="2 queries wait"):
        made.add(entry("prefill", 3), 0)
    assert made.waiting == {"prefill": 1, "decode": 1}


def test_decode_queries_leave_a_quarter_of_the_queue_free() -> None:
    made = filled(scheduler(1, 0.3, queue=8), *(entry("decode", name) for name in range(6)))
    with pytest.raises(Overloaded, match="6 queries wait"):
        made.add(entry("decode", 6), 0)
    filled(made, *(entry("prefill", name) for name in range(2)))


# ---- timeouts


def test_prefill_yields_slots_to_decode_until_its_flush_timeout() -> None:
    queries = entry("prefill", 1, arrival=0), entry("decode", 2, arrival=1), entry("decode", 3, arrival=1)
    made = filled(scheduler(1, 1.0, flush_prefill_ns=10), *queries)
    assert names(made.next(1).admitted) == [2]
    made.finished(queries[1], 4)
    assert names(made.next(10).admitted) == [1]


def test_prefill_uses_slots_that_decode_leaves_free_before_its_flush_timeout() -> None:
    made = filled(scheduler(2, 0.5, flush_prefill_ns=10), entry("prefill", 1), entry("decode", 2))
    assert names(made.next(0).admitted) == [2, 1]


def test_prefill_with_a_near_deadline_does_not_wait_for_its_flush_timeout() -> None:
    made = filled(scheduler(1, 1.0, flush_prefill_ns=10), entry("prefill", 1, deadline=9), entry("decode", 2))
    assert names(made.next(0).admitted) == [1]


def test_a_missed_prefill_query_goes_behind_decode_and_prefill_that_can_still_meet_its_ttft() -> None:
    queries = [entry("prefill", 1, arrival=0), entry("prefill", 2, arrival=5), entry("prefill", 3, arrival=92)]
    made = filled(scheduler(1, 1.0, missed_ns=90, prefill_target_ns=10), *queries)
    filled(made, entry("decode", 4, arrival=95), now=95)
    order = []
    for _ in range(4):
        (one,) = made.next(95).admitted
        order.append(one.query)
        made.finished(one, 4)
    assert order == [3, 4, 1, 2]


def test_the_papers_policy_keeps_prefills_order_regardless_of_waiting_time() -> None:
    queries = entry("prefill", 1, arrival=0), entry("prefill", 2, arrival=92)
    made = filled(scheduler(1, 1.0, missed_ns=90, prefill_target_ns=10, rules="paper"), *queries)
    assert names(made.next(95).admitted) == [1]


def test_a_missed_prefill_query_is_passed_only_by_arrivals_within_64_times_its_wait() -> None:
    lost, later = entry("prefill", 1, arrival=0), entry("prefill", 2, arrival=6_000)
    made = filled(scheduler(1, 1.0, missed_ns=90, prefill_target_ns=10), lost, entry("prefill", 3, arrival=5_700))
    (one,) = made.next(5_701).admitted
    assert one.query == 3
    made.finished(one, 4)
    filled(made, later, entry("decode", 4, arrival=6_000), now=6_000)
    (one,) = made.next(6_001).admitted
    assert one.query == 1


def test_a_missed_prefill_query_can_still_be_cancelled() -> None:
    lost, fresh = entry("prefill", 1, arrival=0), entry("prefill", 2, arrival=92)
    made = filled(scheduler(1, 1.0, missed_ns=90, prefill_target_ns=10), lost, fresh)
    assert names(made.next(95).admitted) == [2]
    made.left(lost)
    assert made.waiting["prefill"] == 0


def test_flush_timeout_and_reserve_can_be_changed_at_run_time() -> None:
    made = filled(scheduler(1, 0.0, flush_prefill_ns=30), entry("prefill", 1), entry("decode", 2))
    made.flush_prefill_ns, made.reserve = 0, 1.0
    assert names(made.next(1).admitted) == [1]


# ---- defaults


def shipped(slots: int = 2, reserve: float = 0.3) -> Scheduler[int]:
    """Return a scheduler with the defaults and the slots that "auto" selects on a CPU."""
    made: Scheduler[int] = Scheduler(policy_of(NodeConfig(), slots))
    made.reserve = reserve
    return measured(made, 500, 4500)


def test_with_defaults_an_earlier_deadline_is_served_first() -> None:
    made = filled(
        shipped(),
        entry("prefill", 1, deadline=10_000 * MS),
        entry("prefill", 2, deadline=10_000 * MS, arrival=1),
        entry("prefill", 3, deadline=20 * MS, arrival=2),
        now=2,
    )
    assert names(made.next(2).admitted) == [3, 1]


def test_with_defaults_the_reserve_divides_the_slots() -> None:
    shares = {}
    for reserve in (0.1, 0.9):
        made = shipped(reserve=reserve)
        filled(made, *(entry("decode", name) for name in range(8)), *(entry("prefill", name) for name in range(8, 16)))
        made.next(0)
        shares[reserve] = made.running
    assert shares == {0.1: {"prefill": 1, "decode": 1}, 0.9: {"prefill": 2, "decode": 0}}


def test_a_policy_configured_only_with_slots_equals_the_default() -> None:
    assert Policy(slots=4) == policy_of(NodeConfig(), 4)


def test_l_pre_max_is_a_share_of_the_ttft() -> None:
    assert policy_of(NodeConfig(), 4).prefill_target_ns == 50 * MS
    assert policy_of(NodeConfig(slo=SloSection(ttft_s=0.4)), 4).prefill_target_ns == 20 * MS


# ---- the paper's policy


def test_the_papers_policy_has_no_credit() -> None:
    made = filled(scheduler(2, 0.5, rules="paper"), entry("decode", 1))
    made.next(0)
    made.advanced(1, 1000)
    assert made.credit_ns == 0.0


def test_the_default_query_class_matches_these_tests() -> None:
    made = measured(scheduler(1, 1.0), 0, 10)
    made.add(entry("prefill", 1, deadline=1000, top_m=USUAL), 0)
    assert names(made.next(1000 - 129).late) == [1]  # 13 extends take 130 ns
