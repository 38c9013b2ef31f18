"""Language model benchmark: `python -m benchmarks.model [--model NAME_OR_DIR]`.

`weights` compares bfloat16 and int8 weights with float32 in the same process, alternating: their speed, and how often
they choose the same token. That the tokens are transformers' is a test (`tests/serving/test_model.py`).
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.common.machine import machine, machine_load
from benchmarks.model.driver import Ours, Times, paired, random_prompts
from runtime.node.engine_config import BLOCK_TOKENS
from runtime.serving.messages import Message
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.model_info import WeightsType

ANSWER = 48  # tokens
QUESTIONS = (
    "What is the capital of France?", "Count to ten.", "Name three colours.", "What is a list in Python?",
    "Why is the sky blue?", "Write a sentence about the sea.", "What does a compiler do?", "Who wrote Hamlet?",
    "How do plants make sugar?", "What is 12 times 12?", "Explain what a closure is.", "Tell me a short story.",
    "What is a prime number?", "Give me a recipe for bread.", "What is the largest planet?", "Translate 'good day'.",
)  # fmt: skip


def measure_weights(ours: Ours, others: Sequence[Ours], random: np.random.Generator, rounds: int, steps: int) -> None:
    """`others`: the same model with bfloat16 and with int8 weights."""
    every = (ours, *others)
    print(f"\n{'weights':24}{'float32 ms':>12}{'bfloat16 ms':>16}{'int8 ms':>12}   bfloat16 to int8")

    def row(name: str, times: Sequence[Times], parts: int = 1) -> None:
        one, two, three = (each.best / parts * 1e3 for each in times)
        print(f"{name:24}{one:12.2f}{two:16.2f}{three:12.2f}{two / three:11.2f}")

    for length in (128, 512):
        prompts = random_prompts([length], ours.model, random)
        row(f"prefill of {length}", paired([lambda e=each: e.prefill(prompts) for each in every], rounds))  # type: ignore[misc]  # noqa: B023
    for count in (1, 2, 4, 8, 16):
        prompts = random_prompts([128] * count, ours.model, random)
        first = ours.prefill(prompts)
        for other in others:
            other.prefill(prompts)
        runs = [lambda e=each: e.decode(prompts, first, steps) for each in every]  # noqa: B023
        row(f"a step of {count} rows", paired(runs, rounds), steps)
    chats = [ours.model.tokenizer.chat([Message("user", question)]) for question in QUESTIONS]
    answers = ours.decode(chats, ours.prefill(chats), ANSWER)
    for name, other in zip(("bfloat16", "int8"), others, strict=True):
        same = [token == answer[0] for token, answer in zip(other.prefill(chats), answers, strict=True)]
        for number in range(ANSWER):  # after float32's tokens, so that one difference does not cause others
            chunks = [
                Chunk(other.tables[row], len(chat) + number, [answers[row][number]]) for row, chat in enumerate(chats)
            ]
            chosen = other.model.forward(chunks).argmax(-1)
            same += [int(token) == answer[number + 1] for token, answer in zip(chosen, answers, strict=True)]
        free = other.decode(chats, other.prefill(chats), ANSWER)
        print(f"{name}: the same greedy token after float32's: {sum(same)} of {len(same)}")
        print(f"{name}: the same answer of {ANSWER} tokens: {sum(map(list.__eq__, answers, free))} of {len(chats)}")


def main() -> None:
    """Run the benchmark and print the tables."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", default="smollm2-135m-instruct", help="known name, or a directory with a Llama")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=8, help="decode steps a round")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()

    random = np.random.default_rng(given.seed)
    model = LanguageModel.load(
        given.model,
        blocks=16 * 1024 // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=1024,
        threads=given.threads,
    )
    ours = Ours(model)
    print(
        f"{model.info.name}: {model.info.layers} layers, float32, {given.threads} thread(s), seed {given.seed}; "
        f"best of {given.rounds}\ntorch {torch.__version__}; {machine()['processor']}, {machine_load()}"
    )

    def rounded(weights: WeightsType) -> Ours:
        return Ours(
            LanguageModel.load(
                given.model,
                blocks=model.blocks,
                block_tokens=BLOCK_TOKENS,
                context_tokens=model.context_tokens,
                threads=given.threads,
                weights=weights,
            )
        )

    measure_weights(ours, (rounded("bfloat16"), rounded("int8")), random, given.rounds, given.steps)
