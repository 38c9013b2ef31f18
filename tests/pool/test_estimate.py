"""What the scheduler learns: the line through the costs of extends, and how many extends a query takes."""

import pytest

from runtime.pool.estimate import ExtendCost, ExtendEstimate, Kind

KIND = Kind("docs", 40, 4)


def learnt(widths: list[int], fixed: float, each: float, times: int = 100) -> ExtendCost:
    cost = ExtendCost()
    for _ in range(times):
        for active in widths:
            cost.learn(active, fixed + each * active)
    return cost


def test_before_anything_is_learnt_nothing_costs_anything_and_only_slots_count() -> None:
    cost = ExtendCost()
    assert (cost.of(8), cost.worthwhile(32, 0.1), cost.most_within(1.0, 32)) == (0.0, 32, 32)


def test_the_line_through_the_costs_is_found() -> None:
    cost = learnt([1, 8], fixed=100.0, each=10.0)
    assert (cost.fixed_ns, cost.each_ns) == pytest.approx((100.0, 10.0))
    assert cost.of(4) == pytest.approx(140.0)


def test_when_the_machine_gets_slower_at_one_width_the_line_keeps_its_shape() -> None:
    cost = learnt([1, 8], fixed=100.0, each=10.0)
    for slower in (1, 2):
        for _ in range(3000):
            cost.learn(4, slower * 140.0)
    assert (cost.fixed_ns, cost.each_ns) == pytest.approx((200.0, 20.0), rel=0.02)
    assert cost.worthwhile(32, 0.6) == 17


def test_another_shape_is_learnt_from_extends_of_different_widths() -> None:
    cost = learnt([1, 8], fixed=100.0, each=10.0)
    for _ in range(1500):
        for active in (1, 8):
            cost.learn(active, 20.0 + 30.0 * active)
    assert (cost.fixed_ns, cost.each_ns) == pytest.approx((20.0, 30.0), rel=0.05)


def test_where_more_slots_cost_nothing_all_are_worth_while() -> None:
    cost = learnt([1, 8], fixed=100.0, each=0.0)  # as on a GPU
    assert cost.each_ns == pytest.approx(0.0, abs=1e-9)
    assert cost.worthwhile(32, 0.03) == 32
    assert (cost.most_within(100.1, 32), cost.most_within(99.0, 32)) == (32, 0)


def test_no_part_of_the_line_is_below_nothing() -> None:
    falling, steep = ExtendCost(), ExtendCost()
    for _ in range(100):
        for active, falls, rises in ((1, 100.0, 1.0), (8, 20.0, 80.0)):
            falling.learn(active, falls)
            steep.learn(active, rises)
    assert (falling.each_ns, falling.fixed_ns) == pytest.approx((0.0, 60.0), rel=0.1)
    assert steep.fixed_ns >= 0.0
    assert steep.worthwhile(32, 0.1) == 1


def test_a_round_in_which_the_process_lost_its_core_counts_as_four() -> None:
    cost = learnt([1, 8], fixed=100.0, each=10.0, times=200)
    cost.learn(4, 1e9)
    assert cost.of(4) < 1.1 * 140.0


def test_a_kind_takes_what_those_before_it_took_and_until_then_what_its_top_m_says() -> None:
    extends = ExtendEstimate()
    assert extends.of(KIND) == 13.0
    for taken in (8, 10):
        extends.learn(KIND, taken)
    assert (extends.of(KIND), extends.of(KIND._replace(patience=2))) == (9.0, 13.0)


def test_kinds_without_end_take_bounded_memory() -> None:
    extends = ExtendEstimate()
    for top_m in range(1, 3000):
        extends.learn(Kind("docs", top_m, 1), 5)
    assert len(extends._means) <= 1024
    assert extends.of(Kind("docs", 2999, 1)) == 5.0
