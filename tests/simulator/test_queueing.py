"""Tests of the simulated node against queueing theory."""

from random import Random

import pytest
from msgspec.structs import replace

from runtime.node.config import HandoverSection, HttpSection, NodeConfig
from runtime.node.worker_config import DecodeSection, PrefillSection
from runtime.serving.prefill import job
from runtime.simulator.capacity import capacity, demands
from runtime.simulator.node import Simulation, simulate
from runtime.simulator.plan import PLACEMENTS
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival, at_rate
from runtime.simulator.workload import Workload
from tests.simulator.nodes import config, poisson, run, setup, without_retrieval

TOKEN_S = 1e-5


def single_server(arrivals: list[Arrival]) -> Simulation:
    """Return a node whose only cost is prefill, one prompt at a time: a single-server queue."""
    made = Setup(
        config=NodeConfig(
            http=HttpSection(max_in_flight=100_000),
            prefill=PrefillSection(workers=1, slots=1, chunk_tokens=65_536),
            decode=DecodeSection(workers=1, slots=512),
            handover=HandoverSection(disaggregate="always"),
        ),
        times=replace(H100_8B, prefill_pass_s=0, prefill_token_s=TOKEN_S, prefill_pair_s=0, link_s=0, kv_token_bytes=0),
        workload=Workload(retrieval=False),
    )
    return run(made, *arrivals)


@pytest.fixture
def first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve in order of arrival, as the formulas assume; virtual deadlines would let short prompts overtake."""
    monkeypatch.setattr(job, "_VIRTUAL_DEADLINE_FACTOR", 0)


@pytest.mark.usefixtures("first_come_first_served")
def test_each_wait_follows_lindleys_recursion() -> None:
    """One server, first come, first served: a wait is the previous wait plus service minus the gap, or 0. Queueing
    theory's formulas for their mean follow from it."""
    random, at = Random(5), 0.0
    arrivals = []
    for _ in range(3000):
        at += random.expovariate(90.0)
        arrivals.append(Arrival(at, random.randint(1, 2000), 1))
    simulation = single_server(arrivals)
    free_s = 0.0
    for request in simulation.requests:
        free_s = max(free_s, request.arrival.at_s) + request.arrival.prompt_tokens * TOKEN_S
        assert request.ttft_s == pytest.approx(free_s - request.arrival.at_s, abs=1e-5)


def test_littles_law_holds_for_the_rows_of_decode_and_the_requests_of_the_node() -> None:
    simulation = Simulation(replace(setup(), sample_s=0.05), poisson(1500, 12.0))
    result = simulation.run()
    span_s = simulation.events.now_ns / 1e9
    residence_s = sum(r.end_ns - r.first_token_ns for r in simulation.requests) / 1e9
    rows = sum(decode.row_ns for decode in simulation.decodes.values()) / 1e9
    assert rows == pytest.approx(residence_s, rel=1e-9)
    sampled = sum(sample.rows for sample in result.samples) / len(result.samples)
    assert sampled == pytest.approx(residence_s / span_s, rel=0.03)


def test_littles_law_holds_for_the_waits_of_the_pool() -> None:
    simulation = Simulation(replace(setup(slot_s=1.5e-4), sample_s=0.01), poisson(600, 9.0))
    result = simulation.run()
    waited_s = sum(pool.counters.waited_ns for pool in simulation.pools) / 1e9
    sampled = sum(s.pool_prefill + s.pool_decode for s in result.samples) / len(result.samples)
    assert sampled == pytest.approx(waited_s / (simulation.events.now_ns / 1e9), rel=0.1, abs=0.02)


def test_prefills_utilisation_is_the_rate_times_the_mean_service() -> None:
    """The utilisation law; pass overheads are zero, so the service time is exact."""
    made = without_retrieval(setup())
    made = replace(made, times=replace(made.times, prefill_pass_s=0.0))
    arrivals = poisson(1000, 15.0)
    simulation = run(made, *arrivals)
    busy_s = sum(worker.busy_ns for worker in simulation.prefills.values()) / 1e9
    assert busy_s == pytest.approx(
        sum(made.times.prefill_s(0, arrival.prompt_tokens) for arrival in arrivals), rel=0.01
    )


def test_every_query_takes_its_extends_and_every_token_a_step() -> None:
    arrivals = poisson(300, 10.0)
    simulation = Simulation(setup(), arrivals)
    result = simulation.run()
    assert result.outcomes == {"finished": 300}
    tokens = sum(decode.batch.worker.tokens for decode in simulation.decodes.values())
    assert tokens == sum(arrival.output_tokens for arrival in arrivals)
    probes = sum((arrival.output_tokens - 1) // 32 for arrival in arrivals)
    assert result.use["probes"] == probes
    assert result.use["queries"] == probes + len(arrivals)
    assert sum(worker.tokens for worker in simulation.prefills.values()) == sum(a.prompt_tokens for a in arrivals)


def test_queues_drain_below_capacity_and_grow_above_it() -> None:
    arrivals = poisson(400, 1.0)
    made = setup(slot_s=1e-3)
    most = capacity(made, arrivals)
    assert max(demands(made, arrivals), key=lambda name: demands(made, arrivals)[name]) == "pool"
    below, above = (simulate(made, at_rate(arrivals, most * load)) for load in (0.7, 1.5))
    assert below.ttft_s.p99 < 2.0
    assert above.ttft_s.p99 > 3 * below.ttft_s.p99
    assert above.use["pool"] > 0.9


def test_sharing_a_gpu_slows_both_sides() -> None:
    arrivals = poisson(400, 10.0)
    own, prefill, decode, coupled = (
        simulate(setup(slot_s=2e-5, node=config(placement=placement)), arrivals) for placement in PLACEMENTS[:4]
    )
    assert prefill.use["prefill"] > own.use["prefill"]
    assert decode.tpot_s.p50 > own.tpot_s.p50
    assert coupled.tpot_s.p50 > own.tpot_s.p50
