"""Tests of prefix hits of simulated workers on traces with block hashes."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.node.config import Disaggregate
from runtime.simulator.node import Simulation, simulate
from runtime.simulator.setup import Setup
from runtime.simulator.stages.decode import SimDecode
from runtime.simulator.stages.prefill import SimPrefill
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import BLOCK, arrival, config, run, setup, without_retrieval

MS = 1_000_000
TIMES = replace(
    H100_8B, prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0,  # 1 ms per token
    decode_step_s=3e-3, decode_row_s=0.0, decode_context_s=0.0, kv_token_bytes=1.0, link_bytes_s=1e6, link_s=0.0,
)  # fmt: skip


def alone(*, disaggregate: Disaggregate = "always", kv_blocks: int = 0, slots: int = 4) -> Setup:
    """Return a node with one worker per role and no retrieval; `kv_blocks` of prefill."""
    node = config(decode=1, disaggregate=disaggregate)
    node = replace(node, prefill=replace(node.prefill, kv_blocks=kv_blocks, slots=slots))
    return replace(without_retrieval(setup(node=node)), times=TIMES)


def test_prefill_computes_and_decode_pulls_only_missing_blocks() -> None:
    first, second = run(alone(), arrival(0.0, 90, 1, 2, 3), arrival(1.0, 80, 1, 2, 9)).requests
    assert (first.found_tokens, second.found_tokens) == (0, 64)
    assert first.prefilled_ns - first.begun_ns == 90 * MS
    assert second.prefilled_ns - second.begun_ns == 16 * MS
    assert second.first_token_ns - second.prefilled_ns == 16_000, "1 µs per token"


def test_a_block_is_shared_once_it_is_full_and_the_last_token_of_a_prompt_is_computed() -> None:
    one, again, longer = run(
        alone(), arrival(0.0, 64, 1, 2), arrival(1.0, 64, 1, 2), arrival(2.0, 70, 1, 2, 3)
    ).requests
    assert [request.found_tokens for request in (one, again, longer)] == [0, 32, 64]
    assert again.prefilled_ns - again.begun_ns == 32 * MS


def test_the_least_recently_used_blocks_are_evicted_and_the_router_is_informed() -> None:
    made = alone(kv_blocks=6)
    visits = arrival(0.0, 96, 1, 2, 3), arrival(1.0, 96, 4, 5, 6), arrival(2.0, 90, 7, 8, 9), arrival(3.0, 96, 1, 2, 3)
    simulation = Simulation(made, visits)
    simulation.run()
    assert [request.found_tokens for request in simulation.requests] == [0, 0, 0, 0]
    (prefill,) = (worker for worker in simulation.router.workers() if worker.hello.role == "prefill")
    assert prefill.overlap((1, 2, 3)) == 1.0, "it arrived again after that"
    roomy = run(alone(kv_blocks=9), *visits).requests
    assert [request.found_tokens for request in roomy] == [0, 0, 0, 64]


def talks(count: int, rate: float, seed: int = 2) -> list[Arrival]:
    """Return turns of conversations, each preceded by all earlier turns."""
    random, at_s, found = Random(seed), 0.0, []
    known: dict[int, list[int]] = {}
    for number in range(count):
        at_s += random.expovariate(rate)
        turn = known.setdefault(random.randrange(8), [])
        turn += [number * 8 + i for i in range(random.randint(1, 6))]
        tokens = len(turn) * BLOCK - random.randrange(BLOCK)
        found.append(arrival(at_s, tokens, *turn, output=random.randint(1, 60)))
        if len(turn) > 40:
            turn.clear()
    return found


@settings(max_examples=25)
@given(
    disaggregate=st.sampled_from(["always", "auto", "never"]),
    rate=st.floats(0.5, 60),
    timeout_s=st.sampled_from([0.3, 600.0]),
    kv_blocks=st.sampled_from([0, 64, 4000]),
    decode_blocks=st.sampled_from([0, 64, 150]),
)
def test_every_request_ends_once_and_all_blocks_are_freed(
    disaggregate: Disaggregate, rate: float, timeout_s: float, kv_blocks: int, decode_blocks: int
) -> None:
    made = alone(disaggregate=disaggregate, kv_blocks=kv_blocks)
    http = replace(made.config.http, request_timeout_s=timeout_s)
    decode = replace(made.config.decode, kv_blocks=decode_blocks)
    made = replace(made, config=replace(made.config, http=http, decode=decode))
    simulation = Simulation(made, talks(40, rate))
    result = simulation.run()
    assert sum(result.outcomes.values()) == 40
    simulation.events.run()
    workers: list[SimPrefill | SimDecode] = [*simulation.prefills.values(), *simulation.decodes.values()]
    for worker in workers:
        assert worker.free == worker.slots
        assert worker.prompts is not None
        assert worker.prompts.available == worker.prompts.blocks


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_load_balancing_without_prefixes_has_fewer_hits_among_several_workers(disaggregate: Disaggregate) -> None:
    node = config(prefill=4, decode=4, disaggregate=disaggregate)
    found = {}
    for weight in (0.0, 1.0):
        http = replace(node.http, overlap_weight=weight)
        made = replace(without_retrieval(setup(node=replace(node, http=http))), times=TIMES)
        found[weight] = simulate(made, talks(200, 1.0)).use["prefix_hits"]
    assert found[0.0] < 0.8 * found[1.0]
