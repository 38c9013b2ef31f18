"""Comparison of probe triggers on real questions through a real node.

    python -m benchmarks.probes --data DIR --collection /tmp/squad [--questions 48]

SQuAD 1.1 questions (dev) with annotated passages, answered by SmolLM2-135M with retrieval over all of SQuAD's passages
(all-MiniLM-L6-v2, `k` of them at first and with each probe), one at a time, triggers interleaved. Reported: whether an
annotated passage is in use when the answer ends, whether an annotated answer is in its text, the number of probes, the
passages inserted, and the stall time. Decoding is greedy, so everything but the times is reproducible on one machine.
"""

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from benchmarks.retrieval import PASSAGES, QUESTIONS, questions_of
from launchers.http_client import post
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.sources import read_documents
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER
from runtime.testing.node import running

Json = dict[str, Any]

MODEL = "smollm2-135m-instruct"
WAYS: dict[str, Json] = {
    "no probes": {},
    "every 32": {"every_tokens": 32},
    "every 16": {"every_tokens": 16},
    "every 16, prefetch": {"every_tokens": 16, "probe_mode": "prefetch"},
    "drift .4, every 16": {"every_tokens": 16, "probe_trigger": "drift", "probe_threshold": 0.4},
    "drift .5, every 16": {"every_tokens": 16, "probe_trigger": "drift", "probe_threshold": 0.5},
    "drift .6, every 16": {"every_tokens": 16, "probe_trigger": "drift", "probe_threshold": 0.6},
    "unsure 1, after 16": {"every_tokens": 16, "probe_trigger": "unsure", "probe_threshold": 1.0},
    "unsure 2, after 16": {"every_tokens": 16, "probe_trigger": "unsure", "probe_threshold": 2.0},
    "unsure 3, after 16": {"every_tokens": 16, "probe_trigger": "unsure", "probe_threshold": 3.0},
}
CONFIG = """
[node]
name = "probes"
run_dir = "{home}/run"
[http]
port = 0
[model]
name = "{model}"
[[collections]]
name = "docs"
path = "{collection}"
"""


def collection_at(path: Path, data: Path) -> Path:
    """Return the collection of SQuAD's passages; build it if it does not exist."""
    if not path.exists():
        documents = list(read_documents(data / "text" / PASSAGES))
        vectors = np.load(data / "ann" / "minilm-384-cosine.base.npy")[: len(documents)]
        Collection.build(documents, path, embedder=DEFAULT_EMBEDDER, vectors=vectors, threads=1)
    return path.resolve()


def answer_question(url: str, question: Mapping[str, Any], way: Json, k: int, tokens: int) -> Json:
    """Return one answer's probes, and whether it contains annotated passages and answers."""
    retrieval = {"collection": "docs", "k": k} | way
    prompt = f"{question['question']} Answer in a few sentences."
    answer = post(
        url,
        "/v1/chat/completions",
        {
            "model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
            "retrieval": retrieval,
        },
    )  # fmt: skip
    with urllib.request.urlopen(f"{url}/v1/traces/{answer['id']}") as found:
        probes = json.load(found)["probes"]
    used = [passage["id"] for passage in answer["retrieval"]["passages"]]
    written = answer["usage"]["completion_tokens"]
    return {
        "marked": bool(set(used) & set(question["positive"])),
        "right": any(plain(one) in plain(answer["choices"][0]["message"]["content"]) for one in question["answers"]),
        "probes": len(probes),
        "taken": sum(probe["passages"] > 0 for probe in probes),
        "passages": len(used),
        "stalled_s": sum(probe["stalled_s"] for probe in probes),
        "token_s": answer["timings"].get("tpot", 0.0),
        "tokens": written,
    }


def plain(text: str) -> str:
    """Normalize a text for comparison: words and numbers, separated by blanks."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def means(found: Sequence[Json]) -> dict[str, float]:
    return {name: round(float(np.mean([one[name] for one in found])), 4) for name in found[0]}


def rows(found: Mapping[str, Mapping[str, float]]) -> Iterable[Sequence[object]]:
    for way, one in found.items():
        yield (
            way, f"{one['probes']:.1f}", f"{one['taken']:.2f}", f"{one['passages']:.2f}",
            f"{one['stalled_s'] * 1e3:.0f}", f"{one['token_s'] * 1e3:.1f}",
            f"{one['marked']:.3f}", f"{one['right']:.3f}",
        )  # fmt: skip


HEAD = (
    "", "probes", "of these inserted passages", "passages in use", "stalled, ms", "a token, ms",
    "annotated passage in use", "annotated answer in the text",
)  # fmt: skip


def main() -> None:
    """Answer all questions with every trigger and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with text/ and ann/ of SQuAD 1.1, as benchmarks.hybrid"
    )
    parser.add_argument("--collection", type=Path, required=True, help="the collection; built if it does not exist")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64, help="maximum per answer")
    parser.add_argument("-k", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of questions")
    parser.add_argument("--ways", default="", help=f"a subset, separated by semicolons: {'; '.join(WAYS)}")
    parser.add_argument("--out", type=Path, help="output files, without suffix")
    options = parser.parse_args()
    ways = {way: WAYS[way] for way in options.ways.split(";") if way} or WAYS
    collection = collection_at(options.collection, options.data)
    questions = questions_of(options.data / "text" / QUESTIONS, options.questions, options.seed)
    load = machine_load()
    found: dict[str, list[Json]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "node.toml"
        config.write_text(CONFIG.format(home=home, model=MODEL, collection=collection))
        with running(config, "--quiet") as node:
            answer_question(node.info.url, questions[0], WAYS["every 16"], options.k, options.tokens)
            for number, question in enumerate(questions):
                for way, more in ways.items():
                    found[way].append(answer_question(node.info.url, question, more, options.k, options.tokens))
                print(f"{number + 1} of {len(questions)}", file=sys.stderr, flush=True)
    figures = {way: means(ones) for way, ones in found.items()}
    lines = [
        f"{len(questions)} questions (seed {options.seed}), k {options.k}, answers of {options.tokens} tokens at most; "
        f"{MODEL}, all-MiniLM-L6-v2, {machine()['processor']}, {load}",
        "",
        *table(HEAD, rows(figures)),
    ]
    write(
        {"options": {"seed": options.seed, "k": options.k, "tokens": options.tokens}, "ways": figures},
        "\n".join(lines),
        options.out,
    )


if __name__ == "__main__":
    main()
