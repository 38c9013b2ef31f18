"""Startup phases of a worker."""

from runtime.node.startup import StartupTimer, process_age_s


def test_startup_phases_add_up_and_the_first_includes_the_process_age() -> None:
    now = [100.0]
    start = StartupTimer(clock=lambda: now[0], age_s=0.5)
    for name, seconds in (("imports", 1.0), ("weights", 0.25)):
        now[0] += seconds
        start.mark(name)
    assert str(start) == "1.75 s: imports 1.50, weights 0.25"


def test_a_start_without_phases_took_no_time() -> None:
    assert str(StartupTimer(clock=lambda: 3.0)) == "0.00 s"


def test_the_age_of_a_process_increases() -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s()
