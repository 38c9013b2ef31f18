"""How much the router's knowledge of caches finds again, in the simulator, which runs production's router."""

import dataclasses
from random import Random

import pytest
from msgspec.structs import replace

from runtime.serving.frontend.choice import BLOCK_TOKENS, PREFIX_BLOCKS
from runtime.simulator.node import simulate
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Routing
from tests.simulator.nodes import BLOCK, arrival, config, setup, without_retrieval
from tests.simulator.test_prompt_blocks import TIMES


def chats(count: int, seed: int = 0) -> list[Arrival]:
    """Chats with a new block of 32 tokens each turn, whose turns alternate."""
    random = Random(seed)
    turns: dict[int, list[int]] = {}
    found = []
    for number in range(count):
        chat = random.randrange(12)
        blocks = turns.setdefault(chat, [chat * 1000 + at for at in range(8)])
        blocks.append(1_000_000 + number)
        found.append(arrival(number * 0.4, len(blocks) * BLOCK + 8, *blocks))
        if len(blocks) > 20:
            del turns[chat]
    return found


def hits(routing: Routing, kv_blocks: int = 50, known: int = 1 << 20) -> float:
    node = config(prefill=3, decode=1, disaggregate="always")
    node = replace(node, prefill=replace(node.prefill, kv_blocks=kv_blocks, slots=4))
    made = replace(without_retrieval(setup(node=node)), times=TIMES, routing=routing)
    arrivals = [dataclasses.replace(one, known_blocks=known) for one in chats(400)]
    return simulate(made, arrivals).use["prefix_hits"]


def test_events_find_as_much_as_the_caches_contents_and_more_than_what_was_sent() -> None:
    found = {routing: hits(routing) for routing in ("events", "sent", "oracle", "random")}
    assert found["events"] == pytest.approx(found["oracle"], abs=0.02)
    assert found["events"] > found["sent"] > found["random"]


def test_the_estimate_is_what_remains_without_events() -> None:
    assert hits("estimate") >= hits("sent")


def test_only_the_part_before_the_passages_is_known_to_the_router() -> None:
    assert hits("events", kv_blocks=1000, known=0) < hits("events", kv_blocks=1000)
    assert PREFIX_BLOCKS * BLOCK_TOKENS == 32_768
