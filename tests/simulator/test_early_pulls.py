"""Tests of when decode has a prompt's KV and blocks: early pulls."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.node.config import HandoverSection, NodeConfig
from runtime.node.worker_config import DecodeSection, PrefillSection
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload
from tests.simulator.nodes import poisson, run

MS = 1_000_000
TIMES = replace(
    H100_8B, prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0,  # 1 ms per token, and .1 ms to copy it
    decode_step_s=3e-3, decode_row_s=0.0, decode_context_s=0.0, kv_token_bytes=1e3, link_bytes_s=1e7, link_s=0.0,
)  # fmt: skip


def setup(*, device: str = "cuda:0", slots: int = 4, kv_blocks: int = 0) -> Setup:
    """Return a setup with passes of 100 tokens."""
    config = NodeConfig(
        prefill=PrefillSection(chunk_tokens=100),
        decode=DecodeSection(devices=(device,), slots=slots, kv_blocks=kv_blocks),
        handover=HandoverSection(disaggregate="always"),
    )
    return Setup(config=config, times=TIMES, workload=Workload(retrieval=False))


def handed_over_ns(made: Setup, *arrivals: Arrival) -> list[int]:
    return [one.first_token_ns - one.prefilled_ns for one in run(made, *arrivals).requests]


def test_after_several_passes_only_the_last_ones_kv_remains_to_be_pulled() -> None:
    for device in ("cuda:0", "cpu"):
        assert handed_over_ns(setup(device=device), Arrival(0.0, 100, 1)) == [10 * MS]
        assert handed_over_ns(setup(device=device), Arrival(0.0, 350, 1)) == [5 * MS]


def test_during_a_running_batch_a_cpu_pulls_in_slices_while_the_rest_is_computed() -> None:
    """A thirtieth of a step of 3 ms is 100 µs, the time to copy a token's KV; a pass of 100 ms spans 32 steps."""
    running, other = run(setup(device="cpu"), Arrival(0.0, 10, 400), Arrival(0.1, 200, 1)).requests
    assert 15 * MS < other.first_token_ns - other.prefilled_ns < 20 * MS * 30
    alone = run(setup(device="cpu"), Arrival(0.0, 10, 400)).requests[0]
    longer_ns = (running.end_ns - running.first_token_ns) - (alone.end_ns - alone.first_token_ns)
    assert longer_ns == 20 * MS, "its loop copied all 200 tokens"


@settings(max_examples=30, deadline=None)
@given(
    device=st.sampled_from(["cpu", "cuda:0"]),
    kv_blocks=st.sampled_from([0, 60]),
    rate=st.floats(1, 30),
    timeout_s=st.sampled_from([1.5, 600.0]),
)
@example(device="cpu", kv_blocks=60, rate=29.0, timeout_s=600.0)  # it was blocked
def test_every_request_ends_once_and_no_early_pull_remains(
    device: str, kv_blocks: int, rate: float, timeout_s: float
) -> None:
    made = setup(device=device, kv_blocks=kv_blocks)
    made = replace(made, config=replace(made.config, http=replace(made.config.http, request_timeout_s=timeout_s)))
    simulation = Simulation(made, poisson(30, rate, prompt=250, output=40))
    assert sum(simulation.run().outcomes.values()) == 30
    simulation.drain()
    for prefill in simulation.prefills.values():
        assert prefill.free == prefill.slots
    for decode in simulation.decodes.values():
        assert decode.free == decode.slots
        assert not decode.early
        assert decode.kv is None or decode.kv.available == kv_blocks
