"""Other users' requests during a storm of the worst filters: `python -m benchmarks.collections --filter-storm`.

A node serves a collection of 300,000 documents with a unique string, another unique string, a tenant and 8 tags
each. One key, which is restricted to a tenant without documents, sends filters as large as the limits allow, each of
them different, from many connections at once. Other keys search, without a filter and within their tenants, store
documents, and ask for the node's health.
"""

import http.client
import itertools
import json
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.common.report import table
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.testing.node import Node

ROWS, DIM, TENANTS, TAGS, SEGMENTS = 300_000, 32, 20, 200, 3
CLIENTS = (8, 24)
SEARCH, DOCUMENTS, HEALTH = "/v1/retrieval", "/v1/collections/notes/documents", "/health"
_STORM, _READER, _TENANT, _WRITER = "storm-key", "reader-key", "tenant-key", "writer-key"
_KEYS = f"""{_STORM} notes/tenant=nobody
{_READER} notes
{_TENANT} notes/tenant=t3
{_WRITER} notes/tenant=t5
"""
_CONFIG = """
[node]
name = "storm"
run_dir = "run"

[http]
port = 0
drain_notice_s = 0
api_keys_file = "keys"

[[collections]]
name = "notes"
path = "notes"
"""
_BODIES = 1500
_WARM_UP_S, _PAUSE_S = 2.0, 1.0
_BETWEEN_S = 0.02  # pause of other users between two requests
BAR_FACTOR, BAR_MS = 3.0, 20.0
"""p99 of others' searches may be this many times that alone, plus so many ms."""


def build(home: Path, rows: int) -> None:
    """Create the collection, unless it exists."""
    if (home / "notes").exists():
        return
    numbers, vectors = random.Random(0), np.random.default_rng(0)
    create(home / "notes", DIM, metric="l2", degree=16, embedder=f"hashing-{DIM}")
    with CollectionWriter(home / "notes", background=False, seal_rows=rows, threads=2) as writer:
        for begin in range(0, rows, 1000):
            batch = vectors.standard_normal((1000, DIM)).astype(np.float32)
            writer.upsert([
                UpsertDocument(str(begin + n), attributes=_attributes(begin + n, numbers), vector=vector)
                for n, vector in enumerate(batch)
            ])  # fmt: skip
            if (begin + 1000) % (rows // SEGMENTS) == 0:
                writer.flush()


def _attributes(row: int, numbers: random.Random) -> dict[str, Any]:
    return {
        "unique": _word(numbers),
        "other": _word(numbers),
        "tenant": f"t{row % TENANTS}",
        "tags": [f"g{tag}" for tag in numbers.sample(range(TAGS), 8)],
    }


def _word(numbers: random.Random) -> str:
    return f"{numbers.getrandbits(64):016x}"


def worst_filter(number: int, numbers: random.Random) -> dict[str, Any]:
    """Return one of the filters that take longest, near the limits of comparisons and of bytes."""
    compare = ("gt", "gte", "lt", "lte")
    match number % 3:
        case 0:  # many comparisons of a string that is different in each document
            parts = [
                _comparison(compare[n % 2], "unique", _word(numbers)) for n in range(127)
            ]  # and one for the tenant
            return {"type": "or", "filters": parts}
        case 1:  # lists of which one element suffices, in turn
            parts = [_comparison("in", "tags", _tags(numbers)) for _ in range(120)]
            return {"type": "and", "filters": parts}
    pairs = [
        [_comparison(compare[n % 4], key, _word(numbers)) for n, key in enumerate(("unique", "other"), number + first)]
        for first in range(63)
    ]
    return {"type": "or", "filters": [{"type": "and", "filters": pair} for pair in pairs]}


def _comparison(operator: str, key: str, value: object) -> dict[str, Any]:
    return {"type": operator, "key": key, "value": value}


def _tags(numbers: random.Random) -> list[str]:
    return [f"g{tag}" for tag in numbers.sample(range(TAGS), 10)]


def _storm_body(kind: str, number: int, numbers: random.Random) -> bytes:
    wanted = worst_filter(number, numbers)
    vector = [round(numbers.gauss(0, 1), 3) for _ in range(DIM)]
    match kind:
        case "searches":
            body: dict[str, Any] = {"vector": vector, "k": 10, "filter": wanted}
        case "hybrid searches":
            body = {"query": f"words {number}", "k": 10, "filter": wanted, "hybrid": 0.5}
        case _:
            body = {"filter": wanted}
    return json.dumps(body).encode()


KINDS = {"searches": ("POST", SEARCH), "hybrid searches": ("POST", SEARCH), "deletes": ("DELETE", DOCUMENTS)}
"""What a storm sends."""


def _storm(url: str, kind: str, clients: int, counts: Any, stop: Any, seed: int) -> None:
    """Send requests from so many connections until `stop`; put the statuses into `counts`."""
    numbers = random.Random(seed)
    bodies = [_storm_body(kind, number, numbers) for number in range(_BODIES)]
    taken, statuses = itertools.count(), Counter[int]()

    def send() -> None:
        request = Request(url, _STORM)
        while not stop.is_set():
            try:
                status = request(*KINDS[kind], bodies[next(taken) % _BODIES])[0]
            except OSError:
                status = 0
                request = Request(url, _STORM)
            statuses[status] += 1

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    counts.put("begun")
    for thread in threads:
        thread.join()
    counts.put(dict(statuses))


class Request:
    """One connection to the node with one key."""

    def __init__(self, url: str, key: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def __call__(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        self._connection.request(method, path, body or None, self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


class Others:
    """The other users: each measurement sends requests one after another, with pauses of 20 ms."""

    def __init__(self, url: str) -> None:
        self._numbers, self._url = random.Random(7), url
        self._requests: list[Request] = []
        self.measurements: dict[str, Callable[[], None]] = {
            "search": self._sender(_READER, "POST", SEARCH, self._search),
            "search of a tenant": self._sender(_TENANT, "POST", SEARCH, self._search),
            "health": self._sender(_READER, "GET", HEALTH, lambda: b""),
            "store a document": self._sender(_WRITER, "PUT", DOCUMENTS, self._document),
        }

    def _vector(self) -> list[float]:
        return [round(self._numbers.gauss(0, 1), 3) for _ in range(DIM)]

    def _search(self) -> bytes:
        return json.dumps({"vector": self._vector(), "k": 10}).encode()

    def _document(self) -> bytes:
        one = {"id": f"own {self._numbers.randrange(200)}", "text": "t", "vector": self._vector()}
        return json.dumps({"documents": [one]}).encode()

    def _sender(self, key: str, method: str, path: str, body: Callable[[], bytes]) -> Callable[[], None]:
        request = Request(self._url, key)
        self._requests.append(request)

        def send() -> None:
            status, answer = request(method, path, body())
            if status != 200:
                raise RuntimeError(f"{method} {path}: {status} {answer[:200]!r}")

        return send

    def close(self) -> None:
        for request in self._requests:
            request.close()

    def measure(self, seconds: float) -> dict[str, list[float]]:
        """Return the milliseconds of the requests of each measurement, all of them at the same time."""
        latencies: dict[str, list[float]] = {}
        failures: list[BaseException] = []

        def run(name: str) -> None:
            try:
                latencies[name] = _window(self.measurements[name], seconds)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(name,)) for name in self.measurements]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return latencies


@contextmanager
def _storming(url: str, kind: str, clients: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run a storm in another process; the yielded function ends it and returns what it has sent."""
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Queue(), context.Event()
    process = context.Process(target=_storm, args=(url, kind, clients, counts, stop, clients))
    process.start()
    assert counts.get(timeout=60) == "begun"
    begin = time.monotonic()

    def end() -> dict[str, Any]:
        seconds = time.monotonic() - begin
        stop.set()
        statuses = counts.get(timeout=120)
        return {"requests/s": round(sum(statuses.values()) / seconds, 1), "statuses": statuses}

    try:
        yield end
    finally:
        stop.set()
        process.join(30)
        process.kill()
        process.join()


def filter_storm(
    home: Path, rows: int = ROWS, seconds: float = 6.0, clients: Sequence[int] = CLIENTS
) -> dict[str, Any]:
    """Measure others' requests alone and during each storm. Raises `RuntimeError` if one of them fails."""
    build(home, rows)
    (home / "keys").write_text(_KEYS)
    (home / "node.toml").write_text(_CONFIG)
    node = Node(home / "node.toml")
    try:
        with closing(Others(node.info.url)) as others:
            return _measured(node, others, rows, seconds, clients)
    finally:
        node.stop()


def _measured(node: Node, others: Others, rows: int, seconds: float, sizes: Sequence[int]) -> dict[str, Any]:
    pids = node.pids()
    others.measure(_WARM_UP_S)
    _wait_for_keywords(node.info.url)
    results: dict[str, Any] = {"rows": rows, "alone": _percentiles(others.measure(seconds)), "storms": []}
    for kind, clients in itertools.product(KINDS, sizes):
        with _storming(node.info.url, kind, clients) as end:
            time.sleep(_PAUSE_S)
            latencies = _percentiles(others.measure(seconds))
            sent = end()
        restarts = [name for name, pid in pids.items() if node.pids().get(name) != pid]
        results["storms"].append({"kind": kind, "clients": clients, **sent, "others": latencies, "restarts": restarts})
        print(results["storms"][-1], flush=True)
    return results


def _wait_for_keywords(url: str) -> None:
    """Wait until the keyword index, which the first hybrid search begins to build, is ready."""
    body = json.dumps({"query": "words", "k": 1, "hybrid": 0.5}).encode()
    with closing(Request(url, _READER)) as request:
        while request("POST", SEARCH, body)[0] != 200:
            time.sleep(0.2)


def _percentiles(latencies: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"n": len(took), "p50": round(float(np.median(took)), 2), "p99": round(float(np.percentile(took, 99)), 2)}
        for name, took in latencies.items()
    }


def _window(request: Callable[[], None], seconds: float) -> list[float]:
    """Send requests one at a time, with pauses; return the milliseconds of each."""
    took, until = [], time.monotonic() + seconds
    while (begin := time.monotonic()) < until:
        request()
        took.append((time.monotonic() - begin) * 1e3)
        time.sleep(_BETWEEN_S)
    return took


def report_storm(results: dict[str, Any], load: str = "") -> str:
    """Format the results as Markdown."""
    names = list(results["alone"])
    rows = [["alone", "", *(_cell(results["alone"][name]) for name in names), ""]]
    for one in results["storms"]:
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(one["statuses"].items()))
        cells = (_cell(one["others"][name]) for name in names)
        rows.append([f"{one['clients']} × {one['kind']}", f"{one['requests/s']}/s ({statuses})", *cells,
                     ", ".join(one["restarts"]) or "none"])  # fmt: skip
    bars = [f"{name} {BAR_FACTOR * results['alone'][name]['p99'] + BAR_MS:.0f}" for name in names]
    return "\n".join([
        f"{results['rows']:,} documents in a node on two cores, with the clients; {load}. p50 / p99 in ms of others' "
        "requests, four connections with pauses of 20 ms",
        "",
        *table(["storm", "answered", *names, "restarts"], rows),
        "",
        f"Bars for p99, {BAR_FACTOR:g} times alone and {BAR_MS:g} ms: {', '.join(bars)}",
    ])  # fmt: skip


def _cell(one: dict[str, float]) -> str:
    return f"{one['p50']:.1f} / {one['p99']:.1f}"
