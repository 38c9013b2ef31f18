"""Tests of the slot count that "auto" selects from measured extends, under noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.pool.sizing import FIXED_SHARE, LOOP_NS, ExtendCost, fewest_slots

SIZES = (1, 2, 4, 8, 16, 32)


def line(fixed_ns: float, each_ns: float, most: int = 512) -> list[ExtendCost]:
    sizes = [1 << power for power in range(most.bit_length())]
    return [ExtendCost(size, fixed_ns + each_ns * size) for size in sizes]


@pytest.mark.parametrize(("each_ns", "slots"), [(2000.0, 3), (700.0, 7), (20_000.0, 1)])
def test_with_linear_costs_only_the_loop_s_fixed_time_is_amortised(each_ns: float, slots: int) -> None:
    assert fewest_slots(line(0.0, each_ns, 32)) == slots


@given(fixed=st.floats(0, 1e5), each=st.floats(1, 1e4))
def test_the_smallest_slot_count_within_the_fixed_share_is_selected(fixed: float, each: float) -> None:
    slots = fewest_slots(line(fixed, each))
    share = (fixed + LOOP_NS) / (fixed + LOOP_NS + each * slots)
    fewer = (fixed + LOOP_NS) / (fixed + LOOP_NS + each * max(slots - 1, 0))
    assert slots == 512 or share <= FIXED_SHARE * 1.01
    assert fewer >= FIXED_SHARE * 0.99


def test_no_more_slots_than_measured_are_selected() -> None:
    assert fewest_slots([ExtendCost(size, 20_000.0) for size in SIZES]) == 32
    assert fewest_slots([ExtendCost(size, 20_000.0 / size) for size in SIZES]) == 32
    assert fewest_slots([ExtendCost(1, 20_000.0)]) == 1


@given(noise=st.lists(st.floats(1.0, 1.3), min_size=len(SIZES), max_size=len(SIZES)))
def test_thirty_percent_of_noise_does_not_turn_five_slots_into_thirty(noise: list[float]) -> None:
    measured = [ExtendCost(size, 2000.0 * size * by) for size, by in zip(SIZES, noise, strict=True)]
    assert 2 <= fewest_slots(measured) <= 6
