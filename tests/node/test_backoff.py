"""Back-off: none after the first failure, then doubling delays with jitter up to a bound; reset by a healthy run."""

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime.node.supervisor.backoff import Backoff


@given(st.integers(0, 2**32), st.floats(0.01, 1.0), st.floats(1.0, 60.0), st.integers(1, 60))
def test_delays_are_jittered_within_half_a_step_and_steps_double_up_to_the_bound(
    seed: int, first_s: float, most_s: float, failures: int
) -> None:
    backoff = Backoff(random.Random(seed), first_s, most_s)
    assert backoff.next_delay(ran_s=0.0) == 0.0  # a single death causes no delay
    step = first_s
    for _ in range(failures):
        delay = backoff.next_delay(ran_s=0.0)
        assert step / 2 <= delay <= step
        step = min(most_s, 2 * step)


def test_retries_continue_while_the_worker_keeps_dying() -> None:
    backoff = Backoff(random.Random(0), first_s=0.1, most_s=10.0)
    delays = [backoff.next_delay(ran_s=1.0) for _ in range(5000)]
    assert 5.0 <= min(delays[10:]) <= max(delays) <= 10.0


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40))
def test_a_healthy_run_resets_the_back_off(runs: list[float]) -> None:
    backoff = Backoff(random.Random(0), first_s=0.1, most_s=10.0)
    failures = 0
    for ran_s in runs:
        delay = backoff.next_delay(ran_s)
        failures = 1 if ran_s >= 30.0 else failures + 1
        step = 0.1 * 2 ** (failures - 2) if failures > 1 else 0.0
        assert min(10.0, step) / 2 <= delay <= step + 1e-9


def test_workers_that_die_together_repeatedly_restart_at_different_times() -> None:
    source = random.Random(0)
    backoffs = [Backoff(source) for _ in range(8)]
    assert {backoff.next_delay(0.0) for backoff in backoffs} == {0.0}
    assert len({backoff.next_delay(0.0) for backoff in backoffs}) == 8
