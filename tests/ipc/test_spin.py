"""Tests of adaptive spinning."""

from ipc.ring.doorbell import SpinBudget


def test_two_long_waits_disable_spinning_and_a_short_wait_enables_it() -> None:
    budget = SpinBudget(100_000)
    assert budget.ns == 100_000
    budget.learn(1_000_000)
    assert budget.ns == 100_000
    budget.learn(1_000_000)
    assert budget.ns == 2_000
    budget.learn(60_000)
    assert budget.ns == 100_000


def test_a_limit_of_zero_never_spins() -> None:
    budget = SpinBudget(0)
    assert budget.ns == 0
    for _ in range(3):
        budget.learn(1000)
    assert budget.ns == 0
