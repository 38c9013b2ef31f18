"""Tests of conditional disaggregation on the simulated node: prompts that decode computes take time of its steps."""

from random import Random

import pytest

from runtime.node.config import Disaggregate, HandoverSection, HttpSection, NodeConfig
from runtime.node.worker_config import DecodeSection, PrefillSection
from runtime.simulator.node import simulate
from runtime.simulator.result import Result
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos, Workload
from tests.simulator.nodes import EXACT, MS, run


def ran(*arrivals: Arrival) -> list[SimRequest]:
    """Run requests whose prompts decode computes, 16 tokens per step."""
    config = NodeConfig(decode=DecodeSection(chunk_tokens=16), handover=HandoverSection(disaggregate="never"))
    return run(Setup(config=config, times=EXACT, workload=Workload(retrieval=False)), *arrivals).requests


def test_a_prompt_computed_by_decode_gets_its_first_token_from_its_last_step() -> None:
    (one,) = ran(Arrival(0.0, 10, 4))
    assert one.first_token_ns == 13 * MS
    assert one.end_ns == 13 * MS + 3 * 3 * MS


def test_without_other_rows_each_chunk_is_its_own_pass() -> None:
    (one,) = ran(Arrival(0.0, 40, 1))  # chunks of 16, 16 and 8
    assert one.first_token_ns == 40 * MS + 3 * 3 * MS


def test_with_other_rows_each_chunk_of_a_prompt_is_part_of_a_step() -> None:
    running, other = ran(Arrival(0.0, 10, 20), Arrival(0.0145, 40, 1))
    begin = 16 * MS  # from the step after the current one: the first token was ready at 13 ms
    assert other.first_token_ns == begin + 40 * MS + 3 * 3 * MS
    assert running.end_ns == 13 * MS + 19 * 3 * MS + 40 * MS


def test_a_prompt_within_six_times_a_longer_ones_time_runs_before_its_remaining_chunks() -> None:
    config = NodeConfig(prefill=PrefillSection(chunk_tokens=16), handover=HandoverSection(disaggregate="always"))
    arrivals = [Arrival(0.0, 16, 1), Arrival(0.1, 160, 1), Arrival(0.14, 16, 1)]
    made = Setup(config=config, times=EXACT, workload=Workload(retrieval=False))
    _, long, short = run(made, *arrivals).requests
    assert short.prefilled_ns == (148 + 16) * MS, "the current pass ends at 148 ms"
    assert long.prefilled_ns == (100 + 160 + 16) * MS


def served(disaggregate: Disaggregate, prefill: int, decode: int) -> Result:
    """Run eight GPUs with chats, a tenth of which include a document of 8,000 tokens."""
    random, at_s, arrivals = Random(1), 0.0, []
    for _ in range(1200):
        prompt = 8000 if random.random() < 0.1 else random.randint(50, 900)
        arrivals.append(Arrival(at_s, prompt, random.randint(50, 350)))
        at_s += random.expovariate(60.0)
    config = NodeConfig(
        http=HttpSection(max_in_flight=10_000),
        prefill=PrefillSection(workers=prefill, slots=8),
        decode=DecodeSection(workers=decode, slots=64, devices=("cuda:0",)),
        handover=HandoverSection(disaggregate=disaggregate),
    )
    setup = Setup(config=config, times=H100_8B, workload=Workload(retrieval=False), slos=Slos(ttft_s=0.5, tpot_s=0.025))
    return simulate(setup, arrivals)


def test_conditional_disaggregation_meets_more_objectives_than_none_with_as_many_gpus() -> None:
    chooses, apart, colocated = served("auto", 2, 6), served("always", 2, 6), served("never", 1, 8)
    assert chooses.attainment > 0.9
    assert chooses.attainment > colocated.attainment > apart.attainment
    assert 0 < chooses.use["by_decode"] < chooses.sent
    assert chooses.tpot_s.p99 < colocated.tpot_s.p99
    assert colocated.use["by_decode"] == pytest.approx(colocated.sent)
