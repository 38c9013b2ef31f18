"""Recall and latency of hybrid search compared with vector search, through a node, over HTTP, one request at a time.

python -m benchmarks.hybrid --data DIR --collection /tmp/squad      # of real data: text/squad11_*.jsonl.gz

Questions of SQuAD 1.1 (dev) and their annotated passages. Each question is searched by vectors, hybrid and with all
weight on keywords, interleaved for every k, so that the times are comparable. The collection is built if it does not
exist, with the vectors of ann/minilm-384-cosine.base.npy, which were computed from the texts without titles.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine
from benchmarks.common.report import table, write
from benchmarks.retrieval import PASSAGES, QUESTIONS, questions_of, serving
from launchers.http_client import post
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.sources import read_documents
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER

WAYS = {"vectors": 0.0, "hybrid": 0.5, "keywords first": 1.0}
KS = (1, 5, 10)
Search = Callable[[str, int, float], Sequence[str]]


def measure(search: Search, questions: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, tuple[float, list[float]]]]:
    """Return, by method and k, the share of questions with an annotated passage among their k, and the times in ms."""
    hits: dict[tuple[str, int], list[bool]] = defaultdict(list)
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for question in questions:
        for k in KS:
            for way, share in WAYS.items():
                begin = time.perf_counter()
                found = search(question["question"], k, share)
                took[way, k].append((time.perf_counter() - begin) * 1e3)
                hits[way, k].append(bool(set(found) & set(question["positive"])))
    return {way: {k: (float(np.mean(hits[way, k])), took[way, k]) for k in KS} for way in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collection", type=Path, required=True, help="the collection; built if it does not exist")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of questions")
    parser.add_argument("--out", type=Path, help="output files, without suffix")
    options = parser.parse_args()
    text = options.data / "text"
    if not options.collection.exists():
        documents = list(read_documents(text / PASSAGES))
        vectors = np.load(options.data / "ann" / "minilm-384-cosine.base.npy")[: len(documents)]
        Collection.build(documents, options.collection, embedder=DEFAULT_EMBEDDER, vectors=vectors, threads=2)
    info = Collection.info(options.collection)
    questions = questions_of(text / QUESTIONS, options.questions, options.seed)
    with tempfile.TemporaryDirectory() as home, serving(options.collection, Path(home)) as url:

        def search(question: str, k: int, share: float) -> list[str]:
            answer = post(url, "/v1/retrieval", {"query": question, "k": k, "collection": "docs", "hybrid": share})
            return [passage["id"] for passage in answer["passages"]]

        measure(search, questions[:5])
        found = measure(search, questions)
    figures = {
        way: [round(found[way][k][0], 3) for k in KS]
        + [round(float(np.percentile([one for k in KS for one in found[way][k][1]], at)), 1) for at in (50, 99)]
        for way in WAYS
    }
    lines = [
        f"{info.size:,} passages, {len(questions):,} questions (seed {options.seed}), all-MiniLM-L6-v2; documents "
        f"{info.document_bytes / 1e6:.1f} MB, keyword index {info.keyword_bytes / 1e6:.1f} MB",
        f"{machine()['processor']}, {machine()['cores']} cores; one question at a time, a request for each k",
        "",
        *table(["", *(f"recall@{k}" for k in KS), "p50 ms", "p99 ms"], ([way, *figures[way]] for way in WAYS)),
    ]
    write(figures, "\n".join(lines), options.out)


if __name__ == "__main__":
    main()
