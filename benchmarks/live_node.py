"""A live collection in a node, and its searches beside writes: `python -m benchmarks.collections --beside`."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import psutil

from runtime.retrieval.live.collection import create
from runtime.retrieval.live.incoming import Upserted
from runtime.retrieval.live.writer import LiveWriter
from runtime.retrieval.search.client import SearchClient
from runtime.testing.node import Node

DIM = 64
DOCUMENTS, FLUSH = "/v1/collections/notes/documents", "/v1/collections/notes/flush"
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


class Live:
    """A node that searches the live collection `notes`, which is made if it is not there."""

    def __init__(self, home: Path, dim: int = DIM) -> None:
        self.collection, self._config = home / "notes", home / "node.toml"
        if not self.collection.exists():
            create(self.collection, dim, embedder=f"hashing-{dim}")
        self._config.write_text(_CONFIG)
        self.node = Node(self._config)
        self.url = self.node.info.url

    def kill_supervisor(self) -> None:
        """kill -9; its workers end with it. Another node is started then, with the same files."""
        pids = self.node.pids().values()
        self.node.process.kill()
        self.node.process.wait()
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
        self.node = Node(self._config)
        self.url = self.node.info.url

    def wait_ready(self) -> None:
        self.node.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()


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
    with Live(home) as live, SearchClient.connect(home / "run") as client:
        queries = random.standard_normal((256, dim)).astype(np.float32)
        _search(client, queries, 3.0)
        told = {"alone": _search(client, queries, seconds)}
        with _upserting(live.url, vectors, 200.0) as written:
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
                count[0] += 10 * (http.put(DOCUMENTS, json=body).status_code == 200)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
