"""Tests of slot assignment: prefill's reserve, queue orders, deadlines, timeouts, and the paper's policy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import DeadlineExceeded, Overloaded
from tests.pool.scheduler_factories import LONG, entry, filled, measured, names, scheduler


def test_with_equal_deadlines_the_longer_query_goes_first() -> None:
    made = measured(scheduler(1, 1.0), 10, 10)
    filled(made, entry("prefill", 1, deadline=10**6), entry("prefill", 2, deadline=10**6, top_m=LONG))
    assert names(made.next(0).admitted) == [2]


@given(st.integers(1, 64), st.floats(0.0, 1.0))
def test_prefill_gets_its_reserve_of_an_empty_pool_regardless_of_decodes_queue(slots: int, reserve: float) -> None:
    made = scheduler(slots, reserve, queue=1000)
    filled(made, *(entry("decode", name, arrival=0) for name in range(slots)))
    filled(made, *(entry("prefill", name, arrival=1) for name in range(slots)))
    made.next(2)
    assert made.running == {"prefill": math.ceil(reserve * slots), "decode": slots - math.ceil(reserve * slots)}


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


def test_flush_timeout_and_reserve_can_be_changed_at_run_time() -> None:
    made = filled(scheduler(1, 0.0, flush_prefill_ns=30), entry("prefill", 1), entry("decode", 2))
    made.tables.flush_prefill_ns, made.tables.reserve = 0, 1.0
    assert names(made.next(1).admitted) == [1]
