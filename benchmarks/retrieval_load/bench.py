"""Retrieval by text and by vector over HTTP, beside the raw embedder in the same run.

    python -m benchmarks.retrieval_load --data DIR [--passages 3000] [--seconds 8] [--seed 0] [--out OUT]
        [--part raw --part stage --part probes --part build --part text --part peer --part vectors --part embeddings]
        [--part chats [--model DIR]]

DIR has text/squad11_passages.jsonl.gz and text/squad11_questions_{dev,train}.jsonl.gz. The node has the shipped
defaults, no model, and one collection of the first passages; every question is another one, in random order. The load
generator runs on the same cores. `raw` is the same embedder without a node: the best rate of one text at a time, and of
batches of 64 on as many threads as there are cores. Without a node, too: `stage`, the embedding stage; `probes`,
prefill's texts beside decode's; `build`, the documents of a build, beside fastembed if that is installed. `peer`
is Qdrant's client with fastembed, if both are installed (`pip install qdrant-client fastembed`): with the same model
file, in memory, asked by threads of this process. `chats` are 16 at a time with retrieval from a node with a model:
SmolLM2-135M, or DIR. On a machine that others use, compare processor times: of a node's, all of its processes and the
load generator.
"""

import argparse
import gc
import gzip
import itertools
import json
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import plot, table, write
from benchmarks.retrieval_load.chats import chats_table, measure_chats
from benchmarks.retrieval_load.ingestion import measure_ingestion
from benchmarks.retrieval_load.load import Load, closed_loop, http_requests, open_loop
from benchmarks.retrieval_load.peer import Peer, peer_name
from benchmarks.retrieval_load.probes import measure_probes, probes_table
from benchmarks.retrieval_load.stage import Measured, measure_stage, stage_table
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.embedding.embedder import Embedder, Vectors, embedding_text
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
_MODEL = """
[model]
name = "{model}"
"""
CONNECTIONS = (1, 16, 64)
PARTS = ("raw", "stage", "probes", "build", "text", "peer", "vectors", "embeddings", "chats")
_BATCH = 64
_PER_ROUND = 2  # batches of passages
_OPEN_SHARE = 0.6
_OVERLOAD = 2.0


def raw_rate(model: Embedder, texts: Sequence[str], threads: int, batch: int, seconds: float) -> Measured:
    """Measure the embedder alone, on `threads` threads that each embed batches."""
    done, until = [0] * threads, time.perf_counter() + seconds

    def embed(thread: int) -> None:
        own = itertools.cycle(texts[thread::threads])
        while time.perf_counter() < until:
            model.embed(list(itertools.islice(own, batch)))
            done[thread] += batch

    begin, cpu_s = time.perf_counter(), time.process_time()
    running = [threading.Thread(target=embed, args=(thread,)) for thread in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return Measured(sum(done) / (time.perf_counter() - begin), (time.process_time() - cpu_s) / sum(done) * 1e3)


def raw_rates(model: Embedder, texts: Sequence[str], seconds: float) -> dict[str, Measured]:
    """Return what the embedder takes by how it is called."""
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


def measure(node: Node, requests: Iterator[bytes], seconds: float, seed: int) -> dict[str, Any]:
    """Measure closed loops, Poisson arrivals at a share of the capacity that these showed, and twice that capacity."""
    port = int(node.info.url.rsplit(":", 1)[1])
    closed_loop(port, requests, 16, 1.0)
    results: dict[str, Any] = {
        f"{c} connections": _measured(node.pids().values(), partial(closed_loop, port, requests, c, seconds))
        for c in CONNECTIONS
    }
    capacity = max(row["rate"] for row in results.values())
    for name, share, length_s in (
        (f"Poisson, {_OPEN_SHARE:.0%} of it", _OPEN_SHARE, 4 * seconds), ("Poisson, twice it", _OVERLOAD, seconds),
    ):  # fmt: skip
        results[name] = _measured(
            node.pids().values(), partial(open_loop, port, requests, share * capacity, length_s, seed)
        )
    return results


def _measured(pids: Iterable[int], run: Callable[[], Load]) -> dict[str, Any]:
    """Run a load; return its row, with the processor time of an answer in these processes and this one."""
    processes = [*map(psutil.Process, pids), psutil.Process()]
    before = sum(sum(one.cpu_times()[:2]) for one in processes)
    load = run()
    took_s = sum(sum(one.cpu_times()[:2]) for one in processes) - before
    return _row(load) | {"cpu_ms": took_s / max(len(load.seconds) + load.after, 1) * 1e3}


def _row(load: Load) -> dict[str, Any]:
    refused = sum(count for status, count in load.statuses.items() if status != 200)
    late = max(load.refused_s, default=0.0) * 1e3
    return {
        "rate": load.rate, "p50_ms": load.quantile_ms(0.5), "p99_ms": load.quantile_ms(0.99), "refused": refused,
        "refusal_max_ms": late, "statuses": {str(status): count for status, count in load.statuses.items()},
        "sent_late_p99_ms": float(np.quantile(load.late_s, 0.99)) * 1e3 if load.late_s else 0.0,
    }  # fmt: skip


def run(data: Path, parts: Sequence[str], passages: int, seconds: float, seed: int, model_name: str) -> dict[str, Any]:
    """Measure the parts."""
    questions = [str(one["question"]) for one in _lines(data / "text/squad11_questions_train.jsonl.gz", 40_000)]
    random.Random(seed).shuffle(questions)  # those of an article follow each other, and differ in length from others'
    documents = [
        Document(one["id"], one["title"], one["text"])
        for one in _lines(data / "text/squad11_passages.jsonl.gz", passages)
    ]
    model, texts = load_embedder("all-minilm-l6-v2"), [embedding_text(one.title, one.text) for one in documents]
    results: dict[str, Any] = {}
    gc.freeze()  # a collection of all that would delay the generator
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        vectors = _vectors(model, texts, data, len(documents))
        bulk_load.build(documents, home / "docs", vectors=vectors, embedder="all-minilm-l6-v2", model=model)
        if "raw" in parts:
            results["raw"] = raw_rates(model, questions, seconds / 2)
            print(results["raw"], flush=True)
        if "stage" in parts:
            measured = measure_stage(model, random.Random(seed).sample(questions, int(64 * seconds) // 64 * 64))
            results["stage"] = stage_table(measured)
            print("\n".join(results["stage"]), flush=True)
        if "probes" in parts:
            results["probes"] = probes_table(measure_probes(model, questions, seconds, seed))
            print("\n".join(results["probes"]), flush=True)
        if "build" in parts:
            results["build"] = stage_table(measure_ingestion(model, texts[: _PER_ROUND * _BATCH]))
            print("\n".join(results["build"]), flush=True)
        if "peer" in parts and (peer := peer_name()):
            asked = Peer(texts, vectors, home / "peer")
            results["peer"] = {
                f"{c} clients": _measured((), partial(asked.closed_loop, questions, c, seconds)) for c in CONNECTIONS
            }
            print(peer, json.dumps(results["peer"], indent=1), flush=True)
        if {"text", "vectors", "embeddings"} & set(parts):
            with _node(home, _CONFIG) as node:
                _measure_node(node, model, questions, parts, seconds, seed, results)
        if "chats" in parts:
            with _node(home, _CONFIG + _MODEL.format(model=model_name)) as node:
                results["chats"] = chats_table(measure_chats(node, model_name, questions, 2))
            print("\n".join(results["chats"]), flush=True)
    return results


@contextmanager
def _node(home: Path, config: str) -> Iterator[Node]:
    (home / "node.toml").write_text(config.format(home=home))
    node = Node(home / "node.toml")
    try:
        yield node
    finally:
        node.stop()


def _measure_node(
    node: Node, model: Embedder, questions: Sequence[str], parts: Sequence[str], seconds: float, seed: int,
    results: dict[str, Any],
) -> None:  # fmt: skip
    bodies: list[dict[str, Any]]
    if "embeddings" in parts:  # first: queries go before lists for a while
        bodies = [
            {"model": "all-minilm-l6-v2", "input": questions[-begin - _BATCH : -begin], "encoding_format": "base64"}
            for begin in range(_BATCH, len(questions) // 2, _BATCH)
        ]
        requests, port = iter(_Requests("/v1/embeddings", bodies)), int(node.info.url.rsplit(":", 1)[1])
        closed_loop(port, requests, 4, 1.0)
        results["embeddings"] = {
            f"{c} connections": _measured(node.pids().values(), partial(closed_loop, port, requests, c, seconds))
            for c in (1, 4)
        }
        print(json.dumps(results["embeddings"], indent=1), flush=True)
    if "text" in parts:
        bodies = [{"query": question} for question in questions]
        results["text"] = measure(node, iter(_Requests("/v1/retrieval", bodies)), seconds, seed)
        print(json.dumps(results["text"], indent=1), flush=True)
    if "vectors" in parts:
        bodies = [{"vector": vector.tolist()} for vector in model.embed(questions[:512])]
        results["vectors"] = measure(node, iter(_Requests("/v1/retrieval", bodies)), seconds, seed)
        print(json.dumps(results["vectors"], indent=1), flush=True)


def _vectors(model: Embedder, texts: Sequence[str], data: Path, count: int) -> Vectors:
    known = data / "ann/minilm-384-cosine.base.npy"  # its first rows are the passages' vectors
    if known.exists():
        return np.asarray(np.load(known, mmap_mode="r")[:count], np.float32)
    return model.embed(texts, "passage")


def _lines(path: Path, count: int) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def report(results: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "tokenizers", "uvicorn", "numpy"))
    lines = [
        "# Retrieval by text and by vector", "", f"{results['machine']}; {results['load']}; seed {results['seed']}; "
        f"{results['passages']:,} passages; {packages}.", "",
    ]  # fmt: skip
    if "raw" in results:
        rates = [(way, f"{one.rate:.0f}", f"{one.cpu_ms:.2f}") for way, one in results["raw"].items()]
        lines += [*table(["raw embedder, questions", "texts/s", "processor ms a text"], rates), ""]
    best = [Measured(math.nan, math.nan), *results.get("raw", {}).values()][-1]  # batches on all cores
    for name, title, each in (
        ("text", "text over HTTP", 1), ("peer", peer_name(), 1), ("vectors", "vectors over HTTP", 1),
        ("embeddings", f"lists of {_BATCH} over HTTP", _BATCH),
    ):  # fmt: skip
        if name in results:
            head = [title, "answers/s", "of raw", "processor ms", "raw of it", "p50 ms", "p99 ms", "refused"]
            head += ["latest refusal ms", "sent late, p99 ms"]
            lines += [*table(head, [_cells(way, row, each, best, name) for way, row in results[name].items()]), ""]
    for part in ("stage", "probes", "build", "chats"):
        lines += [*results[part], ""] if part in results else []
    return "\n".join(lines)


def _cells(way: str, row: dict[str, Any], each: int, best: Measured, name: str) -> list[str]:
    share, cpu_ms = f"{row['rate'] * each / best.rate:.2f}", row["cpu_ms"]
    cpu = [f"{cpu_ms:.2f}", f"{best.cpu_ms * each / cpu_ms:.2f}"]
    if name == "vectors":
        share = cpu[1] = ""
    times = [f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"]
    late = f"{row['sent_late_p99_ms']:.1f}"
    return [way, f"{row['rate']:.0f}", share, *cpu, *times, str(row["refused"]), f"{row['refusal_max_ms']:.0f}", late]


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot the answers a second and their times by connections. Does nothing without matplotlib, or without text."""
    if find_spec("matplotlib") is None or "text" not in results:
        return
    with plot(path, 2) as (rates, times):
        for name, label in (("text", "POST /v1/retrieval"), ("peer", "fastembed and Qdrant's client")):
            closed = {way: row for way, row in results.get(name, {}).items() if not way.startswith("Poisson")}
            many = [int(way.split()[0]) for way in closed]
            if many:
                rates.plot(many, [row["rate"] for row in closed.values()], marker="o", label=label)
                (line,) = times.plot(
                    many, [row["p50_ms"] for row in closed.values()], marker="o", label=f"{label}, p50"
                )
                p99 = [row["p99_ms"] for row in closed.values()]
                times.plot(many, p99, marker="o", linestyle="--", color=line.get_color(), label="p99")
        if "raw" in results:
            rates.axhline(
                [*results["raw"].values()][-1].rate, color="gray", linestyle=":", label="the embedder alone, in batches"
            )
        for axis, title in ((rates, "text queries/s"), (times, "ms")):
            axis.set(xscale="log", xlabel="connections", ylabel=title, ylim=(0, None))
            axis.legend(fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--passages", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    results = run(told.data, told.part or PARTS, told.passages, told.seconds, told.seed, told.model)
    described = machine()
    results |= {
        "machine": f"{described['processor']}, {described['cores']} cores, Python {described['python']}",
        "load": machine_load(), "seed": told.seed, "passages": told.passages,
    }  # fmt: skip
    write(results, report(results), told.out)
    if told.out is not None:
        draw(results, told.out.with_name(f"{told.out.name}.png"))
