"""Greedy tokens of a node: frontend, prefill, hand-over and decode."""

import random
from collections.abc import Sequence

from launchers.http_client import post


def ragged_prompts(vocabulary: int, count: int, longest: int, seed: int) -> list[list[int]]:
    """Return random token sequences of random lengths from 1 to `longest`."""
    source = random.Random(seed)
    return [[source.randrange(vocabulary) for _ in range(source.randint(1, longest))] for _ in range(count)]


def node_tokens(url: str, model: str, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return the node's tokens after a prompt."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = post(url, "/v1/completions", body)
    return list(answer["choices"][0]["token_ids"])
