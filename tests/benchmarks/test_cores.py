"""Tests of benchmarks on a core that other processes use."""

from collections.abc import Sequence

from benchmarks.common.cores import UndisturbedRun, run_undisturbed


def tried(*lost: int) -> tuple[UndisturbedRun[int], list[int]]:
    """Simulate runs of 100 ns with given times of others on the core. Return the number of the run that counts."""
    now, taken, runs = [0], [0], list[int]()

    def run() -> int:
        now[0] += 100
        taken[0] += lost[len(runs)]
        runs.append(len(runs))
        return runs[-1]

    def stolen(pids: Sequence[int]) -> int:
        return taken[0] * len(pids)

    return run_undisturbed(run, [1], most=0.05, tries=3, stolen=stolen, clock=lambda: now[0]), runs


def test_an_undisturbed_run_is_measured_once() -> None:
    found, runs = tried(5)
    assert (found.result, found.stolen_share, len(runs)) == (0, 0.05, 1)


def test_disturbed_runs_are_repeated_until_one_is_undisturbed() -> None:
    found, runs = tried(30, 2)
    assert (found.result, found.tries, len(runs)) == (1, 2, 2)


def test_if_all_runs_are_disturbed_the_least_disturbed_one_counts() -> None:
    found, runs = tried(30, 10, 20)
    assert (found.result, found.stolen_share, len(runs)) == (1, 0.1, 3)
