"""A worker says where its start went."""

from runtime.node.startup import StartupTimer, process_age_s


def test_parts_add_up_to_the_whole_and_the_process_s_age_counts_to_the_first() -> None:
    now = [100.0]
    start = StartupTimer(clock=lambda: now[0], age_s=0.5)
    for name, seconds in (("imports", 1.0), ("weights", 0.25)):
        now[0] += seconds
        start.mark(name)
    assert str(start) == "1.75 s: imports 1.50, weights 0.25"


def test_a_start_without_parts_took_no_time() -> None:
    assert str(StartupTimer(clock=lambda: 3.0)) == "0.00 s"


def test_a_process_has_an_age_that_grows() -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s()
