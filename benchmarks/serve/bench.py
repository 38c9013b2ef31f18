"""Shared state of a run's sections: options, model, request bodies, and running systems."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve.arrivals import Shape, arrivals
from benchmarks.serve.client import Body, sequential
from benchmarks.serve.system import Kind, System, SystemParts
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.ingestion.python_docs import python_documents
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.tiny_model import make_tiny_llama

CONTEXT_TOKENS = 2048
DOCUMENTS = 400


class Bench:
    """One benchmark run: a context manager that stops the systems still running at its end."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.seed, self.data = folder, int(options.seed), options.data
        self.scale = float(options.scale)
        self.numbers = count()  # of its prompts: no two share a prefix
        self.real_model = options.model == "smollm2"
        if self.real_model:
            self.model, embedder = "smollm2-135m-instruct", "all-minilm-l6-v2"
        else:
            self.model, embedder = str(make_tiny_llama(folder / "tiny", layers=4, hidden=256)), "hashing-256"
        bulk_load.build(python_documents()[:DOCUMENTS], folder / "docs", embedder=embedder)
        self.info = ModelInfo.read(self.model)
        self.parts = SystemParts(self.model, folder / "docs", folder, CONTEXT_TOKENS)
        # SmolLM2 is ten times slower: use shorter requests.
        self.shape = Shape(64, 12, 256, 24) if self.real_model else Shape()
        self._stack = ExitStack()
        self._shared: dict[str, System] = {}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def seconds(self, wanted: float) -> float:
        """Scale a duration."""
        return wanted * self.scale

    def count(self, wanted: int, least: int = 4) -> int:
        """Scale a number of requests."""
        return max(least, round(wanted * self.scale))

    @property
    def long_prompt_tokens(self) -> int:
        """Length of a prompt that occupies a core for many decode steps."""
        return 384 if self.real_model else 1536

    # ---- systems

    def shared_system(self, kind: Kind) -> System:
        """Return a system with the default configuration, started once and shared by the sections."""
        if kind not in self._shared:
            system = self._stack.enter_context(System(self.parts, kind))
            self._warm(system)
            self._shared[kind] = system
        return self._shared[kind]

    @contextmanager
    def system(
        self,
        kind: Kind,
        parts: SystemParts | None = None,
        **more: dict[str, Any],
    ) -> Iterator[System]:
        """Start a system for one section, with other `parts` if given."""
        with System(parts or self.parts, kind, **more) as system:
            self._warm(system)
            yield system

    def _warm(self, system: System) -> None:
        random = np.random.default_rng(self.seed + 1)
        name = ModelInfo.read(system.plan.config.model.name).name if system.plan.config.model else ""
        sequential(system.url, [self.body(random, 64, 4) | {"model": name} for _ in range(4)])

    # ---- requests

    def body(self, random: np.random.Generator, prompt_tokens: int, output_tokens: int, **more: Any) -> Body:
        """Return a completion with a random prompt, no part of which is in a cache or KV tier, even if other runs used
        the same seed."""
        prompt = random.integers(3, self.info.vocabulary, prompt_tokens).tolist()
        number = next(self.numbers)
        for place in range(min(3, prompt_tokens)):
            number, digit = divmod(number, self.info.vocabulary - 3)
            prompt[place] = 3 + digit
        return self.of_prompt(prompt, output_tokens, **more)

    def of_prompt(self, prompt: str | Sequence[int], output_tokens: int, **more: Any) -> Body:
        """Return a greedy completion of exactly `output_tokens`."""
        return self._greedy(output_tokens, {"prompt": prompt, **more})

    def of_chat(self, messages: Sequence[dict[str, str]], output_tokens: int, **more: Any) -> Body:
        """Return a greedy chat completion of exactly `output_tokens`."""
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
        """Return timed requests, from the run's trace or random."""
        random = np.random.default_rng(seed)
        trace = arrivals(self.data, rate, seconds, seed, self.shape)
        return [(a.at_s, self.body(random, a.prompt_tokens, a.output_tokens, **more)) for a in trace]


def question(random: np.random.Generator) -> str:
    """Return a unique question."""
    subjects = ("a with statement", "a generator", "an import", "a class body", "a lambda", "a slice", "an exception")
    return f"How does {subjects[int(random.integers(len(subjects)))]} work in case {int(random.integers(10**9))}?"
