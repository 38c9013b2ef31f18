"""Tests of a simulated decode worker with KV block accounting: rows are preempted, and every request ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.node.config import NodeConfig
from runtime.simulator.node import Simulation, simulate
from runtime.simulator.setup import Setup
from tests.simulator.nodes import config, poisson, setup, without_retrieval


def counting(kv_blocks: int, *, slots: int = 8, decode: int = 2) -> Setup:
    node: NodeConfig = config(slots=slots, decode=decode)
    return setup(node=replace(node, decode=replace(node.decode, kv_blocks=kv_blocks)))


@settings(max_examples=20)
@given(
    blocks=st.integers(30, 120),
    rate=st.floats(1, 100),
    timeout_s=st.sampled_from([0.5, 600.0]),
    every=st.sampled_from([0, 1, 32]),
)
def test_every_request_ends_once_and_all_blocks_are_freed(
    blocks: int, rate: float, timeout_s: float, every: int
) -> None:
    made = counting(blocks)
    http = replace(made.config.http, request_timeout_s=timeout_s)
    made = replace(
        made,
        config=replace(made.config, http=http),
        workload=replace(made.workload, probe_every_tokens=every, probe_hit=0.5),
    )
    simulation = Simulation(made, poisson(40, rate))
    result = simulation.run()
    assert sum(result.outcomes.values()) == 40
    simulation.drain()
    for decode in simulation.decodes.values():
        assert decode.free == decode.slots
        assert decode.kv is not None
        assert decode.kv.available == blocks
        assert list(decode.kv) == []


def test_with_enough_blocks_nothing_is_preempted_and_the_run_equals_one_without_accounting() -> None:
    arrivals = poisson(200, 12.0)
    free = simulate(without_retrieval(setup(node=config(slots=8))), arrivals)
    counted = simulate(without_retrieval(counting(100_000)), arrivals)
    assert counted.use["preemptions"] == 0
    assert counted.tpot_s.p50 == pytest.approx(free.tpot_s.p50, rel=0.02)
    assert counted.ttft_s.p50 == pytest.approx(free.ttft_s.p50, rel=0.02)


def test_when_blocks_run_out_rows_are_preempted_and_answers_complete_later() -> None:
    arrivals = poisson(200, 12.0, output=400)
    ample, short = (simulate(without_retrieval(counting(blocks)), arrivals) for blocks in (100_000, 60))
    assert short.use["preemptions"] > 0
    assert short.outcomes == {"finished": 200}
    assert short.ttft_s.p50 + short.tpot_s.p50 > ample.ttft_s.p50 + ample.tpot_s.p50
    simulation = Simulation(without_retrieval(counting(60)), arrivals)
    simulation.run()
    assert sum(decode.batch.tokens for decode in simulation.decodes.values()) == sum(a.output_tokens for a in arrivals)
