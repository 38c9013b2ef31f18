"""Retrieval by text and by vector over HTTP, beside the raw embedder in the same run.

    python -m benchmarks.retrieval_load --data DIR [--passages 3000] [--seconds 8] [--seed 0] [--out OUT]
        [--part raw --part stage --part text --part vectors --part embeddings --part build]

DIR has text/squad11_passages.jsonl.gz and text/squad11_questions_{dev,train}.jsonl.gz. The node has the shipped
defaults, no model, and one collection of the first passages; every question is another one. The load generator runs on
the same cores. `raw` is the same embedder without a node: the best rate of one text at a time, and of batches of 64 on
as many threads as there are cores, for questions and for passages. `stage` is the embedding stage without a node.
"""

import argparse
import gzip
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from benchmarks.retrieval_load.load import Load, closed_loop, http_requests, open_loop
from benchmarks.retrieval_load.stage import measure_stage, stage_table
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.embedding.embedder import Embedder, Vectors
from runtime.retrieval.embedding.loading import load_embedder
from runtime.testing.node import Node

_CONFIG = """
[node]
name = "retrieval-load"
run_dir = "{home}/run"

[http]
port = 0

[[collections]]
name = "docs"
path = "{home}/docs"
"""
CONNECTIONS = (1, 16, 64)
PARTS = ("raw", "stage", "text", "vectors", "embeddings", "build")
_BATCH = 64
_OPEN_SHARE = 0.6
_OVERLOAD = 2.0


def raw_rate(model: Embedder, texts: Sequence[str], threads: int, batch: int, seconds: float) -> float:
    """Return texts a second of the embedder alone, on `threads` threads that each embed batches."""
    done, until = [0] * threads, time.perf_counter() + seconds

    def embed(thread: int) -> None:
        own = itertools.cycle(texts[thread::threads])
        while time.perf_counter() < until:
            model.embed(list(itertools.islice(own, batch)))
            done[thread] += batch

    begin = time.perf_counter()
    running = [threading.Thread(target=embed, args=(thread,)) for thread in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return sum(done) / (time.perf_counter() - begin)


def raw_rates(model: Embedder, texts: Sequence[str], seconds: float) -> dict[str, float]:
    """Return texts a second by how the embedder is called."""
    ways = {"one by one": (1, 1), f"batches of {_BATCH}": (1, _BATCH)}
    cores = len(os.sched_getaffinity(0))
    ways |= {f"one by one, {cores} threads": (cores, 1), f"batches of {_BATCH}, {cores} threads": (cores, _BATCH)}
    return {way: raw_rate(model, texts, threads, batch, seconds) for way, (threads, batch) in ways.items()}


class _Requests:
    """Requests that are all different, in turn."""

    def __init__(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        self._requests = itertools.cycle(http_requests(path, [msgspec.json.encode(body) for body in bodies]))

    def __iter__(self) -> Iterator[bytes]:
        return self._requests


def measure(port: int, requests: Iterator[bytes], seconds: float, seed: int) -> dict[str, Any]:
    """Measure closed loops, Poisson arrivals at a share of the capacity that these showed, and twice that capacity."""
    closed_loop(port, requests, 16, 1.0)
    found: dict[str, Any] = {f"{c} connections": _row(closed_loop(port, requests, c, seconds)) for c in CONNECTIONS}
    capacity = max(row["rate"] for row in found.values())
    for name, share in ((f"Poisson, {_OPEN_SHARE:.0%} of it", _OPEN_SHARE), ("Poisson, twice it", _OVERLOAD)):
        found[name] = _row(open_loop(port, requests, share * capacity, seconds, seed))
    return found


def _row(load: Load) -> dict[str, Any]:
    refused = sum(count for status, count in load.statuses.items() if status != 200)
    late = max(load.refused_s, default=0.0) * 1e3
    return {
        "rate": load.rate, "p50_ms": load.quantile_ms(0.5), "p99_ms": load.quantile_ms(0.99), "refused": refused,
        "refusal_max_ms": late, "statuses": {str(status): count for status, count in load.statuses.items()},
    }  # fmt: skip


def build_rate(documents: Sequence[Document], home: Path, threads: int) -> dict[str, float]:
    """Return passages a second of the embedding part of a build, and of all of it."""
    embedding: list[float] = []  # times at which a part was reported

    def progress(stage: str, fraction: float) -> None:
        if stage == "embed":
            embedding.append(time.perf_counter())

    begin = time.perf_counter()
    bulk_load.build(documents, home / "again", threads=threads, progress=progress, force=True)
    took = time.perf_counter() - begin
    return {"embed": len(documents) / (embedding[-1] - embedding[0]), "whole": len(documents) / took}


def run(data: Path, parts: Sequence[str], passages: int, seconds: float, seed: int) -> dict[str, Any]:
    """Measure the parts."""
    questions = [str(one["question"]) for one in _lines(data / "text/squad11_questions_train.jsonl.gz", 40_000)]
    documents = [
        Document(one["id"], one["title"], one["text"])
        for one in _lines(data / "text/squad11_passages.jsonl.gz", passages)
    ]
    model, cores = load_embedder("all-minilm-l6-v2"), len(os.sched_getaffinity(0))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        vectors = _vectors(model, [f"{one.title}\n{one.text}" for one in documents], data, len(documents))
        bulk_load.build(documents, home / "docs", vectors=vectors, embedder="all-minilm-l6-v2", model=model)
        if "raw" in parts:
            found["raw"] = raw_rates(model, questions, seconds / 2)
            print(found["raw"], flush=True)
        if "stage" in parts:
            measured = measure_stage(model, random.Random(seed).sample(questions, int(64 * seconds) // 64 * 64))
            found["stage"] = stage_table(measured)
            print("\n".join(found["stage"]), flush=True)
        if "build" in parts:
            texts = [f"{one.title}\n{one.text}" for one in documents]
            found["raw passages"] = raw_rate(model, texts, cores, _BATCH, seconds)
            found["build"] = build_rate(documents[: int(found["raw passages"] * seconds)], home, cores)
            print(found["raw passages"], found["build"], flush=True)
        if {"text", "vectors", "embeddings"} & set(parts):
            (home / "node.toml").write_text(_CONFIG.format(home=home))
            node = Node(home / "node.toml")
            try:
                _measure_node(node, model, questions, parts, seconds, seed, found)
            finally:
                node.stop()
    return found


def _measure_node(
    node: Node, model: Embedder, questions: Sequence[str], parts: Sequence[str], seconds: float, seed: int,
    found: dict[str, Any],
) -> None:  # fmt: skip
    port = int(node.info.url.rsplit(":", 1)[1])
    if "text" in parts:
        bodies: list[dict[str, Any]] = [{"query": question} for question in questions]
        found["text"] = measure(port, iter(_Requests("/v1/retrieval", bodies)), seconds, seed)
        print(json.dumps(found["text"], indent=1), flush=True)
    if "vectors" in parts:
        bodies = [{"vector": vector.tolist()} for vector in model.embed(questions[:512])]
        found["vectors"] = measure(port, iter(_Requests("/v1/retrieval", bodies)), seconds, seed)
        print(json.dumps(found["vectors"], indent=1), flush=True)
    if "embeddings" in parts:
        bodies = [
            {"model": "all-minilm-l6-v2", "input": questions[-begin - _BATCH : -begin], "encoding_format": "base64"}
            for begin in range(_BATCH, len(questions) // 2, _BATCH)
        ]
        requests = iter(_Requests("/v1/embeddings", bodies))
        found["embeddings"] = {f"{c} connections": _row(closed_loop(port, requests, c, seconds)) for c in (1, 4)}
        print(json.dumps(found["embeddings"], indent=1), flush=True)


def _vectors(model: Embedder, texts: Sequence[str], data: Path, count: int) -> Vectors:
    known = data / "ann/minilm-384-cosine.base.npy"  # its first rows are the passages' vectors
    if known.exists():
        return np.asarray(np.load(known, mmap_mode="r")[:count], np.float32)
    return model.embed(texts, "passage")


def _lines(path: Path, count: int) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def report(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "tokenizers", "uvicorn", "numpy"))
    lines = [
        "# Retrieval by text and by vector", "", f"{found['machine']}; {found['load']}; seed {found['seed']}; "
        f"{found['passages']:,} passages; {packages}.", "",
    ]  # fmt: skip
    if "raw" in found:
        rates = [(way, f"{rate:.0f}") for way, rate in found["raw"].items()]
        lines += [*table(["raw embedder, questions", "texts/s"], rates), ""]
    lines += [*found["stage"], ""] if "stage" in found else []
    best = max(found.get("raw", {"": float("nan")}).values())
    for name, each in (("text", 1), ("vectors", 1), ("embeddings", _BATCH)):
        if name in found:
            head = [f"{name} over HTTP", "answers/s", "of raw", "p50 ms", "p99 ms", "refused", "latest refusal ms"]
            lines += [*table(head, [_cells(way, row, each, best, name) for way, row in found[name].items()]), ""]
    if "build" in found:
        raw = found["raw passages"]
        rows = [("raw embedder", f"{raw:.1f}", "1.00")]
        rows += [(f"build, {way}", f"{rate:.1f}", f"{rate / raw:.2f}") for way, rate in found["build"].items()]
        lines += [*table(["passages", "passages/s", "of raw"], rows), ""]
    return "\n".join(lines)


def _cells(way: str, row: dict[str, Any], each: int, best: float, name: str) -> list[str]:
    share = "" if name == "vectors" else f"{row['rate'] * each / best:.2f}"
    times = [f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"]
    return [way, f"{row['rate']:.0f}", share, *times, str(row["refused"]), f"{row['refusal_max_ms']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--passages", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    found = run(told.data, told.part or PARTS, told.passages, told.seconds, told.seed)
    described = machine()
    found |= {
        "machine": f"{described['processor']}, {described['cores']} cores, Python {described['python']}",
        "load": machine_load(), "seed": told.seed, "passages": told.passages,
    }  # fmt: skip
    write(found, report(found), told.out)
