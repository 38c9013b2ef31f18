"""Tests of the router's prefix estimate against the tokens whose KV a worker actually reuses."""

from pathlib import Path

import pytest

from runtime.retrieval.passages import Passage
from runtime.serving.frontend.choice import BLOCK_CHARS
from runtime.serving.frontend.router import Router, known_prefix
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.messages import Generation, Hello, Message, Retrieval, Sampling
from runtime.serving.model.text import build_prompt
from runtime.serving.model.tokenizer import Tokenizer

BLOCK = 32
SYSTEM = Message("system", "You answer questions of those who run this service, in full sentences. " * 9)


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system message", "a system message"])
@pytest.mark.parametrize("retrieval", [None, Retrieval("docs")], ids=["without passages", "with passages"])
def test_the_routers_estimate_for_a_chats_next_turn_equals_the_workers_prefix_hit(
    tiny_directory: Path, system: list[Message], retrieval: Retrieval | None
) -> None:
    tokenizer = Tokenizer.load(tiny_directory)  # one token per byte
    blocks = BlockManager(1000, BLOCK, b"model")
    router = Router(max_in_flight=10)
    for role in ("prefill", "decode"):
        router.add(Hello(role, role, 1, 0, slots=8, limit_tokens=1 << 20))
    turns = list(system)
    for number in range(4):
        turns.append(Message("user", f"Question {number}: how does it do what it does in case {number}? " * 6))
        generation = Generation(Sampling(8), 0, 1, messages=tuple(turns), retrieval=retrieval)
        prefix, _, whole = known_prefix(generation)
        (worker, _) = router.workers()
        believed = worker.overlap(prefix, whole) * max(whole, len(prefix)) * BLOCK_CHARS
        router.finished(router.place(prefix, blocks=whole), prefilled=False)
        passages = [Passage(f"p{number}", f"Title {number}", 0.1, "It says. " * 30)] if retrieval else []
        tokens = build_prompt(tokenizer, turns, passages=passages, budget_tokens=10_000).tokens
        table = blocks.open(tokens)
        frame = len(tokenizer.chat(turns)) - sum(len(turn.content) for turn in turns)
        instruction = 200 if retrieval else 0  # the text before the passages, and the beginning of a title
        assert believed - BLOCK <= table.reused_tokens <= believed + BLOCK_CHARS + frame + instruction
        if number:
            assert believed > 0 or (number == 1 and not system), "the estimate is not just conservative"
        blocks.grow(table, len(tokens))
        blocks.fill(table, tokens, len(tokens))
        blocks.close(table)
        turns.append(Message("assistant", f"It does so because of reason {number}. " * 4))
