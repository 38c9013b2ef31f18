"""What simulated workers find again of prompts, where the trace says which blocks they share."""

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
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import config, setup, without_retrieval

MS = 1_000_000
BLOCK = 32
TIMES = ServiceTimes(
    prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0,  # a token takes 1 ms
    decode_step_s=3e-3, decode_row_s=0.0, decode_context_s=0.0, kv_token_bytes=1.0, link_bytes_s=1e6, link_s=0.0,
)  # fmt: skip


def alone(*, disaggregate: Disaggregate = "always", kv_blocks: int = 0, slots: int = 4) -> Setup:
    """A node of a worker of each role that retrieves nothing and has no KV tiers; `kv_blocks` of prefill."""
    node = config(decode=1, disaggregate=disaggregate)
    node = replace(node, prefill=replace(node.prefill, kv_blocks=kv_blocks, slots=slots))
    return replace(without_retrieval(setup(node=node)), times=TIMES)


def asked(at_s: float, tokens: int, *prefix: int, output: int = 1) -> Arrival:
    return Arrival(at_s, tokens, output, prefix, BLOCK)


def ran(made: Setup, *arrivals: Arrival) -> list[SimRequest]:
    simulation = Simulation(made, arrivals)
    simulation.run()
    return simulation.requests


def test_prefill_computes_what_it_has_not_and_decode_pulls_what_it_has_not() -> None:
    first, second = ran(alone(), asked(0.0, 90, 1, 2, 3), asked(1.0, 80, 1, 2, 9))
    assert (first.found_tokens, second.found_tokens) == (0, 64)
    assert first.prefilled_ns - first.begun_ns == 90 * MS
    assert second.prefilled_ns - second.begun_ns == 16 * MS
    assert second.first_token_ns - second.prefilled_ns == 16_000, "1 µs a token"


def test_where_decode_computes_prompts_it_finds_what_it_has() -> None:
    first, second = ran(alone(disaggregate="never"), asked(0.0, 90, 1, 2, 3), asked(1.0, 80, 1, 2, 9))
    assert (first.found_tokens, second.found_tokens) == (0, 64)
    took = [request.first_token_ns - request.received_ns for request in (first, second)]
    assert took[0] - took[1] == 74 * MS


def test_a_block_is_shared_once_it_is_full_and_the_last_token_of_a_prompt_is_computed() -> None:
    one, again, longer = ran(alone(), asked(0.0, 64, 1, 2), asked(1.0, 64, 1, 2), asked(2.0, 70, 1, 2, 3))
    assert [request.found_tokens for request in (one, again, longer)] == [0, 32, 64]
    assert again.prefilled_ns - again.begun_ns == 32 * MS


def test_what_is_computed_of_a_prompt_is_found_before_the_rest_of_it_is() -> None:
    """In passes of 512 tokens: the second prompt comes while the first one's third is under way."""
    long = asked(0.0, 1600, *range(50))
    _, other = ran(alone(), long, asked(1.1, 512, *range(16)))
    assert other.found_tokens == 512 - BLOCK


def test_the_longest_unused_blocks_make_room_and_the_router_hears_of_it() -> None:
    made = alone(kv_blocks=6)
    visits = asked(0.0, 96, 1, 2, 3), asked(1.0, 96, 4, 5, 6), asked(2.0, 90, 7, 8, 9), asked(3.0, 96, 1, 2, 3)
    simulation = Simulation(made, visits)
    simulation.run()
    assert [request.found_tokens for request in simulation.requests] == [0, 0, 0, 0]
    (prefill,) = (worker for worker in simulation.router.workers() if worker.hello.role == "prefill")
    assert prefill.reported.evicted_ns == simulation.requests[1].received_ns
    assert prefill.overlap((1, 2, 3)) == 1.0, "it came again after that"
    roomy = ran(alone(kv_blocks=9), *visits)
    assert [request.found_tokens for request in roomy] == [0, 0, 0, 64]


def test_a_prompt_waits_for_blocks_as_for_a_slot() -> None:
    one, other = ran(alone(kv_blocks=4), asked(0.0, 96, 1, 2, 3), asked(0.01, 64, 4, 5))
    assert other.begun_ns >= one.first_token_ns
    one, other = ran(alone(kv_blocks=5), asked(0.0, 96, 1, 2, 3), asked(0.01, 64, 4, 5))
    assert other.begun_ns < one.first_token_ns


def test_without_blocks_in_the_trace_nothing_is_found() -> None:
    for one in ran(alone(), Arrival(0.0, 90, 1, (1, 2, 3)), Arrival(1.0, 90, 1, (1, 2, 3))):
        assert one.prefilled_ns - one.begun_ns == 90 * MS


def talks(count: int, rate: float, seed: int = 2) -> list[Arrival]:
    """Turns of conversations, each behind all turns before."""
    random, at_s, found = Random(seed), 0.0, []
    known: dict[int, list[int]] = {}
    for number in range(count):
        at_s += random.expovariate(rate)
        turn = known.setdefault(random.randrange(8), [])
        turn += [number * 8 + i for i in range(random.randint(1, 6))]
        tokens = len(turn) * BLOCK - random.randrange(BLOCK)
        found.append(asked(at_s, tokens, *turn, output=random.randint(1, 60)))
        if len(turn) > 40:
            turn.clear()
    return found


@settings(max_examples=25)
@given(
    disaggregate=st.sampled_from(["always", "auto", "never"]),
    rate=st.floats(0.5, 60),
    timeout_s=st.sampled_from([0.3, 600.0]),
    kv_blocks=st.sampled_from([0, 64, 4000]),
    rows_blocks=st.sampled_from([0, 64, 150]),
)
def test_every_request_ends_once_and_no_block_stays_held(
    disaggregate: Disaggregate, rate: float, timeout_s: float, kv_blocks: int, rows_blocks: int
) -> None:
    made = alone(disaggregate=disaggregate, kv_blocks=kv_blocks)
    http = replace(made.config.http, request_timeout_s=timeout_s)
    decode = replace(made.config.decode, kv_blocks=rows_blocks)
    made = replace(made, config=replace(made.config, http=http, decode=decode))
    simulation = Simulation(made, talks(40, rate))
    result = simulation.run()
    assert sum(result.outcomes.values()) == 40
    simulation.drain()
    workers: list[SimPrefill | SimDecode] = [*simulation.prefills.values(), *simulation.decodes.values()]
    for worker in workers:
        assert worker.free == worker.slots
        assert worker.prompts is not None
        assert worker.prompts.available == worker.prompts.blocks


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_a_router_that_goes_by_load_alone_finds_less_again_among_several_workers(disaggregate: Disaggregate) -> None:
    node = config(prefill=4, decode=4, disaggregate=disaggregate)
    found = {}
    for weight in (0.0, 1.0):
        http = replace(node.http, overlap_weight=weight)
        made = replace(without_retrieval(setup(node=replace(node, http=http))), times=TIMES)
        found[weight] = simulate(made, talks(200, 1.0)).use["prefix_hits"]
    assert found[0.0] < 0.8 * found[1.0]
