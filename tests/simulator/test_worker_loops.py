"""What the simulated workers' loops see when: between two passes, or two steps, as the real ones do."""

import pytest
from msgspec.structs import replace

from runtime.node.config import DecodeSection, HandoverSection, NodeConfig, PrefillSection
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

MS = 1_000_000
TIMES = ServiceTimes(
    prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0,  # a token takes 1 ms
    decode_step_s=3e-3, decode_row_s=0.0, decode_context_s=0.0,
    kv_token_bytes=0.0, link_s=0.0, embed_s=1e-3, ring_s=0.0, extend_s=1e-6, extend_slot_s=0.0,
)  # fmt: skip


def node(times: ServiceTimes, *arrivals: Arrival, devices: tuple[str, ...] = ("cpu",), every: int = 0) -> Simulation:
    """After its run. Chunks of 100 tokens; retrieval, with a probe `every` so many tokens."""
    config = NodeConfig(
        prefill=PrefillSection(chunk_tokens=100), decode=DecodeSection(devices=devices), handover=HandoverSection()
    )
    workload = Workload(probe_every_tokens=every, probe_hit=0.0)
    simulation = Simulation(Setup(config=config, times=times, workload=workload), arrivals)
    simulation.run()
    return simulation


def ran(times: ServiceTimes, *arrivals: Arrival, devices: tuple[str, ...] = ("cpu",)) -> list[SimRequest]:
    return node(times, *arrivals, devices=devices).requests


def test_what_comes_during_a_pass_is_taken_up_after_it_its_vector_after_the_next_and_its_passages_after_that() -> None:
    long, other = ran(TIMES, Arrival(0.0, 400, 1), Arrival(0.050, 10, 1))
    passes = [long.begun_ns + 100 * MS * number for number in range(5)]
    assert long.begun_ns == long.searched_ns
    assert other.taken_ns == passes[1]
    assert other.embedded_ns == passes[1] + MS  # by a thread of its own, while the next pass runs
    assert other.searched_ns == passes[3]  # asked after that pass, and answered during the one behind it


def test_nothing_is_waited_for_by_a_worker_that_has_nothing_to_do() -> None:
    (one,) = ran(TIMES, Arrival(0.5, 10, 1))
    assert one.taken_ns == one.received_ns == 500 * MS
    assert one.embedded_ns == one.taken_ns + MS
    assert one.searched_ns - one.embedded_ns < MS


def test_passages_and_prompt_take_the_loops_time_so_that_the_next_pass_begins_later() -> None:
    (plain,) = ran(TIMES, Arrival(0.0, 10, 1))
    (slower,) = ran(replace(TIMES, prompt_s=2e-3), Arrival(0.0, 10, 1))
    assert slower.begun_ns - plain.begun_ns == slower.prefilled_ns - plain.prefilled_ns == 2 * MS


def test_the_frontend_comes_before_the_worker_and_the_link_before_the_hand_over() -> None:
    (one,) = ran(replace(TIMES, frontend_s=4e-3, link_s=5e-3), Arrival(0.0, 10, 1))
    assert one.taken_ns - one.received_ns == 4 * MS
    assert one.first_token_ns - one.prefilled_ns == 5 * MS


def test_chunks_behind_others_take_what_they_were_measured_to_take_more() -> None:
    first, both = (ran(replace(TIMES, prefill_behind_s=1e-3), Arrival(0.0, tokens, 1))[0] for tokens in (100, 130))
    assert first.prefilled_ns - first.begun_ns == 100 * MS
    assert both.prefilled_ns - both.begun_ns == 160 * MS


def test_a_text_that_is_embedded_on_the_core_of_a_pass_makes_it_longer() -> None:
    arrivals = Arrival(0.0, 400, 1), Arrival(0.050, 10, 1)
    apart, shared = (ran(replace(TIMES, embed_core_s=core_s), *arrivals)[0] for core_s in (0.0, 1e-3))
    assert shared.begun_ns == apart.begun_ns  # its own text: no pass was under way
    assert shared.prefilled_ns - apart.prefilled_ns == MS


def test_a_request_that_comes_takes_its_frontends_time_of_decodes_core_if_a_step_is_under_way() -> None:
    arrivals = Arrival(0.0, 10, 40), Arrival(0.060, 10, 1), Arrival(5.0, 10, 1)
    alone, held_up = (ran(replace(TIMES, request_core_s=core_s), *arrivals) for core_s in (0.0, 2e-3))
    assert held_up[0].end_ns - alone[0].end_ns == 2 * MS, "of the second's: nothing ran when the others came"
    assert held_up[2].end_ns == alone[2].end_ns


# ---- beside each other


def test_a_pass_takes_longer_while_decode_is_at_work_and_no_longer_otherwise() -> None:
    running, other = ran(replace(TIMES, prefill_beside=1.5), Arrival(0.0, 10, 40), Arrival(0.030, 10, 1))
    assert running.prefilled_ns - running.begun_ns == 10 * MS
    assert other.prefilled_ns - other.begun_ns == 15 * MS


def test_steps_take_longer_from_the_next_on_while_a_pass_is_under_way() -> None:
    running, other = ran(replace(TIMES, decode_beside=2.0), Arrival(0.0, 10, 40), Arrival(0.030, 30, 1))
    assert other.prefilled_ns - other.begun_ns == 30 * MS
    assert running.end_ns - running.first_token_ns == (34 + 2 * 5) * 3 * MS  # five steps begin beside the pass


# ---- decode

COPIED = replace(TIMES, prefill_token_s=0.0, kv_token_bytes=1.0, link_bytes_s=10 / 250e-6)  # 10 tokens: 250 µs


def test_kv_is_copied_at_once_where_no_row_runs() -> None:
    (one,) = ran(COPIED, Arrival(0.0, 10, 1))
    assert one.first_token_ns - one.prefilled_ns == 250_000


def test_beside_a_running_batch_a_step_is_not_held_up_for_longer_than_a_thirtieth_and_kv_comes_in_slices() -> None:
    running, other = ran(COPIED, Arrival(0.0, 10, 40), Arrival(0.0305, 10, 1))
    step_ns, slice_ns = 3 * MS, 100_000
    after = other.prefilled_ns - running.first_token_ns
    boundary = running.first_token_ns + -(-after // step_ns) * step_ns
    assert other.first_token_ns == boundary + 2 * (step_ns + slice_ns)  # two slices, and the rest with the third
    assert running.end_ns - running.first_token_ns == 39 * step_ns + 250_000


def test_on_a_gpu_kv_is_copied_beside_the_steps_and_its_row_joins_with_the_next() -> None:
    running, other = ran(COPIED, Arrival(0.0, 10, 40), Arrival(0.0305, 10, 1), devices=("cuda:0",))
    step_ns = 3 * MS
    after = other.prefilled_ns - running.first_token_ns
    boundary = running.first_token_ns + -(-after // step_ns) * step_ns
    assert other.first_token_ns == boundary + step_ns
    assert running.end_ns - running.first_token_ns == 39 * step_ns


@pytest.mark.parametrize(("others", "steps"), [(0, 0), (1, 2)])
def test_a_probe_is_asked_between_steps_and_its_answer_seen_between_steps(others: int, steps: int) -> None:
    """Alone it stalls for its embedding; beside a running row until the first steps after that and after its answer."""
    times = replace(TIMES, prefill_token_s=0.0)
    arrivals = [Arrival(0.0, 10, 200), Arrival(0.001, 10, 12)][1 - others :]
    simulation = node(times, *arrivals, every=10)
    probing = simulation.requests[-1]
    stalled_ns = probing.stalled_ns
    if steps:
        assert stalled_ns == pytest.approx(steps * 3 * MS, rel=0.02)
    else:
        assert stalled_ns == pytest.approx(MS, rel=0.1)


def test_a_probe_takes_decodes_loop_before_the_next_step() -> None:
    times = replace(TIMES, prefill_token_s=0.0)
    free, costly = (node(replace(times, probe_s=cost_s), Arrival(0.0, 10, 12), every=10) for cost_s in (0.0, 2e-3))
    assert costly.requests[0].end_ns - free.requests[0].end_ns == 2 * MS


def test_what_a_probes_row_waits_for_by_itself_holds_up_no_other() -> None:
    times = replace(TIMES, prefill_token_s=0.0)
    arrivals = Arrival(0.0, 10, 200), Arrival(0.001, 10, 12)
    free, waits = (node(replace(times, probe_wait_s=wait_s), *arrivals, every=100) for wait_s in (0.0, 8e-3))
    assert waits.requests[1].end_ns == free.requests[1].end_ns
    assert waits.requests[0].stalled_ns - free.requests[0].stalled_ns == 8 * MS
