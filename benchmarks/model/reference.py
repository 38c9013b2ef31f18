"""What the model must agree with: transformers' own `generate()`, one prompt at a time, greedy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Reference:
    """A model as transformers loads and runs it."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._device = device
        self._network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The `tokens` greedy tokens after `prompt`; the end token is a token like any other.

        What was generated for a prompt is kept: its first tokens are those of a shorter answer.
        """
        kept = self._generated.get(tuple(prompt), [])
        if len(kept) >= tokens:
            return kept[:tokens]
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
        """Logits [len(tokens), vocabulary] of one pass over a whole sequence."""
        with self._torch.inference_mode():
            return self._network(input_ids=self._torch.tensor([list(tokens)], device=self._device)).logits[0]
