"""Tests of the policy's estimates: a line through the costs of extends, and the number of extends of a query."""

import pytest

from ipc.native.records import address_of
from runtime.pool.compiled import compiled
from runtime.pool.estimates import class_of, learn_extends
from runtime.pool.settings import Policy
from runtime.pool.tables import MAX_CLASSES, Tables, tables_at
from tests.pool.scheduler import Scheduler


def learnt(sizes: list[int], fixed: float, each: float, times: int = 100) -> Scheduler:
    made = Scheduler(Policy(slots=32))
    for _ in range(times):
        for active in sizes:
            made.learn_cost(active, fixed + each * active)
    return made


def line(made: Scheduler) -> tuple[float, float]:
    return made.tables.cost.fixed_ns, made.tables.cost.each_ns


def test_estimates_are_zero_before_any_observation() -> None:
    made = Scheduler(Policy(slots=32))
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


@compiled
def _class_of(at: int, index: int, top_m: int, patience: int) -> int:
    t = tables_at(at)
    entry = t.entries[0]
    entry.scope = index
    entry.top_m, entry.search_width, entry.patience = top_m, 4, patience
    return class_of(t, entry)


@compiled
def _learn(at: int, number: int, extends: int) -> None:
    learn_extends(tables_at(at).classes[number], extends)


def number_of(t: Tables, top_m: int, patience: int = 0, index: int = 0) -> int:
    return _class_of(address_of(t), index, top_m, patience)


def test_a_class_is_estimated_by_its_mean_and_before_that_by_its_top_m() -> None:
    t = learnt([], 0, 0).tables
    usual, patient = (number_of(t, 40, patience) for patience in (0, 2))
    assert t.classes[usual].mean_extends == 13.0
    for taken in (8, 10):
        _learn(address_of(t), usual, taken)
    assert (t.classes[usual].mean_extends, t.classes[patient].mean_extends) == (9.0, 13.0)
    assert number_of(t, 40) == usual
    assert number_of(t, 40, index=1) != usual


def test_query_classes_are_bounded_and_the_latest_are_kept() -> None:
    t = learnt([], 0, 0).tables
    for top_m in range(1, 3000):
        _learn(address_of(t), number_of(t, top_m), 5)
    assert t.class_count <= MAX_CLASSES
    assert t.classes[number_of(t, 2999)].mean_extends == 5.0
