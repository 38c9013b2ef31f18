"""Tests of a simulated decode worker with few KV blocks: its rows wait for them, and every request ends."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.simulator.node import Simulation, simulate
from runtime.simulator.setup import Setup
from tests.simulator.nodes import config, poisson, setup, without_retrieval


def counting(kv_blocks: int) -> Setup:
    node = config(slots=8)
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
    workload = replace(made.workload, probe_every_tokens=every, probe_hit=0.5)
    simulation = Simulation(replace(made, config=replace(made.config, http=http), workload=workload), poisson(40, rate))
    assert sum(simulation.run().outcomes.values()) == 40
    simulation.events.run()
    for decode in simulation.decodes.values():
        assert (decode.free, decode.free_blocks) == (decode.slots, blocks)


def test_with_enough_blocks_a_run_equals_one_without_counting() -> None:
    arrivals = poisson(200, 12.0)
    free, counted = (simulate(without_retrieval(counting(blocks)), arrivals) for blocks in (0, 100_000))
    assert counted.ttft_s == free.ttft_s
    assert counted.tpot_s == free.tpot_s


def test_when_blocks_run_out_rows_wait_for_them() -> None:
    arrivals = poisson(200, 12.0, output=400)
    ample, short = (simulate(without_retrieval(counting(blocks)), arrivals) for blocks in (100_000, 60))
    assert short.outcomes == {"finished": 200}
    assert short.ttft_s.p50 > 1.5 * ample.ttft_s.p50
    assert short.use["decode_slots"] < ample.use["decode_slots"]
