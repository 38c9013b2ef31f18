"""Tests of the benchmarks' conclusions: significance of differences, and which trials count."""

import pytest

from benchmarks.policy.bench import Job
from benchmarks.policy.control import Pair, markdown
from benchmarks.serve.sections.agreement import Timings, Trial


@pytest.mark.parametrize(
    ("shipped", "standing"),
    [((11.0, 12.0, 13.5), "ahead"), ((9.0, 10.0, 11.5), "behind"), ((9.0, 13.0, 12.0), "even"), ((10, 11, 12), "even")],
)
def test_a_law_is_ahead_or_behind_only_by_more_than_two_standard_errors(
    shipped: tuple[float, ...], standing: str
) -> None:
    pair = Pair.of(32, Job("azure", 0, 2e-5, 1.0, "configured"), (10.0, 11.0, 12.0), shipped)
    assert pair.standing == standing
    assert f"ahead by two standard errors in {int(standing == 'ahead')}" in markdown([pair])


@pytest.mark.parametrize(("beside", "beside_fit", "counts"), [(0.09, 0.0, True), (0.2, 0.0, False), (0.0, 0.2, False)])
def test_a_trial_counts_only_if_no_other_process_ran_during_it_or_its_fit(
    beside: float, beside_fit: float, counts: bool
) -> None:
    assert Trial(Timings(), Timings(), (1.0, 0.1, beside), beside_fit).counts is counts
