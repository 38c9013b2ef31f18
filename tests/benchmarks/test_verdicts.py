"""Which trials of `benchmarks.serve` count."""

import pytest

from benchmarks.serve.sections.agreement import Timings, Trial


@pytest.mark.parametrize(("beside", "beside_fit", "counts"), [(0.09, 0.0, True), (0.2, 0.0, False), (0.0, 0.2, False)])
def test_a_trial_counts_only_if_no_other_process_ran_during_it_or_its_fit(
    beside: float, beside_fit: float, counts: bool
) -> None:
    assert Trial(Timings(), Timings(), (1.0, 0.1, beside), beside_fit).counts is counts
