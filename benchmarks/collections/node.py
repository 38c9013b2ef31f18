"""Searches of a live collection in a node during writes: `python -m benchmarks.collections --beside`."""

import itertools
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import psutil

from benchmarks.common.report import table
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.live import build
from runtime.retrieval.live.collection import create
from runtime.retrieval.live.validation import UpsertDocument
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

_PLAIN = """
[[collections]]
name = "plain"
path = "plain"
"""


class Live:
    """A node that serves the live collection `notes`, created if missing, and the collection `plain`, if it exists.

    more: appended to the configuration.
    """

    def __init__(self, home: Path, dim: int = DIM, more: str = "") -> None:
        self.collection, self._config = home / "notes", home / "node.toml"
        if not self.collection.exists():
            create(self.collection, dim, embedder=f"hashing-{dim}")
        self._config.write_text(_CONFIG + more + (_PLAIN if (home / "plain").exists() else ""))
        self.node = Node(self._config)
        self.url = self.node.info.url

    def kill_supervisor(self) -> None:
        """Kill -9 the supervisor, with which its workers end, and start another node with the same files."""
        pids = self.node.pids().values()
        self.node.process.kill()
        self.node.process.wait()
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
        self.node = Node(self._config)
        self.url = self.node.info.url

    def builders(self) -> list[int]:
        """Return the pids of the writer's build processes."""
        try:
            children = psutil.Process(self.node.pid("frontend-0")).children()
            return [child.pid for child in children if build.__name__ in child.cmdline()]
        except psutil.Error:
            return []

    def wait_ready(self) -> None:
        self.node.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()


def beside(home: Path, rows: int = 6_000, dim: int = 384, seconds: float = 16.0) -> dict[str, dict[str, float]]:
    """Measure latencies of searches in ms: alone; during 200 upserts a second, alternating with the upserts paused;
    during a merge of all rows, alternating with the merge paused; of the resulting segment, alternating with a
    collection that was built from the same vectors. The vectors are clustered like real ones.

    Alternates every half second, so that other load of the machine affects both; written rows stay in both.
    """
    vectors = _clustered(rows, dim)
    create(home / "notes", dim, embedder=f"hashing-{dim}")
    with LiveWriter(home / "notes", background=False, seal_rows=rows, threads=os.cpu_count() or 1) as writer:
        for begin in range(0, rows, 1000):
            part = vectors[begin : begin + 1000]
            writer.upsert([UpsertDocument(str(begin + n), "text", vector=vector) for n, vector in enumerate(part)])
            if (begin + 1000) % (rows // 3) == 0:
                writer.flush()
    Collection.build(vectors, home / "plain", threads=os.cpu_count() or 1)
    queries = itertools.cycle(vectors[:: max(1, rows // 256)] + np.float32(0.01))
    latencies: dict[str, dict[str, float]] = {}
    with Live(home, dim) as live, SearchClient.connect(home / "run") as client:

        def search(collection: str = "notes") -> None:
            client.search(next(queries), 10, collection=collection)

        window(search, 3.0)
        latencies["alone"] = _latencies(window(search, seconds / 2))
        latencies["from an upsert's answer until it is found"] = _latencies(_until_found(live.url, client, dim))
        with _upserting(live.url, _bodies(vectors, round(seconds * RATE / BATCH))) as (writer_pid, written):
            held, going_on = in_turns(partial(window, search, TURN_S), [writer_pid], round(seconds / TURN_S))
        latencies["upserts held up"] = _latencies(held)
        latencies["beside 200 upserts/s"] = _latencies(going_on) | {"upserts/s": round(written() / (seconds / 2), 1)}
        with httpx.Client(base_url=live.url, timeout=600, trust_env=False) as http:
            http.post(FLUSH).raise_for_status()  # the fourth segment of its size, so they are merged
        held, going_on = in_turns(partial(window, search, TURN_S), live.builders(), 1000)
        latencies["merge held up"], latencies["beside a merge"] = _latencies(held), _latencies(going_on)
        window(search, 1.0)  # until the segment is installed
        names = {"a collection that was built": "plain", "one live segment": "notes"}
        took: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(round(seconds / 2 / TURN_S)):
            for name, collection in names.items():
                took[name] += window(partial(search, collection), TURN_S / 2)
        latencies |= {name: _latencies(one) for name, one in took.items()}
    return latencies


TURN_S = 0.5
AGAINST = {
    "beside 200 upserts/s": ("alone", "upserts held up"),
    "beside a merge": ("merge held up",),
    "one live segment": ("a collection that was built",),
}
"""The baselines of each measurement."""


def window(
    search: Callable[[], None],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Search sequentially with pauses of 4 ms; return the milliseconds of each search."""
    took, until = [], clock() + seconds
    while (begin := clock()) < until:
        search()
        took.append((clock() - begin) * 1e3)
        sleep(0.004)
    return took


def in_turns(
    measure: Callable[[], list[float]], pids: Sequence[int], turns: int, kill: Callable[[int, int], None] = os.kill
) -> tuple[list[float], list[float]]:
    """Measure alternately while processes are stopped and while they run, for some turns or until they end."""
    measured: tuple[list[float], list[float]] = ([], [])
    try:
        for turn in range(turns):
            runs = turn % 2
            for pid in pids:
                kill(pid, signal.SIGCONT if runs else signal.SIGSTOP)
            found = measure()
            if all(_ended(pid) for pid in pids):
                break  # they ended within this turn
            measured[runs].extend(found)
    except ProcessLookupError:
        pass
    for pid in pids:
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGCONT)
    return measured


def _until_found(url: str, client: SearchClient, dim: int, count: int = 100) -> list[float]:
    """Return the milliseconds from the response to an upsert until a search finds the document."""
    took = []
    vectors = np.random.default_rng(2).standard_normal((count, dim)).astype(np.float32)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for number, vector in enumerate(vectors):
            document = {"id": f"new {number}", "text": "t", "vector": vector.tolist()}
            http.put(DOCUMENTS, json={"documents": [document]}).raise_for_status()
            begin = time.monotonic()
            while client.search(vector, 1, collection="notes").distances[0] > 1e-3:
                pass
            took.append((time.monotonic() - begin) * 1e3)
    return took


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _latencies(took: Sequence[float]) -> dict[str, float]:
    if not took:
        return {"searches": 0, "p50 ms": math.nan, "p99 ms": math.nan}
    p50, p99 = np.percentile(took, (50, 99))
    return {"searches": len(took), "p50 ms": round(float(p50), 3), "p99 ms": round(float(p99), 3)}


RATE, BATCH = 200, 10


def _clustered(rows: int, dim: int) -> Any:
    random = np.random.default_rng(0)
    centres = random.standard_normal((rows // 50, dim)).astype(np.float32)
    return centres[random.integers(len(centres), size=rows)] + 0.5 * random.standard_normal((rows, dim), np.float32)


def _bodies(vectors: Any, count: int) -> list[bytes]:
    """Return batches that replace documents, as JSON, encoded in advance because this process also searches."""
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


@contextmanager
def _upserting(url: str, bodies: Sequence[bytes]) -> Iterator[tuple[int, Callable[[], int]]]:
    """Send batches at `RATE` documents/s from another process; yield its pid and a count of acknowledged documents."""
    context = multiprocessing.get_context("spawn")
    count, begun = context.Value("q", 0), context.Event()
    process = context.Process(target=_upsert, args=(url, list(bodies), count, begun))
    process.start()
    begun.wait()
    assert process.pid is not None
    try:
        yield process.pid, lambda: int(count.value)
    finally:
        process.kill()
        process.join()


def _upsert(url: str, bodies: Sequence[bytes], count: Any, begun: Any) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        begun.set()
        due = time.monotonic()
        for body in itertools.cycle(bodies):
            due = max(due + BATCH / RATE, time.monotonic())  # skips what was due while it was stopped
            answer = http.put(DOCUMENTS, content=body, headers={"content-type": "application/json"})
            count.value += BATCH * (answer.status_code == 200)
            time.sleep(max(0.0, due - time.monotonic()))


def report_beside(latencies: dict[str, dict[str, float]], load: str = "") -> str:
    """Format the results as Markdown. load: of the machine."""
    rows = []
    for name, one in latencies.items():
        against = [
            f"{one['p50 ms'] / other['p50 ms']:.2f}×, {one['p99 ms'] / other['p99 ms']:.2f}× {baseline}"
            for baseline in AGAINST.get(name, ())
            for other in (latencies[baseline],)
        ]
        numbers = (one.get(key, "") for key in ("searches", "p50 ms", "p99 ms"))
        rows.append([name, *numbers, ", ".join(against), one.get("upserts/s", "")])
    return "\n".join(
        [load, "", *table(["searches", "how many", "p50 ms", "p99 ms", "p50, p99 against", "upserts/s"], rows)]
    ).lstrip()
