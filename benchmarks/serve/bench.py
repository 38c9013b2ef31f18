"""What the sections of a run share: its options, the model, requests of given lengths, and stands that are kept up."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve.arrivals import Shape, arrivals
from benchmarks.serve.client import Body, in_turn
from benchmarks.serve.stand import Kind, Parts, Stand
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.python_docs import python_documents
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.tiny_model import make_tiny_llama

CONTEXT_TOKENS = 2048
DOCUMENTS = 400


class Bench:
    """One run. A context: stands that are still up end with it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.seed, self.data = folder, int(options.seed), options.data
        self.scale = float(options.scale)
        self.numbers = count()  # of its prompts, by which no two begin alike
        self.truth = options.model == "smollm2"
        if self.truth:
            self.model, embedder = "smollm2-135m-instruct", "all-minilm-l6-v2"
        else:
            self.model, embedder = str(make_tiny_llama(folder / "tiny", layers=4, hidden=256)), "hashing-256"
        Collection.build(python_documents()[:DOCUMENTS], folder / "docs", embedder=embedder)
        self.info = ModelInfo.read(self.model)
        self.parts = Parts(self.model, folder / "docs", folder, CONTEXT_TOKENS)
        # SmolLM2 takes ten times as long for everything: shorter requests, or nothing would end in time.
        self.shape = Shape(64, 12, 256, 24) if self.truth else Shape()
        self._stack = ExitStack()
        self._kept: dict[str, Stand] = {}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def seconds(self, wanted: float) -> float:
        """How long something is measured, by the run's scale."""
        return wanted * self.scale

    def count(self, wanted: int, least: int = 4) -> int:
        """How many requests are measured, by the run's scale."""
        return max(least, round(wanted * self.scale))

    @property
    def long_prompt_tokens(self) -> int:
        """A prompt that holds a core for many decode steps."""
        return 384 if self.truth else 1536

    # ---- stands

    def kept(self, kind: Kind) -> Stand:
        """A stand with the default configuration, started once and kept up for later sections."""
        if kind not in self._kept:
            stand = self._stack.enter_context(Stand(self.parts, kind))
            self._warm(stand)
            self._kept[kind] = stand
        return self._kept[kind]

    @contextmanager
    def stand(
        self,
        kind: Kind,
        parts: Parts | None = None,
        *,
        models_last: bool = False,
        light_core: int | None = None,
        **more: dict[str, Any],
    ) -> Iterator[Stand]:
        """A stand of a section's own; of other `parts` if they are given."""
        with Stand(parts or self.parts, kind, models_last=models_last, light_core=light_core, **more) as stand:
            self._warm(stand)
            yield stand

    def _warm(self, stand: Stand) -> None:
        random = np.random.default_rng(self.seed + 1)
        name = ModelInfo.read(stand.plan.config.model.name).name if stand.plan.config.model else ""
        in_turn(stand.url, [self.body(random, 64, 4) | {"model": name} for _ in range(4)])

    # ---- requests

    def body(self, random: np.random.Generator, prompt_tokens: int, output_tokens: int, **more: Any) -> Body:
        """A completion of random tokens: nothing of its prompt is in a cache or a KV tier, of other runs with this seed
        either."""
        prompt = random.integers(3, self.info.vocabulary, prompt_tokens).tolist()
        number = next(self.numbers)
        for place in range(min(3, prompt_tokens)):
            number, digit = divmod(number, self.info.vocabulary - 3)
            prompt[place] = 3 + digit
        return self.of_prompt(prompt, output_tokens, **more)

    def of_prompt(self, prompt: str | Sequence[int], output_tokens: int, **more: Any) -> Body:
        """A greedy completion of exactly so many tokens."""
        return self._greedy(output_tokens, {"prompt": prompt, **more})

    def of_chat(self, messages: Sequence[dict[str, str]], output_tokens: int, **more: Any) -> Body:
        """A chat's next turn, of exactly so many tokens."""
        return self._greedy(output_tokens, {"messages": messages, **more})

    def _greedy(self, output_tokens: int, more: Body) -> Body:
        return {
            "model": self.info.name,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | more

    def load(self, rate: float, seconds: float, seed: int, **more: Any) -> list[tuple[float, Body]]:
        """Timed requests: from the run's trace, or drawn."""
        random = np.random.default_rng(seed)
        found = arrivals(self.data, rate, seconds, seed, self.shape)
        return [(a.at_s, self.body(random, a.prompt_tokens, a.output_tokens, **more)) for a in found]


def question(random: np.random.Generator) -> str:
    """A question that no two requests share."""
    subjects = ("a with statement", "a generator", "an import", "a class body", "a lambda", "a slice", "an exception")
    return f"How does {subjects[int(random.integers(len(subjects)))]} work in case {int(random.integers(10**9))}?"
