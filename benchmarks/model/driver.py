"""Driver of the model for benchmarks, and alternating timing of functions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.serving.model.language_model import Chunk, LanguageModel

Tokens = list[int]


@dataclass(frozen=True)
class Times:
    """Seconds of repeated runs."""

    seconds: Sequence[float]

    @property
    def best(self) -> float:
        return min(self.seconds)


def paired(runs: Sequence[Callable[[], object]], rounds: int) -> list[Times]:
    """Time functions in alternation, so that other load affects all of them alike. The first round is a warm-up."""
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, kept in zip(runs, seconds, strict=True):
            begin = time.perf_counter()
            run()
            if number:
                kept.append(time.perf_counter() - begin)
    return [Times(kept) for kept in seconds]


class Ours:
    """The paged model, used as a worker uses it; every row has blocks for the whole context."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        each = -(-model.context_tokens // model.block_tokens)
        self.tables = [range(row * each, (row + 1) * each) for row in range(model.blocks // each)]

    def prefill(self, prompts: Sequence[Tokens]) -> Tokens:
        logits = self.model.forward(
            [Chunk(table, 0, prompt) for table, prompt in zip(self.tables, prompts, strict=False)]
        )
        return [int(token) for token in logits.argmax(-1)]

    def decode(self, prompts: Sequence[Tokens], first: Tokens, steps: int) -> list[Tokens]:
        answers = [[token] for token in first]
        for step in range(steps):
            chunks = [
                Chunk(self.tables[row], len(prompt) + step, answers[row][-1:]) for row, prompt in enumerate(prompts)
            ]
            for answer, token in zip(answers, self.model.forward(chunks).argmax(-1), strict=True):
                answer.append(int(token))
        return answers


def random_prompts(lengths: Sequence[int], model: LanguageModel, random: np.random.Generator) -> list[Tokens]:
    """Return random prompts without special tokens."""
    return [random.integers(3, model.info.vocabulary, length).tolist() for length in lengths]
