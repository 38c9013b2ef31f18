"""Tests of prefix hits of simulated workers on traces with block hashes, and of what the router knows of them."""

import dataclasses

import pytest
from msgspec.structs import replace

from runtime.node.config import Disaggregate
from runtime.simulator.node import simulate
from runtime.simulator.setup import Setup
from tests.simulator.nodes import EXACT, MS, arrival, config, run, setup, talks, without_retrieval

TIMES = replace(EXACT, kv_token_bytes=1.0, link_bytes_s=1e6)


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
    simulation = run(made, *visits)
    assert [request.found_tokens for request in simulation.requests] == [0, 0, 0, 0]
    (prefill,) = (worker for worker in simulation.router.workers() if worker.hello.role == "prefill")
    assert prefill.overlap((1, 2, 3)) == 1.0, "it arrived again after that"
    roomy = run(alone(kv_blocks=9), *visits).requests
    assert [request.found_tokens for request in roomy] == [0, 0, 0, 64]


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_load_balancing_without_prefixes_has_fewer_hits_among_several_workers(disaggregate: Disaggregate) -> None:
    node = config(prefill=4, decode=4, disaggregate=disaggregate)
    found = {}
    for weight in (0.0, 1.0):
        http = replace(node.http, overlap_weight=weight)
        made = replace(without_retrieval(setup(node=replace(node, http=http))), times=TIMES)
        found[weight] = simulate(made, talks(200, 1.0)).use["prefix_hits"]
    assert found[0.0] < 0.8 * found[1.0]


def test_only_the_part_before_the_passages_is_known_to_the_router() -> None:
    made = replace(without_retrieval(setup(node=config(prefill=4, decode=1, disaggregate="always"))), times=TIMES)
    nothing, everything = (
        simulate(made, [dataclasses.replace(turn, known_blocks=known) for turn in talks(200, 1.0)]).use["prefix_hits"]
        for known in (0, 1 << 20)
    )
    assert nothing < 0.8 * everything
