"""Tests of the planner on the simulated node: workers change roles, and more requests meet their objectives."""

import pytest

from benchmarks.paper.planner import Change, Request, attainments, requests
from benchmarks.paper.serving import lengths, node
from runtime.simulator.node import simulate
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos

CHATS_THEN_DOCUMENTS = Change(
    "", Slos(ttft_s=2.0, tpot_s=0.015), lengths(400, 600, 0.5), lengths(10_000, 60, 0.3), (0.0, 0.0)
)


@pytest.fixture(scope="module")
def sent() -> list[Request]:
    return requests(CHATS_THEN_DOCUMENTS, (45.0, 9.0), 400.0)


@pytest.mark.parametrize("prefill", [4, 5])
def test_no_fixed_split_of_workers_serves_both_chats_and_documents(prefill: int, sent: list[Request]) -> None:
    day, night, moves = attainments(node(prefill, "auto", CHATS_THEN_DOCUMENTS.slos), sent)
    assert min(day, night) < 0.9
    assert moves == 0


def test_with_the_planner_nine_tenths_of_both_meet_their_objectives(sent: list[Request]) -> None:
    day, night, moves = attainments(node(4, "auto", CHATS_THEN_DOCUMENTS.slos, "act"), sent)
    assert min(day, night) >= 0.9
    assert 4 <= moves <= 12


def test_under_constant_load_the_planner_converges() -> None:
    chats = [Arrival(number / 50, 400, 600) for number in range(10_000)]
    short, long = (
        simulate(node(4, "auto", CHATS_THEN_DOCUMENTS.slos, "act"), chats[:count]) for count in (5_000, 10_000)
    )
    assert 0 < short.use["moves"] == long.use["moves"]
    assert long.attainment > 0.95
