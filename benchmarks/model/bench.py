"""Language model benchmark against transformers' `generate()`: `python -m benchmarks.model [--model NAME_OR_DIR]`.

Both run the same weights in the same process, alternating, with the same number of threads. Measured are prefill
(tokens/s by prompt length, by chunk size, and several prompts in one pass against one pass each), decode (ms per step
by rows; also with rows of very different lengths, which `generate()` pads to the longest), and the copy of a prompt's
KV between two models against a plain copy of as many bytes. Greedy tokens of all runs are compared; a difference ends
the benchmark with an error. These tables are float32; `weights` compares bfloat16 and int8 with it: their speed, and
how often they choose the same token. `--vllm PYTHON` adds a comparison with vLLM's CPU build in bfloat16, against our
`--weights`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging

from benchmarks.common.machine import machine, machine_load
from benchmarks.model.driver import BLOCK_TOKENS, Ours, Times, Tokens, paired, random_prompts
from benchmarks.model.vllm_comparison import measure_vllm
from runtime.serving.kv.transport import Transfer, kv_array
from runtime.serving.messages import Message
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.model_info import WeightsType, model_directory, weights_type

ANSWER = 48  # tokens
QUESTIONS = (
    "What is the capital of France?", "Count to ten.", "Name three colours.", "What is a list in Python?",
    "Why is the sky blue?", "Write a sentence about the sea.", "What does a compiler do?", "Who wrote Hamlet?",
    "How do plants make sugar?", "What is 12 times 12?", "Explain what a closure is.", "Tell me a short story.",
    "What is a prime number?", "Give me a recipe for bread.", "What is the largest planet?", "Translate 'good day'.",
)  # fmt: skip


class Theirs:
    """transformers' implementation; ragged prompts are padded on the left, as `generate()` requires."""

    def __init__(self, directory: Any) -> None:
        self.network: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def generate(self, prompts: Sequence[Tokens], tokens: int) -> list[Tokens]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.network.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [[int(token) for token in row[longest:]] for row in output]


def measure_prefill(
    ours: Ours, theirs: Theirs, lengths: Sequence[int], random: np.random.Generator, rounds: int
) -> None:
    print(f"\n{'prefill':24}{'ours tok/s':>12}{'generate tok/s':>16}{'ratio':>8}   median ms")
    for length in lengths:
        prompts = random_prompts([length], ours.model, random)
        mine, reference = paired([lambda: ours.prefill(prompts), lambda: theirs.generate(prompts, 1)], rounds)  # noqa: B023
        check(ours.prefill(prompts), [row[0] for row in theirs.generate(prompts, 1)])
        print(
            f"{f'{length} tokens':24}{length / mine.best:12.0f}{length / reference.best:16.0f}"
            f"{reference.best / mine.best:8.2f}   {mine.median * 1e3:.1f} / {reference.median * 1e3:.1f}"
        )


def measure_chunks(ours: Ours, length: int, sizes: Sequence[int], random: np.random.Generator, rounds: int) -> None:
    print(f"\n{f'prefill of {length}':24}{'ours tok/s':>12}{'ms a chunk':>16}")
    (prompt,) = random_prompts([length], ours.model, random)
    runs = [lambda size=size: ours.prefill_chunked(prompt, size) for size in sizes]
    for size, times in zip(sizes, paired(runs, rounds), strict=True):
        check(ours.prefill_chunked(prompt, size), ours.prefill([prompt])[0])
        each = times.best / -(-length // size)
        print(f"{f'chunks of {size}':24}{length / times.best:12.0f}{each * 1e3:16.1f}")


def measure_packing(ours: Ours, prompts: int, lengths: Sequence[int], random: np.random.Generator, rounds: int) -> None:
    print(f"\n{f'{prompts} prompts':24}{'one pass tok/s':>16}{'a pass each tok/s':>18}{'ratio':>8}")
    for length in lengths:
        batch = random_prompts([length] * prompts, ours.model, random)
        together, each = paired(
            [lambda: ours.prefill(batch), lambda: [ours.prefill([prompt]) for prompt in batch]],  # noqa: B023
            rounds,
        )
        check(ours.prefill(batch), [ours.prefill([prompt])[0] for prompt in batch])
        total = prompts * length
        print(
            f"{f'of {length} tokens':24}{total / together.best:16.0f}{total / each.best:18.0f}"
            f"{each.best / together.best:8.2f}"
        )


def measure_decode(
    ours: Ours, theirs: Theirs, batches: dict[str, list[int]], random: np.random.Generator, rounds: int, steps: int
) -> None:
    print(f"\n{'decode':24}{'ours ms/step':>12}{'generate ms/step':>18}{'ratio':>8}   median ms/step")
    for name, lengths in batches.items():
        prompts = random_prompts(lengths, ours.model, random)
        first = ours.prefill(prompts)
        mine, one, all_steps = paired(
            [
                lambda: ours.decode(prompts, first, steps),  # noqa: B023
                lambda: theirs.generate(prompts, 1),  # noqa: B023
                lambda: theirs.generate(prompts, 1 + steps),  # noqa: B023
            ],
            rounds,
        )
        check(ours.decode(prompts, first, steps), theirs.generate(prompts, 1 + steps))
        best, median = all_steps.best - one.best, all_steps.median - one.median
        print(
            f"{name:24}{mine.best / steps * 1e3:12.2f}{best / steps * 1e3:18.2f}{best / mine.best:8.2f}"
            f"   {mine.median / steps * 1e3:.1f} / {median / steps * 1e3:.1f}"
        )


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


def measure_copy(model: LanguageModel, target: LanguageModel, lengths: Sequence[int], rounds: int) -> None:
    print(f"\n{'KV copy':24}{'ours ms':>12}{'plain copy ms':>16}{'ratio':>8}   MB")
    source = kv_array(model.kv.numpy().data.cast("B").toreadonly(), model.kv.shape)
    for tokens in lengths:
        blocks = range(-(-tokens // model.block_tokens))
        count = model.info.kv_bytes_per_token() * len(blocks) * model.block_tokens
        plain = np.ones(count, np.uint8), np.zeros(count, np.uint8)
        ours, one = paired(
            [lambda: Transfer(source, blocks, target.kv.numpy(), blocks).step(), lambda: np.copyto(plain[1], plain[0])],  # noqa: B023
            rounds * 4,
        )
        print(
            f"{f'{tokens} tokens':24}{ours.best * 1e3:12.2f}{one.best * 1e3:16.2f}{ours.best / one.best:8.2f}"
            f"   {count / 1e6:.1f}"
        )


def check(ours: object, theirs: object) -> None:
    """Exit if two greedy runs differ: the speed of a wrong answer is meaningless."""
    if ours != theirs:
        raise SystemExit(f"greedy tokens differ:\n  ours     {ours}\n  generate {theirs}")


def main() -> None:
    """Run the benchmark and print the tables."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", default="smollm2-135m-instruct", help="known name, or a directory with a Llama")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=8, help="decode steps a round")
    options.add_argument("--seed", type=int, default=0)
    parts = ["prefill", "chunks", "packing", "decode", "copy", "weights", "vllm"]
    options.add_argument("--part", choices=parts, help="only this table")
    options.add_argument(
        "--weights",
        choices=["float32", "bfloat16", "int8"],
        default=weights_type("auto", "cpu"),
        help="weights for the vLLM table",
    )
    options.add_argument(
        "--vllm", metavar="PYTHON", help="Python interpreter of an environment with vLLM; adds the vLLM table"
    )
    given = options.parse_args()
    if given.part == "vllm" and not given.vllm:
        options.error("--part vllm needs --vllm PYTHON")

    logging.disable_progress_bar()
    random = np.random.default_rng(given.seed)
    model = LanguageModel.load(
        given.model,
        blocks=16 * 1024 // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=1024,
        threads=given.threads,
    )
    target = LanguageModel.load(
        given.model, blocks=1024 // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, context_tokens=1024, threads=given.threads
    )
    ours, theirs = Ours(model), Theirs(model_directory(given.model))
    print(
        f"{model.info.name}: {model.info.layers} layers, float32, {given.threads} thread(s), seed {given.seed}; "
        f"best of {given.rounds}, medians ours / generate\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}; {machine()['processor']}, "
        f"{machine_load()}"
    )

    def rounded(weights: WeightsType = "bfloat16") -> Ours:
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

    batches = {f"{rows} rows of 128": [128] * rows for rows in (1, 2, 4, 8, 16)}
    batches["8 rows of 20..700"] = [20, 700, 40, 200, 30, 100, 60, 80]
    rounds = given.rounds
    tables: dict[str, Callable[[], None]] = {
        "prefill": lambda: measure_prefill(ours, theirs, [32, 128, 512, 1000], random, rounds),
        "chunks": lambda: measure_chunks(ours, 1000, [16, 32, 64, 128, 256, 512, 1000], random, rounds),
        "packing": lambda: measure_packing(ours, 4, [16, 32, 64, 128, 256], random, rounds),
        "decode": lambda: measure_decode(ours, theirs, batches, random, rounds, given.steps),
        "weights": lambda: measure_weights(ours, (rounded(), rounded("int8")), random, rounds, given.steps),
        "copy": lambda: measure_copy(model, target, [128, 512, 1000], rounds),
    }
    if given.vllm:
        directory = model_directory(given.model)
        tables["vllm"] = lambda: measure_vllm(
            rounded(given.weights), given.vllm, directory, random, rounds, given.steps
        )
    for name, measure in tables.items():
        if given.part in (None, name):
            measure()
