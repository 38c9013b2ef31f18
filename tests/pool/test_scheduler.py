"""Whose turn it is: prefill's reserve, orders, deadlines, company, and how wide the batch is."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool.estimate import Kind
from runtime.pool.pace import round_ns
from tests.pool.schedulers import KIND, LONG, STAGES, entry, filled, measured, names, scheduler


def test_prefill_goes_by_deadline_and_decode_by_arrival() -> None:
    made = filled(
        scheduler(8, 0.4),
        *(entry("prefill", name, deadline=deadline) for name, deadline in ((1, 30), (2, 10), (3, 20))),
        *(entry("decode", name, deadline=deadline) for name, deadline in ((4, 30), (5, 10), (6, 20))),
    )
    order = names(made.next(0).admitted)
    assert [name for name in order if name < 4] == [2, 3, 1]
    assert [name for name in order if name >= 4] == [4, 5, 6]


def test_equal_deadlines_keep_the_order_of_arrival() -> None:
    made = filled(scheduler(4, 1.0), *(entry("prefill", name, deadline=5) for name in range(4)))
    assert names(made.next(0).admitted) == [0, 1, 2, 3]


def test_of_equal_deadlines_the_query_that_takes_longer_goes_first() -> None:
    made = measured(scheduler(1, 1.0), 10, 10)
    filled(made, entry("prefill", 1, deadline=10**6), entry("prefill", 2, deadline=10**6, kind=Kind("docs", 400, 4)))
    assert names(made.next(0).admitted) == [2]


@settings(deadline=None)
@given(st.integers(1, 64), st.floats(0.0, 1.0))
def test_prefill_has_its_reserve_of_an_empty_pool_however_long_decode_waits(slots: int, reserve: float) -> None:
    made = scheduler(slots, reserve, queue=1000)
    filled(made, *(entry("decode", name, arrival=0) for name in range(slots)))
    filled(made, *(entry("prefill", name, arrival=1) for name in range(slots)))
    made.next(2)
    assert made.running == {"prefill": math.ceil(reserve * slots), "decode": slots - math.ceil(reserve * slots)}


@settings(deadline=None)
@given(st.integers(1, 64), st.floats(0.0, 0.9), STAGES)
def test_a_share_that_one_stage_cannot_use_goes_to_the_other(slots: int, reserve: float, stage: Stage) -> None:
    made = filled(scheduler(slots, reserve), *(entry(stage, name) for name in range(slots + 5)))
    assert len(made.next(0).admitted) == slots
    assert made.running[stage] == slots


def test_every_slot_that_comes_free_is_prefills_until_it_has_its_reserve() -> None:
    decode = [entry("decode", name, arrival=0) for name in range(8)]
    made = filled(scheduler(4, 0.5), *decode)
    made.next(0)
    filled(made, *(entry("prefill", name, arrival=9) for name in range(10, 14)))
    order = []
    for one in decode[:4]:
        made.finished(one, 10)
        order += names(made.next(10).admitted)
    assert order == [10, 11, 4, 5]  # then the older one


@pytest.mark.parametrize(("aging", "order"), [(0, [2, 1, 3]), (10, [1, 2, 3])])
def test_beyond_the_reserve_prefill_goes_first_until_decode_has_aged_then_the_older_one(
    aging: int, order: list[int]
) -> None:
    made = filled(
        scheduler(3, 0.0, aging_ns=aging),
        entry("prefill", 1, arrival=5),
        entry("decode", 2, arrival=4),
        entry("decode", 3, arrival=6),
    )
    assert names(made.next(7).admitted) == order


def test_a_query_whose_deadline_has_come_is_late_and_takes_no_slot() -> None:
    made = filled(
        scheduler(1, 0.0),
        entry("prefill", 1, deadline=10),
        entry("prefill", 2, deadline=11),
        entry("decode", 3, deadline=10),
        entry("decode", 4, deadline=11, arrival=-1),
        now=9,
    )
    changes = made.next(10)
    assert names(changes.admitted) == [4]
    assert sorted(names(changes.late)) == [1, 3]
    assert names(made.next(11).late) == [2]


def test_a_full_queue_refuses_and_what_waits_stays() -> None:
    made = filled(scheduler(1, 0.5, queue=2), entry("prefill", 1), entry("decode", 2))
    with pytest.raises(Overloaded, match="2 queries wait, and 2 may"):
        made.add(entry("prefill", 3), 0)
    assert made.waiting == {"prefill": 1, "decode": 1}


def test_decode_queries_leave_a_quarter_of_the_queue_free() -> None:
    made = filled(scheduler(1, 0.3, queue=8), *(entry("decode", name) for name in range(6)))
    with pytest.raises(Overloaded, match="6 decode queries wait, and 6 may"):
        made.add(entry("decode", 6), 0)
    filled(made, *(entry("prefill", name) for name in range(2)))


def test_a_query_that_cannot_make_its_deadline_is_refused_at_once() -> None:
    made = measured(scheduler(4, 0.3), 10, 10)  # alone, 13 extends take 260
    with pytest.raises(DeadlineExceeded):
        made.add(entry("prefill", 1, deadline=1200), 1000)
    made.add(entry("prefill", 2, deadline=1300), 1000)
    with pytest.raises(DeadlineExceeded):
        made.add(entry("decode", 3, deadline=1200), 1000)


def test_a_decode_query_is_refused_for_those_before_it() -> None:
    made = filled(measured(scheduler(4, 0.0), 10_000, 10_000), *(entry("decode", name) for name in range(10)))
    needed = 10 * 13 * 50_000 // 4 + 13 * 50_000 + round_ns(made)  # four extends at a time take 50,000
    with pytest.raises(DeadlineExceeded):
        made.add(entry("decode", 10, deadline=needed), 0)
    filled(made, entry("prefill", 11, deadline=1_800_000), entry("decode", 12, deadline=needed + 100))


def test_what_waited_too_long_for_its_deadline_is_late_before_the_deadline_has_passed() -> None:
    made = measured(scheduler(1, 0.0), 10, 10)
    made.add(entry("prefill", 1, deadline=300), 0)
    assert names(made.next(50).late) == [1]


def test_a_shorter_decode_query_passes_longer_ones_that_came_a_little_earlier() -> None:
    made = measured(
        scheduler(1, 0.0), 1, 10
    )  # an extend of one takes 11: 16 times 128 and 16 extends: 22,528 and 2,816
    filled(made, entry("decode", 1), entry("decode", 2, kind=LONG, arrival=1), entry("decode", 3, kind=LONG, arrival=2))
    for name, arrival in ((4, 18_000), (5, 19_000), (6, 20_000)):
        filled(made, entry("decode", name, arrival=arrival), now=arrival)
    order = []
    for _ in range(6):
        (one,) = made.next(20_000).admitted
        made.finished(one, 13 if one.kind is KIND else 103)
        order.append(one.query)
    assert order == [1, 4, 5, 2, 3, 6]  # the last came too late for that


def test_alike_decode_queries_keep_their_order_whatever_is_learnt_meanwhile() -> None:
    made = measured(scheduler(1, 0.0), 10, 100)
    filled(made, entry("decode", 1))
    measured(made, 0, 1)
    filled(made, entry("decode", 2, arrival=1), now=1)
    made.extends.learn(KIND, 9)  # still four bits
    filled(made, entry("decode", 3, arrival=2), now=2)
    order = []
    for _ in range(3):
        (one,) = made.next(3).admitted
        made.finished(one, 9)
        order.append(one.query)
    assert order == [1, 2, 3]


# ---- company


def test_a_query_in_an_idle_pool_waits_for_company_until_its_flush_timeout() -> None:
    made = scheduler(4, 0.5, flush_prefill_ns=10, flush_ns=30)
    filled(made, entry("decode", 1, arrival=0))
    assert (made.held_until(5), made.next(5).admitted) == (30, [])
    filled(made, entry("prefill", 2, arrival=6), now=6)
    assert (made.held_until(7), made.next(7).admitted) == (16, [])
    assert sorted(names(made.next(16).admitted)) == [1, 2]
    assert made.held_until(17) is None
    filled(made, entry("decode", 3, arrival=17), now=17)
    assert names(made.next(17).admitted) == [3]  # company is there


def test_a_full_batch_and_a_query_without_slack_do_not_wait_for_company() -> None:
    made = filled(scheduler(2, 0.5, flush_ns=30), entry("decode", 1), entry("decode", 2))
    assert names(made.next(1).admitted) == [1, 2]
    made = filled(scheduler(2, 0.5, flush_prefill_ns=30), entry("prefill", 1, deadline=5))
    assert made.held_until(1) == 5


def test_flush_timeout_and_reserve_can_be_changed_while_it_runs() -> None:
    made = filled(scheduler(4, 0.0, flush_prefill_ns=30), entry("prefill", 1))
    made.flush_prefill_ns = 0
    assert names(made.next(1).admitted) == [1]
    made.reserve = 1.0
    filled(made, *(entry("decode", name, arrival=-5) for name in (2, 3)), *(entry("prefill", name) for name in (4, 5)))
    assert names(made.next(2).admitted) == [4, 5, 2]


# ---- width


def test_the_batch_is_as_wide_as_is_worth_while_and_wider_the_more_wait() -> None:
    for target, widths in ((0, [6, 8, 8]), (100, [6, 12, 32])):  # a crowd is served by 8 at least
        made = measured(scheduler(32, 0.5, waste=0.1, prefill_target_ns=target), fixed=5.99, each=10)
        found = []  # 6 ≤ 10% of 10·a from a = 6 on; 5% from 12 on
        for count in (0, 4, 96):
            filled(made, *(entry("decode", name) for name in range(count)))
            found.append(made.width)
        assert found == widths
        assert len(made.next(0).admitted) == widths[-1]
    assert measured(scheduler(32, 0.5), fixed=100, each=0).width == 32  # as on a GPU
