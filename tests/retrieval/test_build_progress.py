"""Progress reporting of long builds on a terminal and in a log."""

import io

from launchers.progress import BuildProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_ten_seconds_and_at_the_end_of_a_stage() -> None:
    now = 0.0
    log = io.StringIO()
    with BuildProgress(log, clock=lambda: now) as progress:
        for second in range(25):
            now = float(second)
            progress("embed", second / 25)
        now = 25.0
        progress("embed", 1.0)
        progress("something new", 1.0)
    assert log.getvalue().splitlines() == [
        "embedding: 40%",
        "embedding: 80%",
        "embedding: done in 25.0 s",
        "something new: done in 0.0 s",
    ]


def test_a_terminal_gets_a_bar_for_each_stage() -> None:
    terminal = Terminal()
    with BuildProgress(terminal) as progress:
        progress("read", 1.0)
        progress("embed", 0.5)
    assert "reading documents" in terminal.getvalue()
    assert "embedding" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
