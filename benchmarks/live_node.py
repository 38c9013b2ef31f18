"""A live collection in a node, and its searches beside writes: `python -m benchmarks.collections --beside`."""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import psutil

from benchmarks.common.report import table
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

    def builders(self) -> list[int]:
        """Processes that merge segments, or seal them beside the writer."""
        try:
            children = psutil.Process(self.node.pid("frontend-0")).children()
            return [child.pid for child in children if "runtime.retrieval.live.build" in child.cmdline()]
        except psutil.Error:
            return []

    def wait_ready(self) -> None:
        self.node.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()


def beside(home: Path, rows: int = 12_000, dim: int = 384, seconds: float = 8.0) -> dict[str, dict[str, float]]:
    """Latencies of searches in ms: alone and beside 200 upserts a second, twice in turn; then alone and beside a merge
    of all rows. Vectors as clustered as real ones."""
    vectors = _clustered(rows, dim)
    create(home / "notes", dim, embedder=f"hashing-{dim}")
    with LiveWriter(home / "notes", background=False, seal_rows=rows, threads=os.cpu_count() or 1) as writer:
        for begin in range(0, rows, 1000):
            part = vectors[begin : begin + 1000]
            writer.upsert([Upserted(str(begin + n), "text", vector=vector) for n, vector in enumerate(part)])
            if (begin + 1000) % (rows // 3) == 0:
                writer.flush()
    batches = round(seconds * RATE / BATCH)
    bodies = _bodies(vectors, 2 * batches)
    queries = vectors[:: max(1, rows // 256)] + np.float32(0.01)
    told: dict[str, dict[str, float]] = {}
    with Live(home) as live, SearchClient.connect(home / "run") as client:
        _search(client, queries, 3.0)
        for begin, turn in ((0, ""), (batches, ", again")):
            told[f"alone{turn}"] = _search(client, queries, seconds)
            with _upserting(live.url, bodies[begin : begin + batches]) as written:
                told[f"beside 200 upserts/s{turn}"] = _search(client, queries, seconds)
            told[f"beside 200 upserts/s{turn}"]["upserts/s"] = round(written() / seconds, 1)
        with httpx.Client(base_url=live.url, timeout=600, trust_env=False) as http:
            http.post(FLUSH).raise_for_status()  # the fourth segment of their size: they become one
            told["beside a merge"] = _search(client, queries, 60.0, lambda: bool(live.builders()))
        told["alone, one segment"] = _search(client, queries, seconds)
    return told


RATE, BATCH = 200, 10


def _clustered(rows: int, dim: int) -> Any:
    random = np.random.default_rng(0)
    centres = random.standard_normal((rows // 50, dim)).astype(np.float32)
    return centres[random.integers(len(centres), size=rows)] + 0.5 * random.standard_normal((rows, dim), np.float32)


def _bodies(vectors: Any, count: int) -> list[bytes]:
    """Batches that replace documents, as JSON: made beforehand, because it is this process that searches."""
    order = np.random.default_rng(1).permutation(len(vectors))
    return [
        json.dumps({
            "documents": [
                {"id": str(row), "text": "t", "vector": np.round(vectors[row], 4).tolist()}
                for row in np.take(order, range(step * BATCH, (step + 1) * BATCH), mode="wrap").tolist()
            ]
        }).encode()
        for step in range(count)
    ]  # fmt: skip


def _search(
    client: SearchClient, queries: Any, seconds: float, going_on: Callable[[], bool] = lambda: True
) -> dict[str, float]:
    """One search after the other, with a pause of 4 ms between two."""
    took, begun = [], time.monotonic()
    for number, query in enumerate(itertools.cycle(queries)):
        begin = time.monotonic()
        if begin >= begun + seconds or (number % 50 == 49 and not going_on()):
            break
        client.search(query, 10)
        took.append((time.monotonic() - begin) * 1e3)
        time.sleep(0.004)
    p50, p99 = np.percentile(took, (50, 99))
    return {
        "p50 ms": round(float(p50), 3), "p99 ms": round(float(p99), 3), "searches": len(took),
        "s": round(time.monotonic() - begun, 1),
    }  # fmt: skip


@contextmanager
def _upserting(url: str, bodies: Sequence[bytes]) -> Iterator[Callable[[], int]]:
    """Batches at `RATE` documents a second, from a process of their own; how many were acknowledged, at the end."""
    context = multiprocessing.get_context("spawn")
    count, begun = context.Value("q", 0), context.Event()
    process = context.Process(target=_upsert, args=(url, list(bodies), count, begun))
    process.start()
    begun.wait()
    try:
        yield lambda: int(count.value)
    finally:
        process.kill()
        process.join()


def _upsert(url: str, bodies: Sequence[bytes], count: Any, begun: Any) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        begun.set()
        begin = time.monotonic()
        for step, body in enumerate(bodies):
            time.sleep(max(0.0, begin + step * BATCH / RATE - time.monotonic()))
            answer = http.put(DOCUMENTS, content=body, headers={"content-type": "application/json"})
            count.value += BATCH * (answer.status_code == 200)


def report_beside(told: dict[str, dict[str, float]]) -> str:
    """As Markdown: each against the ones alone before it."""
    alone = np.mean([told[name]["p99 ms"] for name in ("alone", "alone, again")])
    rows = [
        [name, *(one.get(key, "") for key in ("searches", "p50 ms", "p99 ms")), f"{one['p99 ms'] / alone:.2f}×",
         one.get("upserts/s", "")]
        for name, one in told.items()
    ]  # fmt: skip
    return "\n".join(table(["searches", "how many", "p50 ms", "p99 ms", "of p99 alone", "upserts/s"], rows))
