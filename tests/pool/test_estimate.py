"""Tests of the policy's estimates: a line through the costs of extends, and the number of extends of a query."""

import pytest

from runtime.pool import tables as at
from runtime.pool.settings import Policy
from runtime.pool.tables import class_a, class_b, class_row, learn_extends
from tests.pool.scheduler import Scheduler


def learnt(sizes: list[int], fixed: float, each: float, times: int = 100) -> Scheduler[int]:
    made: Scheduler[int] = Scheduler(Policy(slots=32))
    for _ in range(times):
        for active in sizes:
            made.learn_cost(active, fixed + each * active)
    return made


def line(made: Scheduler[int]) -> tuple[float, float]:
    fixed, each = made.tables.floats[[at.FIXED_NS, at.EACH_NS]].tolist()
    return fixed, each


def test_estimates_are_zero_before_any_observation() -> None:
    made: Scheduler[int] = Scheduler(Policy(slots=32))
    assert made.extend_ns(8) == 0.0


def test_the_line_through_the_costs_is_fitted() -> None:
    made = learnt([1, 8], fixed=100.0, each=10.0)
    assert line(made) == pytest.approx((100.0, 10.0))
    assert made.extend_ns(4) == pytest.approx(140.0)


def test_a_slowdown_at_one_size_scales_the_line() -> None:
    made = learnt([1, 8], fixed=100.0, each=10.0)
    for slower in (1, 2):
        for _ in range(3000):
            made.learn_cost(4, slower * 140.0)
    assert line(made) == pytest.approx((200.0, 20.0), rel=0.02)


def test_a_new_slope_is_learnt_from_extends_of_different_sizes() -> None:
    made = learnt([1, 8], fixed=100.0, each=10.0)
    for _ in range(1500):
        for active in (1, 8):
            made.learn_cost(active, 20.0 + 30.0 * active)
    assert line(made) == pytest.approx((20.0, 30.0), rel=0.05)


def test_the_line_has_no_negative_coefficient() -> None:
    falling, steep = learnt([], 0, 0), learnt([], 0, 0)
    for _ in range(100):
        for active, falls, rises in ((1, 100.0, 1.0), (8, 20.0, 80.0)):
            falling.learn_cost(active, falls)
            steep.learn_cost(active, rises)
    assert line(falling) == pytest.approx((60.0, 0.0), rel=0.1)
    assert line(steep)[0] >= 0.0


def test_an_outlier_from_a_lost_core_is_capped_at_four_times_the_estimate() -> None:
    made = learnt([1, 8], fixed=100.0, each=10.0, times=200)
    made.learn_cost(4, 1e9)
    assert made.extend_ns(4) < 1.1 * 140.0


def test_a_class_is_estimated_by_its_mean_and_before_that_by_its_top_m() -> None:
    tables = learnt([], 0, 0).tables
    usual, patient = (class_row(tables, class_a(0, 40), class_b(4, patience)) for patience in (0, 2))
    assert tables.means[usual, 0] == 13.0
    for taken in (8, 10):
        learn_extends(tables, usual, taken)
    assert (tables.means[usual, 0], tables.means[patient, 0]) == (9.0, 13.0)
    assert class_row(tables, class_a(0, 40), class_b(4, 0)) == usual
    assert class_row(tables, class_a(1, 40), class_b(4, 0)) != usual


def test_query_classes_are_bounded_and_the_latest_are_kept() -> None:
    tables = learnt([], 0, 0).tables
    for top_m in range(1, 3000):
        learn_extends(tables, class_row(tables, class_a(0, top_m), class_b(1, 0)), 5)
    assert tables.words[at.CLASS_COUNT] <= at.MAX_CLASSES
    assert tables.means[class_row(tables, class_a(0, 2999), class_b(1, 0)), 0] == 5.0
