"""Startup phases of a worker."""

from runtime.node.startup import StartupTimer


def test_startup_phases_add_up_and_the_first_includes_the_process_age() -> None:
    now = [100.0]
    start = StartupTimer(clock=lambda: now[0], age_s=0.5, core_wait=lambda: 0.0)
    for name, seconds in (("imports", 1.0), ("weights", 0.25)):
        now[0] += seconds
        start.mark(name)
    assert str(start) == "1.75 s: imports 1.50, weights 0.25"


def test_a_start_tells_how_long_it_waited_for_a_core() -> None:
    waited = iter([0.25, 0.75])
    start = StartupTimer(clock=lambda: 3.0, age_s=1.0, core_wait=lambda: next(waited))
    start.mark("imports")
    assert str(start) == "1.00 s (0.25 waiting for a core): imports 1.00"


def test_a_second_start_of_a_process_does_not_count_what_it_waited_in_the_first() -> None:
    waited = iter([0.25, 0.75])
    start = StartupTimer(clock=lambda: 3.0, core_wait=lambda: next(waited))
    start.mark("first search")
    assert str(start) == "0.00 s (0.50 waiting for a core): first search 0.00"
