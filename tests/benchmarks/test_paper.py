"""Tests of the papers' experiments: load, operating point search and descriptions."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.paper.__main__ import EXPERIMENTS
from benchmarks.paper.figure1 import figure1
from benchmarks.paper.planner import Change, requests
from benchmarks.paper.serving import GPUS, arrivals, greatest, lengths, node
from runtime.simulator.workload import Slos

CHANGE = Change("", Slos(), [(400, 600)], [(10_000, 60)], (0.0, 0.0))


def test_day_and_night_alternate_with_transitions_of_a_third_of_a_phase() -> None:
    sent = requests(CHANGE, (50.0, 10.0), 300.0)
    day = [request.arrival.at_s for request in sent if not request.by_night]
    night = [request.arrival.at_s for request in sent if request.by_night]
    assert len([at_s for at_s in day if at_s < 300]) / 300 == pytest.approx(50, rel=0.05)
    assert min(night) > 300
    assert max(day) < 400
    assert len([at_s for at_s in night if 400 < at_s < 600]) / 200 == pytest.approx(10, rel=0.1)
    assert {request.arrival.prompt_tokens for request in sent if request.by_night} == {10_000}


def test_the_largest_passing_value_is_approached_from_below() -> None:
    assert greatest(lambda value: value <= 37.0, 100.0, rounds=10) == pytest.approx(37.0, abs=0.1)
    assert greatest(lambda value: False, 100.0, least=5.0) == 5.0


def test_lengths_have_the_requested_means_and_arrivals_the_rate() -> None:
    found = lengths(1000, 200, 0.5)
    assert sum(prompt for prompt, _ in found) / len(found) == pytest.approx(1000, rel=0.05)
    assert sum(answer for _, answer in found) / len(found) == pytest.approx(200, rel=0.05)
    assert len(arrivals(found, 40.0, 100.0)) == pytest.approx(4000, rel=0.05)


def test_every_node_has_the_same_number_of_gpus_for_models() -> None:
    apart, colocated = node(3, "always", Slos()).config, node(1, "never", Slos()).config
    assert apart.prefill.workers + apart.decode.workers == GPUS
    assert colocated.decode.workers == GPUS


def test_operating_points_are_where_throughput_saturates(tmp_path: Path) -> None:
    figures, lines, draw = figure1(Namespace(times=None))
    assert len(lines) == 2 + len(figures)
    for one in figures.values():
        assert 16 < one["x_sat"] < 1024
        assert one["shares"][0] < 0.1
    pytest.importorskip("matplotlib")
    draw(tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_every_experiment_has_a_description() -> None:
    assert all(run.__doc__ for run in EXPERIMENTS.values())
