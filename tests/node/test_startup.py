"""Startup phases of a worker."""

import pytest

from runtime.node.startup import StartupTimer


def test_startup_phases_add_up_and_the_first_includes_the_process_age() -> None:
    now = [100.0]
    start = StartupTimer(clock=lambda: now[0], age_s=0.5, core_wait=lambda: 0.0)
    for name, seconds in (("imports", 1.0), ("weights", 0.25)):
        now[0] += seconds
        start.mark(name)
    assert str(start) == "1.75 s: imports 1.50, weights 0.25"


@pytest.mark.parametrize(("age_s", "counted_s"), [(1.0, "0.25"), (0.0, "0.50")])
def test_a_start_tells_how_long_it_waited_for_a_core_and_a_second_one_not_what_the_first_did(
    age_s: float, counted_s: str
) -> None:
    waited = iter([0.25, 0.75])
    start = StartupTimer(clock=lambda: 3.0, age_s=age_s, core_wait=lambda: next(waited))
    start.mark("imports")
    assert str(start) == f"{age_s:.2f} s ({counted_s} waiting for a core): imports {age_s:.2f}"
