"""Consistency of results under reloads and kills: no result may mix ids and texts of two builds of a collection.

`python -m benchmarks.reloads --reloads 200 --kills 50` runs a node (a frontend and two pool workers) under a load of
searches, texts and vectors alternating. Each round rebuilds the collection as `--force` does, kills a worker with kill
-9 at a random moment in some rounds, and reloads. Every document names its build in its id and in its text. Counted are
results that mix builds, results of an older build than the last one reloaded before the request, and failed requests,
by their error: separately while a killed frontend is down, since its connections break. Writes reloads.json and
reloads.md.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine_load
from benchmarks.common.report import table, write
from launchers.http_client import post
from runtime.errors import TrinityError
from runtime.node.supervisor.admin import reload_collections
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.documents import Document
from runtime.testing.background import Background
from runtime.testing.node import Node, running

DIM, ROWS, READERS, SEED = 16, 80, 4, 7
_RELOAD_S = 120.0


def build(path: Path, generation: int) -> None:
    """Build the collection with other texts and vectors than the build before."""
    documents = [Document(f"g{generation}-{row}", "", f"text {row} of build {generation}") for row in range(ROWS)]
    vectors = np.random.default_rng(generation).normal(size=(ROWS, DIM)).astype(np.float32)
    Collection.build(documents, path, metric="l2", embedder=f"hashing-{DIM}", vectors=vectors, degree=8, force=True)


class Readers(Background):
    """Threads that search continuously, and their counts."""

    def __init__(self, url: str) -> None:
        super().__init__(partial(self._read, number) for number in range(READERS))
        self._url = url
        self.floor = 1  # the oldest build that any worker may serve
        self.answers, self.mixed, self.stale = 0, 0, 0
        self.frontend_down = False
        self.errors, self.with_frontend = Counter[str](), Counter[str]()
        self.builds: set[int] = set()
        self._lock = threading.Lock()

    def _read(self, number: int) -> None:
        chance = random.Random(SEED + number)
        while not self.ended.is_set():
            body: dict[str, Any] = {"collection": "docs", "k": 5}
            if number % 2:
                body["query"] = f"question {chance.random()}"
            else:
                body["vector"] = [chance.gauss(0, 1) for _ in range(DIM)]
            floor = self.floor
            try:
                self._judge(post(self._url, "/v1/retrieval", body, timeout_s=60)["passages"], floor)
            except TrinityError as error:
                with self._lock:
                    (self.with_frontend if self.frontend_down else self.errors)[f"{error.code}: {error.message}"] += 1
                self.ended.wait(0.02)

    def _judge(self, passages: list[dict[str, Any]], floor: int) -> None:
        found = {int(one["text"].rpartition(" ")[2]) for one in passages}
        found |= {int(one["id"][1:].partition("-")[0]) for one in passages}
        with self._lock:
            self.answers += 1
            self.builds |= found
            self.mixed += len(found) != 1 or len(passages) != 5
            self.stale += min(found) < floor


def kill(node: Node, name: str, after_s: float, readers: Readers) -> None:
    """Kill a worker with kill -9 after a delay."""
    time.sleep(after_s)
    node.wait(lambda: name in node.pids())  # it may still be down after the last kill
    pid = node.pids()[name]
    readers.frontend_down = readers.frontend_down or name == "frontend-0"
    os.kill(pid, signal.SIGKILL)


def measure(reloads: int, kills: int) -> dict[str, Any]:
    """Run all rounds; return the counts."""
    chance, killed, refused = random.Random(SEED), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="trinity-reloads-") as folder:
        docs, config = Path(folder) / "docs", Path(folder) / "node.toml"
        build(docs, 1)
        config.write_text(
            f'[node]\nname = "reloads"\nrun_dir = "{folder}/run"\n[http]\nport = 0\n[pool]\nworkers = 2\n'
            f'[[collections]]\nname = "docs"\npath = "{docs}"\n'
        )
        rounds = set(chance.sample(range(reloads), min(kills, reloads)))
        with running(config, "--quiet") as node, Readers(node.info.url) as readers:
            names = [found.name for found in node.status().workers]
            for number in range(reloads):
                build(docs, number + 2)
                if number in rounds:
                    name = chance.choice(names)
                    killed[name] += 1
                    killer = threading.Thread(target=kill, args=(node, name, chance.random() * 0.6, readers))
                    killer.start()
                try:
                    reload_collections(node.info, "docs", _RELOAD_S)
                    readers.floor = number + 2
                except TrinityError as error:
                    refused.append(error.message)
                if number in rounds:
                    killer.join()
                    node.wait(node.ready)
                    readers.frontend_down = False
                if number % 20 == 19:
                    print(f"{number + 1} of {reloads}: {readers.answers} answers, {readers.mixed} mixed", flush=True)
    return {
        "reloads": reloads, "kills": dict(killed), "refused_reloads": refused, "answers": readers.answers,
        "builds_seen": len(readers.builds), "mixed": readers.mixed, "stale": readers.stale,
        "errors": dict(readers.errors), "errors_while_a_frontend_was_down": dict(readers.with_frontend),
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """Format the counts as Markdown."""
    errors = "; ".join(f"{count} × {what}" for what, count in found["errors"].items()) or "none"
    frontend = "; ".join(f"{count} × {what}" for what, count in found["errors_while_a_frontend_was_down"].items())
    kills = ", ".join(f"{name} {count}" for name, count in sorted(found["kills"].items())) or "none"
    return "\n".join([
        "# Reloads and kills under load", "", f"`{found['command']}`",
        f"Machine: {found['load_before']} before, {found['load_after']} after: shared with other work. Seed {SEED}.",
        "",
        *table(("", "", "bar"), [
            ("collections rebuilt and reloaded", f"{found['reloads']} ({len(found['refused_reloads'])} refused)", ""),
            ("workers killed with kill -9", f"{sum(found['kills'].values())}: {kills}", ""),
            ("results, number of builds", f"{found['answers']:,}, {found['builds_seen']}", ""),
            ("results with ids or texts of two builds", found["mixed"], 0),
            ("results of an older build than the last one reloaded before the request", found["stale"], 0),
            ("failed requests", errors, 0),
            ("the same while a killed frontend was down", frontend or "none", ""),
        ]),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    command = f"python -m benchmarks.reloads --reloads {options.reloads} --kills {options.kills}"
    found: dict[str, Any] = {"command": command, "load_before": machine_load()}
    found |= measure(options.reloads, options.kills)
    found["load_after"] = machine_load()
    write(found, report(found), options.out / "reloads")
    return 1 if found["mixed"] or found["stale"] or found["errors"] or found["refused_reloads"] else 0


if __name__ == "__main__":
    sys.exit(main())
