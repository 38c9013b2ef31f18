"""Crash test of a collection: a node's processes are killed during writes, searches, seals and merges.

Two threads repeatedly write documents of their own, and a third flushes, so that segments are merged continually. Each
kill has a victim and a moment: any, during a seal (a directory exists that no process builds), or while the process of
a merge runs. After each kill, once the node is ready again, every document is compared with its acknowledged state.

`--kills` of pytest says how often; a few kills are of different kinds.
"""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import httpx

from runtime.retrieval.collections.segment import CONTENTS
from runtime.testing.writable_node import DOCUMENTS, FLUSH, WritableNode

Moment = Literal["any", "seal", "merge"]
Victim = Literal["frontend-0", "pool-0", "supervisor", "builder"]
_NAMES = 30  # that a writer reuses; one search returns those of both writers
_ALL = 64
_VISIBLE_S = 60.0  # generous, for a busy machine: it is not measured
_LONGEST_MERGE_S = 1.5
_LONGEST_SEAL_S = 0.02


class Kill(NamedTuple):
    """A victim and a moment. The frontend writes and seals, the builder merges."""

    victim: Victim
    moment: Moment


KILLS = (
    Kill("frontend-0", "seal"),
    Kill("supervisor", "merge"),
    Kill("pool-0", "any"),
    Kill("builder", "merge"),
    Kill("frontend-0", "merge"),
    Kill("frontend-0", "any"),
    Kill("supervisor", "any"),
    Kill("pool-0", "merge"),
    Kill("supervisor", "seal"),
)


@dataclass
class Killed:
    """Results. wrong: documents that differ from their acknowledged state, or results that mix two documents."""

    kills: Counter[Kill] = field(default_factory=Counter)
    acknowledged: int = 0
    unacknowledged: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Writer:
    """A thread that upserts and deletes documents of its own, and records acknowledged writes."""

    def __init__(self, writable: WritableNode, number: int) -> None:
        self._writable, self._number, self._stop = writable, number, threading.Event()
        self.known: dict[str, str | None] = {}  # text by id, None: deleted
        self.doubtful: dict[str, set[str | None]] = {}  # unacknowledged writes since
        self.acknowledged = self.unacknowledged = 0
        self.between = threading.Lock()
        """Held during a write: its holder sees acknowledged writes, and none is in progress."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as http:
            for step in itertools.count():
                if self._stop.is_set():
                    return
                name = f"w{self._number}-{step % _NAMES}"
                text = None if step % 7 == 6 else f"text {step} of {name}"
                with self.between:
                    self.doubtful.setdefault(name, set()).add(text)
                    if self._write(http, name, text):
                        self.known[name] = text
                        self.doubtful[name].clear()
                        self.acknowledged += 1
                        continue
                    self.unacknowledged += 1
                self._stop.wait(0.05)

    def _write(self, http: httpx.Client, name: str, text: str | None) -> bool:
        url = self._writable.url + DOCUMENTS
        try:
            if text is None:
                return http.request("DELETE", url, json={"ids": [name]}).status_code == 200
            return http.put(url, json={"documents": [{"id": name, "text": text}]}).status_code == 200
        except httpx.HTTPError:
            return False

    def decide(self, found: dict[str, str]) -> None:
        """Settle unacknowledged writes as found: from now on their state must not change."""
        for name, texts in self.doubtful.items():
            if texts:
                self.known[name] = found.get(name)
                texts.clear()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Sealer:
    """A thread that flushes repeatedly: four such segments are merged into one."""

    def __init__(self, writable: WritableNode, chance: random.Random) -> None:
        self._writable, self._chance, self._stop = writable, chance, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._stop.wait(self._chance.uniform(0.02, 0.2)):
                try:
                    http.post(self._writable.url + FLUSH)
                except httpx.HTTPError:
                    self._stop.wait(0.05)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def kill(
    home: Path, kills: int, writes: int = 30, seed: int = 0, say: Callable[[str], object] = lambda _: None
) -> Killed:
    """Kill a process after every `writes` acknowledged writes, at the moment that the kill requires."""
    begin, results, chance = time.monotonic(), Killed(), random.Random(seed)
    with WritableNode(home) as writable:
        writers = [Writer(writable, number) for number in range(2)]
        sealer = Sealer(writable, random.Random(seed))
        try:
            for one in itertools.islice(_order(chance), kills):
                _until(writable, writers, sum(writer.acknowledged for writer in writers) + writes)
                _kill(writable, one, chance)
                results.kills[one] += 1
                results.wrong += (wrong := _compare(writable, writers, results))
                say(f"{results.kills.total()} kills ({one.victim}, {one.moment}), {len(wrong)} wrong: {wrong[:3]}")
            _until(writable, writers, sum(writer.acknowledged for writer in writers) + writes)
            results.wrong += _compare(writable, writers, results)
        finally:
            sealer.stop()
            for writer in writers:
                writer.stop()
    results.acknowledged = sum(writer.acknowledged for writer in writers)
    results.unacknowledged = sum(writer.unacknowledged for writer in writers)
    results.seconds = time.monotonic() - begin
    return results


def _order(chance: random.Random) -> "itertools.chain[Kill]":
    """Yield the kills in order, then shuffled, endlessly."""
    return itertools.chain(KILLS, itertools.chain.from_iterable(chance.sample(KILLS, len(KILLS)) for _ in iter(int, 1)))


def _until(writable: WritableNode, writers: list[Writer], acknowledged: int) -> None:
    writable.node.wait(lambda: sum(writer.acknowledged for writer in writers) >= acknowledged, what="writes")


def _kill(writable: WritableNode, one: Kill, chance: random.Random) -> None:
    """Wait for the moment and a random delay; kill if the moment has not passed."""
    while True:
        if one.moment == "any":
            time.sleep(chance.uniform(0.0, 0.2))
        elif one.moment == "merge":
            writable.node.wait(writable.builders, what="a merge")
            time.sleep(chance.uniform(0.0, _LONGEST_MERGE_S))
        else:
            writable.node.wait(lambda: _unfinished(writable), what="a segment to be built")
            time.sleep(chance.uniform(0.0, _LONGEST_SEAL_S))
        with writable.paused_writer():  # looking takes longer than a seal
            builders = writable.builders()
            if (one.moment == "merge" and not builders) or (
                one.moment == "seal" and len(_unfinished(writable)) <= len(builders)
            ):
                continue
            if one.victim == "supervisor":
                writable.kill_supervisor()
            else:
                os.kill(builders[0] if one.victim == "builder" else writable.node.pid(one.victim), signal.SIGKILL)
            return


def _unfinished(writable: WritableNode) -> list[Path]:
    """Return the directories of segments that are being built: one for each merge's process, and the writer's own."""
    return [path for path in (writable.collection / "segments").iterdir() if not (path / CONTENTS).exists()]


def _compare(writable: WritableNode, writers: list[Writer], results: Killed) -> list[str]:
    """Compare every document while no write is in progress. An acknowledged document may be found a moment later; a
    deleted one must never be found."""
    returned: dict[str, None] = {}
    for writer in writers:
        writer.between.acquire()
    try:
        writable.wait_ready()
        with httpx.Client(base_url=writable.url, timeout=60, trust_env=False) as http:
            _apply_all(http)
            until = time.monotonic() + _VISIBLE_S
            while True:
                found = _found(http, "text")
                for writer in writers:
                    for name, text in writer.known.items():
                        # The graph walk may have missed it: search for it alone.
                        if text is not None and name not in found:
                            found |= {n: seen for n, seen in _found(http, text).items() if n == name}
                wrong = [line for writer in writers for line in _wrong(writer, found)]
                returned |= dict.fromkeys(line for writer in writers for line in _returned(writer, found))
                if not wrong or time.monotonic() > until:
                    break
        results.compared += sum(len(writer.known) for writer in writers)
        for writer in writers:
            writer.decide(found)
    finally:
        for writer in writers:
            writer.between.release()
    return [*wrong, *(line for line in returned if line not in wrong)]


def _apply_all(http: httpx.Client) -> None:
    """Wait until every pool has applied the log, also the writes that a killed process could not acknowledge: else they
    would be settled as not made, and be found later."""
    document = {"id": "last", "text": "text of a document that is written last"}
    while True:
        with contextlib.suppress(httpx.HTTPError):
            answer = http.put(DOCUMENTS, json={"documents": [document]})
            if answer.status_code == 200 and answer.json()["visible"]:
                return
        time.sleep(0.01)


def _wrong(writer: Writer, found: dict[str, str]) -> list[str]:
    """Return acknowledged documents with another content, deleted ones that are found, and texts of another id."""
    own = f"{next(iter(writer.known)).split('-')[0]}-" if writer.known else ""
    mismatched = [
        f"{name}: {found.get(name)!r}, not {text!r}"
        for name, text in writer.known.items()
        if found.get(name) != text and found.get(name) not in writer.doubtful[name]
    ]
    return mismatched + [
        f"{n}: {seen!r}" for n, seen in found.items() if n.startswith(own) and not seen.endswith(f" {n}")
    ]


def _returned(writer: Writer, found: dict[str, str]) -> list[str]:
    """Return documents that are found although their delete was acknowledged and nothing was written since."""
    deleted = (name for name, text in writer.known.items() if text is None and not writer.doubtful[name])
    return [f"{name}: {found[name]!r} has returned" for name in deleted if name in found]


def _found(http: httpx.Client, text: str) -> dict[str, str]:
    """Search, with retries; return texts by id."""
    while True:
        try:
            answer = http.post("/v1/retrieval", json={"query": text, "k": _ALL})
            if answer.status_code == 200:
                return {one["id"]: one["text"] for one in answer.json()["passages"]}
        except httpx.HTTPError:
            pass
        time.sleep(0.01)
