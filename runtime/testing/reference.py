"""Reference for the model's output: transformers' `generate()`, greedy, one prompt at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Reference:
    """A model loaded and run by transformers."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._device = device
        self._network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the `tokens` greedy tokens after `prompt`; the end token does not end the answer.

        Answers are cached: the first tokens of a longer answer are a shorter answer.
        """
        known = self._generated.get(tuple(prompt), [])
        if len(known) >= tokens:
            return known[:tokens]
        ids = self._torch.tensor([list(prompt)], device=self._device)
        output = self._network.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
        )
        self._generated[tuple(prompt)] = generated = [int(token) for token in output[0, len(prompt) :]]
        return generated[:]

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return the logits [len(tokens), vocabulary] of one pass over a sequence."""
        with self._torch.inference_mode():
            return self._network(input_ids=self._torch.tensor([list(tokens)], device=self._device)).logits[0]
