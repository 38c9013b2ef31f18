"""A document of a node is replaced 20 times a second: `python -m benchmarks.collections --replacements`.

Readers search for it over HTTP, through the rings and in chats. A search that finds neither the old nor the new version
has *vanished*. The writer's own next search after each response must find the new version; a *stale* one does not.
Meanwhile the log is sealed again and again, so that versions move from the log to segments and are merged away.
"""

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.machine import machine_load
from benchmarks.common.report import table
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.search.client import SearchClient
from runtime.testing.background import Background
from runtime.testing.live_node import DIM, DOCUMENTS, FLUSH
from runtime.testing.node import Node, running
from runtime.testing.tiny_model import make_tiny_llama

_CONFIG = """
[node]
name = "replacements"
run_dir = "{home}/run"

[http]
port = 0
drain_notice_s = 0

[model]
name = "{home}/tiny"
context_tokens = 2048

[pool]
workers = {workers}

[[collections]]
name = "notes"
path = "{home}/notes"
shards = {shards}
"""

NODES = {"one pool worker": (1, 1), "two replicas": (2, 1), "two shards": (2, 2)}
"""Nodes by name: pool workers and shards."""
RATE = 20
_SEAL_S = 0.7
_OTHERS = 300
_TEXT = "the canteen serves lunch from noon"
_FILTER = {"type": "eq", "key": "kind", "value": "menu"}
_NEAR = 0.5
"""Distance within which a row is a version of the document; the others share no word with it."""
_CHAT, _RINGS, _ALL = "chat", "rings", "all"
_CHATS = 4  # every so many of the writer's next searches is a chat
_WRITES = 300  # of the latencies
_PAUSED_WRITES = 20
Json = dict[str, Any]
Seen = int | None
"""The version that a search found; None: none."""


def _retrieval(**more: Any) -> tuple[str, Json]:
    return "/v1/retrieval", {"collection": "notes", "query": _TEXT, "k": 4, **more}


SEARCHES: Mapping[str, tuple[str, Json]] = {
    "vector": _retrieval(),
    "nearest one": _retrieval(k=1),
    "filtered": _retrieval(filter=_FILTER),
    "hybrid": _retrieval(hybrid=True, k=1),
    "keywords": _retrieval(hybrid=1.0, k=1),
    "vector store": ("/v1/vector_stores/notes/search", {"query": _TEXT, "max_num_results": 4}),
    _CHAT: (
        "/v1/chat/completions",
        {
            "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": _TEXT}],
            "retrieval": {"collection": "notes", "k": 4},
        },
    ),
}  # fmt: skip
"""Searches over HTTP, by kind: path and body."""


def document(version: int) -> Json:
    """Return a version of the document: the same words, in another order with each version."""
    words = _TEXT.split()
    turn = version % len(words)
    attributes = {"kind": "menu", "version": version}
    return {"id": "menu", "text": " ".join(words[turn:] + words[:turn]), "attributes": attributes}


def versions_in(answer: Json) -> list[int]:
    """Return the versions of the document in the response to a search or a chat."""
    found = answer.get("data") or answer.get("passages") or answer.get("retrieval", {}).get("passages") or []
    return [one["attributes"]["version"] for one in found if one["id"] == "menu"]


@dataclass
class Replaced:
    """Counts of one node, by kind of search. `stale`: own next searches that found no version as new as the write."""

    searches: Counter[str] = field(default_factory=Counter)
    vanished: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    writes: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    """Writes alone, beside the searches, with a paused pool: milliseconds, and whether every pool had applied them."""

    def to_json(self) -> Json:
        """Return the results as JSON."""
        return {
            "searches": dict(self.searches),
            "vanished": {kind: self.vanished[kind] for kind in self.searches},
            "own": dict(self.own),
            "stale": {kind: self.stale[kind] for kind in self.own},
            "failed": self.failed[:20],
            "write ms": {name: _latencies(writes) for name, writes in self.writes.items()},
        }


def _latencies(writes: Sequence[tuple[float, bool]]) -> Json:
    p50, p99, most = (round(value, 2) for value in np.percentile([took for took, _ in writes], (50, 99, 100)).tolist())
    invisible = sum(not visible for _, visible in writes)
    return {"writes": len(writes), "p50": p50, "p99": p99, "max": most, "invisible": invisible}


class _Client:
    """One user: a connection of its own."""

    def __init__(self, node: Node, results: Replaced) -> None:
        self._http = httpx.Client(base_url=node.info.url, timeout=60, trust_env=False)
        self._results = results

    def search(self, kind: str) -> Seen:
        path, body = SEARCHES[kind]
        answer = self._http.post(path, json=body)
        if answer.status_code != 200:
            self._results.failed.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
            return None
        versions = versions_in(answer.json())
        if len(versions) > 1:
            self._results.failed.append(f"{kind}: versions {versions} in one result")
        return max(versions, default=None)

    def write(self, version: int) -> tuple[float, bool]:
        """Replace the document; return the milliseconds until the response, and whether it is visible then."""
        begin = time.perf_counter()
        answer = self.put([document(version)])
        return (time.perf_counter() - begin) * 1e3, bool(answer.get("visible"))

    def put(self, documents: Sequence[Json]) -> Json:
        answer = self._http.put(DOCUMENTS, json={"documents": documents}).raise_for_status()
        found: Json = answer.json()
        return found

    def seal(self) -> None:
        self._http.post(FLUSH).raise_for_status()


def replacements(
    home: Path, nodes: Iterable[str], say: Callable[[str], object], searches: int = 5_000, own: int = 500
) -> dict[str, Json]:
    """Return the results of some of the `NODES`."""
    found = {}
    for name in nodes:
        place, load = home / name.replace(" ", "-"), machine_load()
        place.mkdir()
        found[name] = replaced(place, *NODES[name], searches=searches, own=own).to_json() | {"load": load}
        say(f"{name}: {found[name]}")
    return found


def is_perfect(results: Mapping[str, Json]) -> bool:
    """Return whether no search missed the document, and none failed."""
    return not any(sum(one[count].values()) for one in results.values() for count in ("vanished", "stale")) and not any(
        one["failed"] for one in results.values()
    )


def replaced(home: Path, workers: int, shards: int, *, searches: int, own: int) -> Replaced:
    """Replace the document of a node until readers have searched over HTTP, and the writer has searched itself, this
    often."""
    results = Replaced()
    make_tiny_llama(home / "tiny")
    create(home / "notes", DIM, embedder=f"hashing-{DIM}", shards=shards)
    config = home / "node.toml"
    config.write_text(_CONFIG.format(home=home, workers=workers, shards=shards))
    with running(config) as node:
        client = _Client(node, results)
        others = [{"id": f"other-{n}", "text": f"another text with number {n}"} for n in range(_OTHERS)]
        client.put(others)
        versions = itertools.count()
        client.write(next(versions))
        _until_warm(client, results)
        results.writes["alone"] = [client.write(next(versions)) for _ in range(_WRITES)]
        _beside_readers(node, client, versions, results, searches, own)
        with _paused(node, "pool-0"):
            results.writes["a paused pool"] = [client.write(next(versions)) for _ in range(_PAUSED_WRITES)]
    return results


def _beside_readers(
    node: Node, client: _Client, versions: "itertools.count[int]", results: Replaced, searches: int, own: int
) -> None:
    """Replace the document `RATE` times a second while readers search for it and segments are sealed and merged."""
    background: Background
    took = results.writes["beside searches"] = []

    def read(kinds: Sequence[str]) -> None:
        reader = _Client(node, results)
        for kind in itertools.cycle(kinds):
            if background.ended.is_set():
                return
            results.vanished[kind] += reader.search(kind) is None
            results.searches[kind] += 1

    def read_rings() -> None:
        vector = HashingEmbedder(DIM).embed([_TEXT], "query")[0]
        with SearchClient.connect(node.run_dir) as rings:
            while not background.ended.is_set():
                nearest = rings.search(vector, 1, collection="notes")
                results.vanished[_RINGS] += not (len(nearest.ids) and nearest.distances[0] < _NEAR)
                results.searches[_RINGS] += 1
                background.ended.wait(0.002)

    def seal() -> None:
        sealer = _Client(node, results)
        while not background.ended.wait(_SEAL_S):
            sealer.seal()

    kinds = [kind for kind in SEARCHES if kind != _CHAT]
    background = Background([partial(read, kinds), partial(read, [_CHAT]), read_rings, seal])
    with background:
        due = time.monotonic()
        for kind in _own_kinds():
            version = next(versions)
            took.append(client.write(version))
            found = client.search(kind)
            results.own[kind] += 1
            results.stale[kind] += found is None or found < version
            if results.searches.total() - results.searches[_RINGS] >= searches and results.own.total() >= own:
                return
            due = max(due + 1 / RATE, time.monotonic())
            background.ended.wait(due - time.monotonic())


def _own_kinds() -> Iterator[str]:
    """Yield the kinds of the writer's own searches: mostly those that take no longer than a write is due."""
    kinds = itertools.cycle(kind for kind in SEARCHES if kind != _CHAT)
    for number in itertools.count(1):
        yield next(kinds) if number % _CHATS else _CHAT


def _until_warm(client: _Client, results: Replaced) -> None:
    """Search in every way until it succeeds: the first hybrid search of a process builds its index."""
    for kind in SEARCHES:
        while client.search(kind) is None:
            time.sleep(0.05)
    results.failed.clear()


@contextmanager
def _paused(node: Node, worker: str) -> Iterator[None]:
    pid = node.pid(worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def report(results: Mapping[str, Json]) -> str:
    """Format the results of several nodes as Markdown."""
    kinds = list(dict.fromkeys(kind for one in results.values() for kind in one["searches"]))
    counts = [
        [kind, *(_of(one["vanished"], one["searches"], kind) for one in results.values()),
         *(_of(one["stale"], one["own"], kind) for one in results.values())]
        for kind in [*kinds, _ALL]
    ]  # fmt: skip
    latencies = [
        [f"{name}, {circumstance}", *(took[key] for key in ("writes", "p50", "p99", "max", "invisible"))]
        for name, one in results.items()
        for circumstance, took in one["write ms"].items()
    ]
    return "\n".join([
        f"One document, replaced {RATE} times a second; {_loads(results)}. Searches that found neither version, and "
        "own next searches that did not find the new one:",
        "",
        *table(["searches", *results, *(f"own, {name}" for name in results)], counts),
        "",
        *table(["writes, ms until the response", "how many", "p50", "p99", "longest", "not visible yet"], latencies),
    ])  # fmt: skip


def _loads(results: Mapping[str, Json]) -> str:
    return "; ".join(f"{name}: {one['load']}" for name, one in results.items())


def _of(few: Mapping[str, int], many: Mapping[str, int], kind: str) -> str:
    if kind == _ALL:
        return f"{sum(few.values())} of {sum(many.values())}"
    return f"{few[kind]} of {many[kind]}" if kind in many else ""
