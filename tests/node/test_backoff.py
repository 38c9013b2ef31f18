"""Back-off: none after the first failure, then doubling delays with jitter up to a bound; reset by a healthy run."""

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime.node.supervisor.backoff import HEALTHY_S, Backoff


@given(st.integers(0, 2**32), st.floats(0.01, 1.0), st.floats(1.0, 60.0), st.lists(st.floats(0.0, 100.0), max_size=40))
def test_delays_are_jittered_within_half_a_step_which_doubles_up_to_a_bound_until_a_healthy_run(
    seed: int, first_s: float, most_s: float, runs: list[float]
) -> None:
    backoff = Backoff(random.Random(seed), first_s, most_s)
    step = 0.0  # a single death causes no delay
    for ran_s in runs:
        step = 0.0 if ran_s >= HEALTHY_S else step
        assert step / 2 <= backoff.next_delay(ran_s) <= step
        step = min(most_s, 2 * step or first_s)


def test_retries_continue_while_the_worker_keeps_dying() -> None:
    backoff = Backoff(random.Random(0), first_s=0.1, most_s=10.0)
    delays = [backoff.next_delay(ran_s=1.0) for _ in range(5000)]
    assert 5.0 <= min(delays[10:]) <= max(delays) <= 10.0


def test_workers_that_die_together_repeatedly_restart_at_different_times() -> None:
    source = random.Random(0)
    backoffs = [Backoff(source) for _ in range(8)]
    assert {backoff.next_delay(0.0) for backoff in backoffs} == {0.0}
    assert len({backoff.next_delay(0.0) for backoff in backoffs}) == 8
