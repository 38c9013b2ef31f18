"""A live collection in a node: killed at random while it is written to, and searched beside writes and merges.

`python -m benchmarks.collections --kills N` and `--beside` run this; the end-to-end test runs a few kills of it.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from runtime.retrieval.live.collection import create
from runtime.retrieval.live.incoming import Upserted
from runtime.retrieval.live.writer import LiveWriter
from runtime.retrieval.search.client import SearchClient
from runtime.testing.node import Node

DIM = 64
VICTIMS = ("frontend-0", "pool-0")
_CONFIG = """
[node]
name = "live"
run_dir = "run"

[http]
port = 0

[[collections]]
name = "notes"
path = "notes"
"""
_DOCUMENTS = "/v1/collections/notes/documents"
_NAMES = 40  # that a writer uses over and over


class Writers:
    """Threads that upsert and delete, each documents of its own; what is acknowledged is remembered."""

    def __init__(self, url: str, count: int = 2) -> None:
        self._url, self._stop = url, threading.Event()
        self.known: list[dict[str, str | None]] = [{} for _ in range(count)]  # text by id, None: deleted
        self.doubtful: list[dict[str, set[str | None]]] = [{} for _ in range(count)]  # asked since, not acknowledged
        self.acknowledged = 0
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        known, doubtful = self.known[number], self.doubtful[number]
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            for step in itertools.count():
                if self._stop.is_set():
                    return
                name = f"w{number}-{step % _NAMES}"
                text = None if step % 5 == 4 else f"text {step} of {name}"
                doubtful.setdefault(name, set()).add(text)
                if _write(http, name, text):
                    known[name] = text
                    doubtful[name].clear()
                    self.acknowledged += 1

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _write(http: httpx.Client, name: str, text: str | None) -> bool:
    try:
        if text is None:
            return http.request("DELETE", _DOCUMENTS, json={"ids": [name]}).status_code == 200
        return http.put(_DOCUMENTS, json={"documents": [{"id": name, "text": text}]}).status_code == 200
    except httpx.HTTPError:
        return False


def found(http: httpx.Client, text: str, k: int = 60) -> dict[str, str]:
    """Texts by id, once the node answers."""
    while True:
        try:
            answer = http.post("/v1/retrieval", json={"query": text, "k": k})
            if answer.status_code == 200:
                return {one["id"]: one["text"] for one in answer.json()["passages"]}
        except httpx.HTTPError:
            pass


@dataclass
class Killed:
    """What became of it. wrong: documents that are not as they were acknowledged, or answers that mix two."""

    kills: int = 0
    acknowledged: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def live_node(home: Path, dim: int = DIM) -> Iterator[Node]:
    """A node that searches the live collection `notes`, which is made if it is not there."""
    if not (home / "notes").exists():
        create(home / "notes", dim, embedder=f"hashing-{dim}")
    (home / "node.toml").write_text(_CONFIG)
    node = Node(home / "node.toml")
    try:
        yield node
    finally:
        node.stop()


def kill(
    home: Path, kills: int, writes: int = 30, seed: int = 0, say: Callable[[str], object] = lambda _: None
) -> Killed:
    """Kill the writer or the pool every `writes` acknowledged writes, under searches; then look at every document."""
    chance, told = random.Random(seed), Killed()
    with live_node(home) as node, httpx.Client(base_url=node.info.url, timeout=60, trust_env=False) as http:
        writers = Writers(node.info.url)
        try:
            for number in range(kills):
                _until(node, writers, writers.acknowledged + writes)
                told.wrong += [f"{n}: {text!r}" for n, text in found(http, "text").items() if not text.endswith(n)]
                victim = VICTIMS[number % 2] if kills < 10 else chance.choice(VICTIMS)
                os.kill(node.pid(victim), signal.SIGKILL)
                told.kills += 1
                say(f"{told.kills} kills, {writers.acknowledged} writes acknowledged, {len(told.wrong)} wrong")
            _until(node, writers, writers.acknowledged + writes)
        finally:
            writers.stop()
        node.wait_ready()
        told.acknowledged = writers.acknowledged
        until = time.monotonic() + 30
        while (wrong := _wrong(http, writers)) and time.monotonic() < until:
            pass
        told.wrong += wrong
    return told


def _until(node: Node, writers: Writers, acknowledged: int) -> None:
    node.wait(lambda: writers.acknowledged >= acknowledged, what="writes")


def _wrong(http: httpx.Client, writers: Writers) -> list[str]:
    """Acknowledged texts that are not found by themselves, and deleted documents that are found."""
    return [
        f"{name}: {seen!r}, not {text!r}"
        for known, doubtful in zip(writers.known, writers.doubtful, strict=True)
        for name, text in known.items()
        if (seen := found(http, text or f"text of {name}").get(name)) != text and seen not in doubtful[name]
    ]


def beside(home: Path, rows: int = 20_000, dim: int = 384, seconds: float = 15.0) -> dict[str, dict[str, float]]:
    """Latencies of searches in ms: alone, beside 200 upserts a second (which have segments sealed), and alone again."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((rows, dim)).astype(np.float32)
    create(home / "notes", dim, embedder=f"hashing-{dim}")
    with LiveWriter(home / "notes", background=False, seal_rows=rows) as writer:
        for begin in range(0, rows, 1000):
            part = vectors[begin : begin + 1000]
            writer.upsert([Upserted(str(begin + n), "text", vector=vector) for n, vector in enumerate(part)])
            if begin % (rows // 4) == 0 and begin:
                writer.flush()
        writer.flush()
    with live_node(home) as node, SearchClient.connect(home / "run") as client:
        queries = random.standard_normal((256, dim)).astype(np.float32)
        _search(client, queries, 3.0)
        told = {"alone": _search(client, queries, seconds)}
        with _upserting(node.info.url, vectors, 200.0) as written:
            told["beside 200 upserts/s"] = _search(client, queries, seconds) | {"upserts/s": written() / seconds}
        told["alone again"] = _search(client, queries, seconds)
    return told


def _search(client: SearchClient, queries: Any, seconds: float, gap_s: float = 0.004) -> dict[str, float]:
    """One search after the other, with a pause between two."""
    took, end = [], time.monotonic() + seconds
    for query in itertools.cycle(queries):
        begin = time.monotonic()
        if begin >= end:
            break
        client.search(query, 10)
        took.append((time.monotonic() - begin) * 1e3)
        time.sleep(gap_s)
    p50, p99 = np.percentile(took, (50, 99))
    return {"p50 ms": round(float(p50), 3), "p99 ms": round(float(p99), 3), "searches": len(took)}


@contextmanager
def _upserting(url: str, vectors: Any, rate: float) -> Iterator[Callable[[], int]]:
    """Batches of ten, so many documents a second; how many were acknowledged."""
    stop, count = threading.Event(), [0]

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            begin = time.monotonic()
            for step in itertools.count():
                if stop.wait(max(0.0, begin + step * 10 / rate - time.monotonic())):
                    return
                rows = [(step * 10 + n) % len(vectors) for n in range(10)]
                body = {"documents": [{"id": str(row), "text": "t", "vector": vectors[row].tolist()} for row in rows]}
                count[0] += 10 * (http.put(_DOCUMENTS, json=body).status_code == 200)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
