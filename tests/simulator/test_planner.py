"""Tests of the planner on the simulated node: workers change roles, and more requests meet their objectives."""

from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from runtime.node.config import HttpSection, NodeConfig
from runtime.node.control.planner import Move, Planner, Work
from runtime.node.metrics.worker_metrics import Stage
from runtime.node.worker_config import DecodeSection, PrefillSection
from runtime.simulator.node import Simulation, simulate
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos, Workload

SHARE, PHASE_S, STEADY_S = 0.9, 400.0, 200.0


class Request(NamedTuple):
    arrival: Arrival
    by_night: bool


def node(prefill: int, planner: str = "off", gpus: int = 8) -> Setup:
    """A node whose other GPUs are for decode."""
    slos = Slos(ttft_s=2.0, tpot_s=0.015)
    config = NodeConfig(
        http=HttpSection(max_in_flight=100_000),
        prefill=PrefillSection(workers=prefill, slots=16),
        decode=DecodeSection(workers=gpus - prefill, slots=256, devices=("cuda:0",)),
    )
    control, slo = replace(config.control, planner=planner), replace(config.slo, objective=SHARE)
    node = replace(config, control=control, slo=slo)
    return Setup(config=node, times=H100_8B, workload=Workload(retrieval=False), slos=slos)


def lengths(prompt: int, output: int, spread: float) -> list[tuple[int, int]]:
    """Log-normal tokens of prompts and answers with these means."""
    random = Random(1)

    def draw(mean: int) -> int:
        return max(2, int(mean * random.lognormvariate(-(spread**2) / 2, spread)))

    return [(draw(prompt), draw(output)) for _ in range(5000)]


@pytest.fixture(scope="module")
def sent() -> list[Request]:
    """45 chats/s, which a third of a phase turns into 9 documents/s."""
    kinds, rates = (cycle(lengths(400, 600, 0.5)), cycle(lengths(10_000, 60, 0.3))), (45.0, 9.0)
    random, at_s, sent = Random(3), 0.0, list[Request]()
    while at_s < 2 * PHASE_S:
        night = min(max(3 * (at_s / PHASE_S - 1), 0.0), 1.0)
        shares = rates[0] * (1 - night), rates[1] * night
        at_s += random.expovariate(sum(rates))
        if random.random() * sum(rates) > sum(shares):
            continue
        by_night = random.random() * sum(shares) > shares[0]
        sent.append(Request(Arrival(at_s, *next(kinds[by_night])), by_night))
    return sent


def attainments(setup: Setup, sent: Sequence[Request]) -> tuple[float, float, int]:
    """The shares of day and night requests that met both SLOs, and the number of worker moves. The run ends once a
    share cannot reach the target any more."""
    simulation = Simulation(setup, [request.arrival for request in sent], most_missed=(1 - SHARE) * len(sent))
    moves = simulation.run().use["moves"]
    night = {request.arrival.at_s for request in sent if request.by_night}
    good = [0, 0]
    for request in simulation.requests:
        good[request.arrival.at_s in night] += request.met(setup.slos.ttft_s, setup.slos.tpot_s)
    return good[0] / (len(sent) - len(night)), good[1] / len(night), int(moves)


def test_a_fixed_split_of_workers_does_not_serve_both_chats_and_documents(sent: list[Request]) -> None:
    day, night, moves = attainments(node(4), sent)
    assert min(day, night) < SHARE
    assert moves == 0


def test_with_the_planner_nine_tenths_of_both_meet_their_objectives(sent: list[Request]) -> None:
    day, night, moves = attainments(node(4, "act"), sent)
    assert min(day, night) >= SHARE
    assert 4 <= moves <= 12


STEADY = {  # prefill workers of eight; TPOT; mean prompt, answer and log-normal spread; requests/s
    "long prompts, as Mooncake's, near the capacity": (3, 0.05, (12_035, 343, 1.2), 5.0),
    "questions with passages, as RAGPulse's": (4, 0.015, (3_000, 250, 0.8), 6.0),
    "chats, as Azure's": (3, 0.015, (1_155, 211, 0.8), 25.0),
}


def moves_of(setup: Setup, shape: tuple[int, int, float], rate: float, seed: int) -> list[Stage]:
    """The roles that gave a worker away under Poisson arrivals."""
    kind, random, at_s, sent = cycle(lengths(*shape)), Random(seed), 0.0, list[Arrival]()
    while at_s < STEADY_S:
        at_s += random.expovariate(rate)
        sent.append(Arrival(at_s, *next(kind)))
    moved = list[Stage]()
    decide = Planner.update

    def watched(planner: Planner, now_s: float, work: Work) -> Move | None:
        if (move := decide(planner, now_s, work)) is not None and now_s < at_s:
            moved.append(move.role)
        return move

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Planner, "update", watched)
        simulate(setup, sent)
    return moved


@pytest.mark.parametrize("load", STEADY)
def test_steady_load_moves_workers_one_way_and_none_once_they_are_there_however_much_prompts_differ(load: str) -> None:
    prefill, tpot_s, shape, rate = STEADY[load]

    def setup(prefill: int) -> Setup:
        return replace(node(prefill, "act"), slos=Slos(ttft_s=2.0, tpot_s=tpot_s))

    moved = moves_of(setup(prefill), shape, rate, seed=1)
    assert len(set(moved)) <= 1, moved
    assert moves_of(setup(prefill + moved.count("decode") - moved.count("prefill")), shape, rate, seed=2) == []


def test_under_constant_load_the_planner_converges() -> None:
    chats = [Arrival(number / 25, 400, 600) for number in range(4_000)]
    short, long = (simulate(node(2, "act", gpus=4), chats[:count]) for count in (2_000, 4_000))
    assert 0 < short.use["moves"] == long.use["moves"]
    assert long.attainment > 0.95
