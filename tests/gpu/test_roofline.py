"""Tests of the roofline fit: it recovers known parameters, tolerates noise and rejects unusable data."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import CpuEngine, GraphIndex, InvalidParams, SearchParams
from gpu.roofline import Saturation, host_copy_bytes_s, measure_extends, search_roofline, slot_bytes
from tests.gpu.datasets import clustered

LOADS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
curves = st.builds(Saturation, st.floats(0.05, 1.0), st.floats(2.0, 500.0), st.floats(0.1, 1.2))


@given(curves)
def test_the_fit_passes_through_the_points_of_any_roofline(curve: Saturation) -> None:
    fitted = Saturation.fit(LOADS, [curve.at(x) for x in LOADS])
    for x in LOADS:
        assert math.isclose(fitted.at(x), curve.at(x), rel_tol=0.02)


@given(curves.filter(lambda curve: curve.at(8.0) < curve.u_max and curve.at(64.0) == curve.u_max))
def test_the_parameters_are_recovered_if_both_parts_have_points(curve: Saturation) -> None:
    fitted = Saturation.fit(LOADS, [curve.at(x) for x in LOADS])
    assert fitted.u_max == pytest.approx(curve.u_max, rel=1e-6)
    assert fitted.x_sat == pytest.approx(curve.x_sat, rel=1e-6)
    assert fitted.alpha == pytest.approx(curve.alpha, rel=1e-6)


@given(curves, st.integers(0, 2**32 - 1))
def test_five_percent_of_noise_moves_the_curve_by_about_five_percent(curve: Saturation, seed: int) -> None:
    noise = np.exp(np.random.default_rng(seed).uniform(-0.05, 0.05, len(LOADS)))
    fitted = Saturation.fit(LOADS, [curve.at(x) * float(factor) for x, factor in zip(LOADS, noise, strict=True)])
    for x in LOADS:
        assert math.isclose(fitted.at(x), curve.at(x), rel_tol=0.12)


@given(st.permutations(LOADS))
def test_the_order_of_the_points_does_not_matter(order: list[float]) -> None:
    curve = Saturation(0.6, 90.0, 0.8)
    assert Saturation.fit(order, [curve.at(x) for x in order]) == Saturation.fit(LOADS, [curve.at(x) for x in LOADS])


def test_too_few_or_invalid_points_are_rejected() -> None:
    with pytest.raises(InvalidParams, match="at least 2 different loads"):
        Saturation.fit([4.0, 4.0], [0.1, 0.1])
    with pytest.raises(InvalidParams, match="above 0 and finite"):
        Saturation.fit([1.0, 2.0], [0.1, 0.0])
    with pytest.raises(InvalidParams, match="above 0 and finite"):
        Saturation.fit([1.0, 2.0], [0.1, float("nan")])


class SteadyEngine(CpuEngine):
    """Every extend takes one second of its clock, regardless of the number of slots."""

    seconds = 0

    def extend(self) -> npt.NDArray[np.int32]:
        self.seconds += 1
        return super().extend()


def test_extends_are_timed_from_one_slot_to_all_and_slots_are_released() -> None:
    index = GraphIndex.build(clustered(np.random.default_rng(0), 600, 16), metric="l2", degree=8)
    engine = SteadyEngine({"docs": index}, slots=6, max_top_m=64)
    times = measure_extends(engine, "docs", index, SearchParams(1, 64, 2), clock=lambda: float(engine.seconds))
    assert [one.active for one in times] == [1, 2, 4, 6]
    assert [one.nbytes for one in times] == [count * slot_bytes(index, 2) for count in (1, 2, 4, 6)]
    assert [one.seconds for one in times] == [1.0] * 4
    assert engine.free_slots == 6


def test_a_roofline_reproduces_the_times_it_was_fitted_to() -> None:
    index = GraphIndex.build(clustered(np.random.default_rng(0), 600, 16), metric="l2", degree=8)
    engine = SteadyEngine({"docs": index}, slots=8, max_top_m=64)  # as on a device that is not saturated
    times = measure_extends(engine, "docs", index, SearchParams(1, 64, 2), clock=lambda: float(engine.seconds))
    found = search_roofline("cpu", 1e9, times)
    assert found.saturation.alpha == pytest.approx(1.0)
    assert found.extend_seconds(3) == pytest.approx(times[0].seconds)


def test_copy_bandwidth_is_measured() -> None:
    ticks = iter(range(100))
    assert host_copy_bytes_s(lambda: float(next(ticks)), nbytes=8000) == 8000.0
