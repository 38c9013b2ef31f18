"""Tests of the benchmark of searches during writes: only searches are timed."""

import signal
import subprocess
import sys

from benchmarks.collections.node import in_turns, report_beside, window


def test_a_search_is_timed_without_the_pause_after_it() -> None:
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    took = window(lambda: passes(0.001), 1.0, clock=lambda: now, sleep=passes)
    assert len(took) == 200
    assert {round(one, 6) for one in took} == {1.0}


def test_processes_are_stopped_and_continued_alternately_and_left_running() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        sent: list[int] = []
        stopped, running = in_turns(lambda: [float(sent[-1])], [process.pid], 4, kill=lambda pid, how: sent.append(how))
        assert stopped == [signal.SIGSTOP] * 2
        assert running == [signal.SIGCONT] * 2
        assert sent[-1] == signal.SIGCONT
        process.kill()


def test_a_round_in_which_the_process_ended_counts_for_neither_side() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:

        def measure() -> list[float]:
            process.kill()
            process.wait()
            return [1.0]

        assert in_turns(measure, [process.pid], 1000) == ([], [])


def test_the_report_compares_alternating_measurements() -> None:
    results = {
        name: {"searches": 100, "p50 ms": p99 / 2, "p99 ms": p99}
        for name, p99 in (
            ("alone", 1.0), ("upserts held up", 1.1), ("beside 200 upserts/s", 1.21), ("merge held up", 2.0),
            ("beside a merge", 3.0),
        )
    }  # fmt: skip
    assert "1.21×, 1.21× alone, 1.10×, 1.10× upserts held up" in report_beside(results)
    assert "1.50×, 1.50× merge held up" in report_beside(results)
