"""Recall of passages through a collection's index, compared with exact search.

    python -m benchmarks.retrieval --data DIR --collection /tmp/squad

Builds a collection of the SQuAD 1.1 passages at --collection (or uses an existing one), searches it for dev questions,
and prints recall@1, @5 and @10: the share of questions with an annotated passage among the first k. Graph and exact
search use the same vectors, so the difference is due to the graph.

With --http a node is started, and every question is also sent to POST /v1/retrieval, as text: frontend, embedder,
ring, pool and document store, with --clients questions in flight.

Embedding 20,963 passages takes about a quarter of an hour on one core; --vectors reads computed ones, such as the first
rows of ann/minilm-384-cosine.base.npy, which were computed from the texts without titles.
"""

import argparse
import gzip
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from benchmarks.common.machine import machine
from benchmarks.common.report import table
from launchers.http_client import post
from launchers.progress import BuildProgress
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.embedding.embedder import embedder_name
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, load_embedder
from runtime.retrieval.neighbors import recall
from runtime.testing.node import running

PASSAGES, QUESTIONS = "squad11_passages.jsonl.gz", "squad11_questions_dev.jsonl.gz"
DEPTHS = (1, 5, 10)
Ids = NDArray[np.int64]


def main() -> None:
    options = _options()
    if not options.collection.exists():
        _build(options)
    questions = questions_of(options.data / QUESTIONS, options.questions, options.seed)
    with Collection.open(options.collection) as collection:
        if collection.documents is None or collection.embedder is None or collection.index.dtype != "float32":
            sys.exit(f"{options.collection} is not a float32 collection of texts")
        embedder = load_embedder(collection.embedder, threads=options.threads)
        began = time.perf_counter()
        queries = embedder.embed([question["question"] for question in questions])
        embed_s = time.perf_counter() - began

        k = max(DEPTHS)
        search = {"top_m": options.top_m, "search_width": options.search_width, "threads": options.threads}
        collection.index.search(queries[:1], k, **search)  # compiles
        began = time.perf_counter()
        graph, _ = collection.index.search(queries, k, **search)
        graph_s = time.perf_counter() - began
        began = time.perf_counter()
        exact = _exact(queries, collection, k)
        exact_s = time.perf_counter() - began

        names = {row: d.id for row, d in _documents(collection, np.union1d(graph, exact)).items()}
    report = {
        "passages": collection.index.size,
        "questions": len(questions),
        "seed": options.seed,
        "embedder": embedder_name(collection.embedder),
        "degree": collection.index.degree,
        **search,
        "exact": _hits(_named(exact, names), questions) | {"queries_per_s": round(len(questions) / exact_s)},
        "graph": _hits(_named(graph, names), questions) | {"queries_per_s": round(len(questions) / graph_s)},
        "graph_recall@10_of_exact": round(recall(graph, exact), 4),
        "embed_ms_per_question": round(embed_s / len(questions) * 1e3, 2),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }
    if options.http:
        found, http_s = _over_http(options.collection, questions, max(DEPTHS), options.clients)
        report["http"] = _hits(found, questions) | {"queries_per_s": round(len(questions) / http_s)}
        report["clients"] = options.clients
    _print(report)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {PASSAGES} and {QUESTIONS}")
    parser.add_argument("--collection", type=Path, required=True, help="the collection; built if it does not exist")
    parser.add_argument("--vectors", type=Path, help="computed vectors of the passages: the first rows of an .npy file")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of questions")
    parser.add_argument("--top-m", type=int, default=64)
    parser.add_argument("--search-width", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="also search through a node, over HTTP")
    parser.add_argument("--clients", type=int, default=4, help="questions in flight over HTTP")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


def _build(options: argparse.Namespace) -> None:
    vectors = None
    if options.vectors is not None:
        with gzip.open(options.data / PASSAGES) as lines:
            count = sum(1 for _ in lines)
        vectors = np.load(options.vectors, mmap_mode="r")[:count]
    with BuildProgress(sys.stderr) as progress:
        Collection.build(
            options.data / PASSAGES,
            options.collection,
            embedder=DEFAULT_EMBEDDER,
            vectors=vectors,
            threads=options.threads,
            progress=progress,
        )


def questions_of(path: Path, count: int, seed: int) -> list[dict[str, Any]]:
    with gzip.open(path) as lines:
        questions = [json.loads(line) for line in lines]
    chosen = np.random.default_rng(seed).permutation(len(questions))[:count]
    return [questions[row] for row in np.sort(chosen)]


def _exact(queries: NDArray[np.float32], collection: Collection, k: int) -> Ids:
    """Return the k rows of largest cosine; the index stores normalized vectors, padded with zeros."""
    vectors = collection.index.data.rows.codes[:, : queries.shape[1]]
    found = np.empty((len(queries), k), np.int64)
    for row, query in enumerate(queries):
        cosine = vectors @ query
        best = np.argpartition(-cosine, k)[:k]
        found[row] = best[np.argsort(-cosine[best])]
    return found


def _documents(collection: Collection, rows: Ids) -> dict[int, Any]:
    assert collection.documents is not None
    rows = rows[rows >= 0]
    return dict(zip(rows.tolist(), collection.documents.get(rows), strict=True))


def _named(ids: Ids, names: dict[int, str]) -> list[list[str]]:
    return [[names.get(row, "") for row in found] for found in ids.tolist()]


def _hits(found: list[list[str]], questions: list[dict[str, Any]]) -> dict[str, float]:
    hit = np.array(
        [[name in question["positive"] for name in names] for names, question in zip(found, questions, strict=True)]
    )
    return {f"recall@{k}": round(float(hit[:, :k].any(axis=1).mean()), 4) for k in DEPTHS}


def _over_http(
    collection: Path, questions: list[dict[str, Any]], k: int, clients: int
) -> tuple[list[list[str]], float]:
    """Return the ids that a node returns, and the total time in seconds."""
    with tempfile.TemporaryDirectory() as home, serving(collection, Path(home)) as url:

        def search(question: dict[str, Any]) -> list[str]:
            answer = post(url, "/v1/retrieval", {"query": question["question"], "k": k, "collection": "docs"})
            return [passage["id"] for passage in answer["passages"]]

        search(questions[0])
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            found = list(threads.map(search, questions))
        return found, time.perf_counter() - began


@contextmanager
def serving(collection: Path, home: Path) -> Iterator[str]:
    """Start a node that serves this collection; yield its URL when it is ready."""
    config = home / "node.toml"
    config.write_text(
        f'[node]\nname = "bench"\nrun_dir = "{home}/run"\n[http]\nport = 0\n'
        f'[[collections]]\nname = "docs"\npath = "{collection.resolve()}"\n'
    )
    with running(config, "--quiet") as node:
        yield node.info.url


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['questions']:,} questions (seed {report['seed']}), {report['passages']:,} passages, "
        f"{report['embedder']}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"{report['machine']['processor']}, {report['machine']['cores']} cores; {versions}")
    rows = [
        [name, *(f"{report[name][f'recall@{k}']:.4f}" for k in DEPTHS), f"{report[name]['queries_per_s']:,}"]
        for name in ("exact", "graph", "http")
        if name in report
    ]
    print("\n".join(table(["", *(f"recall@{k}" for k in DEPTHS), "queries/s"], rows)))
    print(
        f"graph: degree {report['degree']}, top_m {report['top_m']}, search_width {report['search_width']}, "
        f"{report['threads']} thread(s); recall@10 of exact's {report['graph_recall@10_of_exact']:.4f}; "
        f"embedding {report['embed_ms_per_question']} ms a question"
    )


if __name__ == "__main__":
    main()
