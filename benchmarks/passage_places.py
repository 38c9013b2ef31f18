"""Placement of passages in a chat: its effect on answers and on KV reuse.

    python -m benchmarks.passage_places --data DIR --collection /tmp/squad [--chats 12]

Each chat consists of SQuAD 1.1 questions (dev) on one article, one per turn, with retrieval for each; the model is
SmolLM2-135M. Every chat is run once with passages in the "system" message and once before the last "question",
interleaved. Reused are the prompts' tokens that neither worker computed, because a block or a tier had their KV; an
oracle reuses everything of a chat's earlier turns: all but the last question and its passages.
"""

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from benchmarks.probes import CONFIG, MODEL, collection_at, plain
from benchmarks.retrieval import QUESTIONS, questions_of
from launchers.http_client import post
from runtime.node.metrics.worker_metrics import PrefillMetrics
from runtime.serving.messages import Message
from runtime.serving.model.model_info import model_directory
from runtime.serving.model.tokenizer import Tokenizer
from runtime.testing.node import Node, running

Json = dict[str, Any]
PLACES = ("system", "question")


def chats_of(path: Path, chats: int, turns: int, seed: int) -> list[list[Json]]:
    """Return chats, each with the questions of one article."""
    by_article: dict[str, list[Json]] = defaultdict(list)
    for question in questions_of(path, 1 << 30, seed):
        by_article[re.sub(r"_\d+$", "", question["positive"][0])].append(question)
    random = np.random.default_rng(seed)
    names = [name for name in sorted(by_article) if len(by_article[name]) >= turns]
    chosen = [names[row] for row in random.permutation(len(names))[:chats]]
    return [[by_article[name][row] for row in random.permutation(len(by_article[name]))[:turns]] for name in chosen]


def computed(node: Node) -> int:
    """Return the prompt tokens that prefill or decode computed so far."""
    return int(node.metric(str(PrefillMetrics.NEW_TOKENS)))


def more_than(node: Node, before: int) -> bool:
    return computed(node) > before


def run_chat(node: Node, tokenizer: Tokenizer, questions: list[Json], place: str, number: int, options: Any) -> Json:
    """Run one chat; return its prompt tokens, those computed and those known to an oracle, and its correct answers."""
    system = {"role": "system", "content": f"Answer in a few words. This is chat {number} of its kind."}
    messages: list[dict[str, str]] = [system]
    sums = {"prompt": 0, "computed": 0, "oracle": 0, "right": 0, "marked": 0, "ttft_s": 0.0, "turns": len(questions)}
    for question in questions:
        known = (
            tokenizer.chat([Message(turn["role"], turn["content"]) for turn in messages]) if len(messages) > 1 else []
        )
        messages.append({"role": "user", "content": question["question"]})
        before = computed(node)
        retrieval = {"collection": "docs", "k": options.k, "passages": place}
        answer = post(
            node.info.url,
            "/v1/chat/completions",
            {
                "model": MODEL, "messages": messages, "max_tokens": options.tokens, "temperature": 0,
                "retrieval": retrieval,
            },
        )  # fmt: skip
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        used = {passage["id"] for passage in answer["retrieval"]["passages"]}
        node.wait(partial(more_than, node, before))
        sums["prompt"] += answer["usage"]["prompt_tokens"]
        sums["computed"] += computed(node) - before
        sums["oracle"] += len(known)
        sums["right"] += any(plain(one) in plain(text) for one in question["answers"])
        sums["marked"] += bool(used & set(question["positive"]))
        sums["ttft_s"] += answer["timings"]["ttft"]
    return sums


def main() -> None:
    """Run all chats with both placements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/ and ann/, as benchmarks.hybrid")
    parser.add_argument("--collection", type=Path, required=True, help="the collection; built if it does not exist")
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32, help="maximum per answer")
    parser.add_argument("-k", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of questions")
    parser.add_argument("--out", type=Path, help="output files, without suffix")
    options = parser.parse_args()
    collection = collection_at(options.collection, options.data)
    chats = chats_of(options.data / "text" / QUESTIONS, options.chats, options.turns, options.seed)
    tokenizer, load = Tokenizer.load(model_directory(MODEL)), machine_load()
    totals: dict[str, dict[str, float]] = {place: defaultdict(float) for place in PLACES}
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "node.toml"
        config.write_text(CONFIG.format(home=home, model=MODEL, collection=collection))
        with running(config, "--quiet") as node:
            for number, questions in enumerate(chats):
                for place in PLACES if number % 2 else reversed(PLACES):
                    found = run_chat(node, tokenizer, questions, place, 2 * number + PLACES.index(place), options)
                    for name, value in found.items():
                        totals[place][name] += value
                print(f"{number + 1} of {len(chats)}", file=sys.stderr, flush=True)
    rows = []
    for place, sums in totals.items():
        again = sums["prompt"] - sums["computed"]
        rows.append(
            (
                place, f"{sums['prompt'] / sums['turns']:.0f}", f"{again / sums['prompt']:.3f}",
                f"{again / sums['oracle']:.3f}", f"{sums['ttft_s'] / sums['turns'] * 1e3:.0f}",
                f"{sums['marked'] / sums['turns']:.3f}", f"{sums['right'] / sums['turns']:.3f}",
            )
        )  # fmt: skip
    head = (
        "passages in", "tokens of a prompt", "of these reused", "of an oracle's reuse", "first token, ms",
        "annotated passage in the prompt", "annotated answer in the text",
    )  # fmt: skip
    lines = [
        f"{len(chats)} chats of {options.turns} turns (seed {options.seed}), k {options.k}, answers of "
        f"{options.tokens} tokens at most; {MODEL}, all-MiniLM-L6-v2, {machine()['processor']}, {load}",
        "",
        *table(head, rows),
    ]
    write({place: dict(sums) for place, sums in totals.items()}, "\n".join(lines), options.out)


if __name__ == "__main__":
    main()
