"""The demo's `--check`: greedy tokens through the whole node against transformers' `generate()` in this process."""

import random
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from launchers.http_client import post
from runtime.errors import InternalError
from runtime.serving.model.model_info import model_directory
from runtime.serving.model.packages import require_packages

PROMPTS = 50
NEW_TOKENS = 12
_LONGEST = 160


def ragged_prompts(vocabulary: int, count: int, longest: int, seed: int) -> list[list[int]]:
    """Random token sequences of random lengths between 1 and `longest`."""
    source = random.Random(seed)
    return [[source.randrange(vocabulary) for _ in range(source.randint(1, longest))] for _ in range(count)]


def check_equality(url: str, model: str, console: Console, count: int = PROMPTS, seed: int = 0) -> None:
    """Raises `InternalError` if a token differs, `ModelError` where transformers is not installed."""
    require_packages("torch", "transformers")
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    reference = LlamaForCausalLM.from_pretrained(
        model_directory(model), dtype=torch.float32, local_files_only=True
    ).eval()
    prompts = ragged_prompts(reference.config.vocab_size, count, _LONGEST, seed)
    with console.status("checking") as spinner:
        for number, prompt in enumerate(prompts, start=1):
            spinner.update(f"prompt {number} of {count}, {len(prompt)} tokens, against transformers' generate()")
            expected = greedy(reference, prompt, NEW_TOKENS)
            found = node_tokens(url, model, prompt, NEW_TOKENS)
            if found != expected:
                raise InternalError(
                    f"prompt {number} (seed {seed}): the node gives {found}, generate() gives {expected}"
                )
    console.print(f"check: {count} of {count} prompts give the same greedy tokens as transformers' generate()")


def greedy(reference: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The tokens of a single-process greedy `generate()`."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(map(int, output[0, len(prompt) :]))


def node_tokens(url: str, model: str, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The tokens of the same prompt through frontend, prefill, hand-over and decode."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = post(url, "/v1/completions", body)
    return list(answer["choices"][0]["token_ids"])
