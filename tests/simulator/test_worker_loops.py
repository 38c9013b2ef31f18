"""Tests of when simulated workers receive messages: between passes or steps, as the real loops do."""

import pytest
from msgspec.structs import replace

from runtime.node.config import HandoverSection, NodeConfig
from runtime.node.worker_config import DecodeSection, PrefillSection
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload
from tests.simulator.nodes import EXACT, MS, run

TIMES = replace(EXACT, embed_s=1e-3, ring_s=0.0, extend_s=1e-6, extend_slot_s=0.0)


def node(times: ServiceTimes, *arrivals: Arrival, devices: tuple[str, ...] = ("cpu",), every: int = 0) -> Simulation:
    """Run a node. Chunks of 100 tokens; retrieval with a probe every `every` tokens."""
    config = NodeConfig(
        prefill=PrefillSection(chunk_tokens=100), decode=DecodeSection(devices=devices), handover=HandoverSection()
    )
    workload = Workload(probe_every_tokens=every, probe_hit=0.0)
    return run(Setup(config=config, times=times, workload=workload), *arrivals)


def ran(times: ServiceTimes, *arrivals: Arrival, devices: tuple[str, ...] = ("cpu",)) -> list[SimRequest]:
    return node(times, *arrivals, devices=devices).requests


def test_a_request_its_vector_and_its_passages_are_each_received_after_a_pass() -> None:
    long, other = ran(TIMES, Arrival(0.0, 400, 1), Arrival(0.050, 10, 1))
    passes = [long.begun_ns + 100 * MS * number for number in range(5)]
    assert long.begun_ns == long.searched_ns
    assert other.taken_ns == passes[1]
    assert other.embedded_ns == passes[1] + MS  # in a separate thread while the next pass runs
    assert other.searched_ns == passes[3]  # submitted after that pass and answered during the next one


def test_an_idle_worker_receives_messages_at_once() -> None:
    (one,) = ran(TIMES, Arrival(0.5, 10, 1))
    assert one.taken_ns == one.received_ns == 500 * MS
    assert one.embedded_ns == one.taken_ns + MS
    assert one.searched_ns - one.embedded_ns < MS


def test_the_links_time_precedes_the_hand_over() -> None:
    (one,) = ran(replace(TIMES, link_s=5e-3), Arrival(0.0, 10, 1))
    assert one.first_token_ns - one.prefilled_ns == 5 * MS


def test_later_chunks_take_their_measured_extra_time() -> None:
    first, both = (ran(replace(TIMES, prefill_behind_s=1e-3), Arrival(0.0, tokens, 1))[0] for tokens in (100, 130))
    assert first.prefilled_ns - first.begun_ns == 100 * MS
    assert both.prefilled_ns - both.begun_ns == 160 * MS


# ---- decode

COPIED = replace(TIMES, prefill_token_s=0.0, kv_token_bytes=1.0, link_bytes_s=10 / 250e-6)  # 10 tokens: 250 µs


def test_kv_is_copied_at_once_if_no_row_runs() -> None:
    (one,) = ran(COPIED, Arrival(0.0, 10, 1))
    assert one.first_token_ns - one.prefilled_ns == 250_000


def test_after_several_passes_only_the_last_ones_kv_remains_to_be_pulled() -> None:
    times = replace(TIMES, kv_token_bytes=1e3, link_bytes_s=1e7)  # .1 ms per token
    for device in ("cuda:0", "cpu"):
        for tokens, last in ((100, 100), (350, 50)):
            (one,) = ran(times, Arrival(0.0, tokens, 1), devices=(device,))
            assert one.first_token_ns - one.prefilled_ns == last * MS / 10


def test_during_a_running_batch_kv_is_pulled_in_slices_of_a_thirtieth_of_a_step() -> None:
    running, other = ran(COPIED, Arrival(0.0, 10, 40), Arrival(0.0305, 10, 1))
    step_ns, slice_ns = 3 * MS, 100_000
    after = other.prefilled_ns - running.first_token_ns
    boundary = running.first_token_ns + -(-after // step_ns) * step_ns
    assert other.first_token_ns == boundary + 2 * (step_ns + slice_ns)  # two slices, the rest with the third
    assert running.end_ns - running.first_token_ns == 39 * step_ns + 250_000


def test_on_a_gpu_kv_is_copied_during_steps_and_its_row_joins_the_next() -> None:
    running, other = ran(COPIED, Arrival(0.0, 10, 40), Arrival(0.0305, 10, 1), devices=("cuda:0",))
    step_ns = 3 * MS
    after = other.prefilled_ns - running.first_token_ns
    boundary = running.first_token_ns + -(-after // step_ns) * step_ns
    assert other.first_token_ns == boundary + step_ns
    assert running.end_ns - running.first_token_ns == 39 * step_ns


@pytest.mark.parametrize(("others", "steps"), [(0, 0), (1, 2)])
def test_probes_are_sent_and_their_answers_received_between_steps(others: int, steps: int) -> None:
    """Alone it stalls for its embedding; with a running row, until the first steps after embedding and answer."""
    times = replace(TIMES, prefill_token_s=0.0)
    arrivals = [Arrival(0.0, 10, 200), Arrival(0.001, 10, 12)][1 - others :]
    simulation = node(times, *arrivals, every=10)
    probing = simulation.requests[-1]
    stalled_ns = probing.stalled_ns
    if steps:
        assert stalled_ns == pytest.approx(steps * 3 * MS, rel=0.02)
    else:
        assert stalled_ns == pytest.approx(MS, rel=0.1)
