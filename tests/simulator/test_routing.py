"""What the router knows of prompts in the simulator, which runs production's router."""

import dataclasses
from random import Random

from msgspec.structs import replace

from runtime.serving.frontend.choice import BLOCK_TOKENS, PREFIX_BLOCKS
from runtime.simulator.node import simulate
from runtime.simulator.traces import Arrival
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


def hits(known: int = 1 << 20) -> float:
    node = config(prefill=3, decode=1, disaggregate="always")
    node = replace(node, prefill=replace(node.prefill, kv_blocks=1000, slots=4))
    made = replace(without_retrieval(setup(node=node)), times=TIMES)
    arrivals = [dataclasses.replace(one, known_blocks=known) for one in chats(400)]
    return simulate(made, arrivals).use["prefix_hits"]


def test_only_the_part_before_the_passages_is_known_to_the_router() -> None:
    assert hits(known=0) < hits()
    assert PREFIX_BLOCKS * BLOCK_TOKENS == 32_768
