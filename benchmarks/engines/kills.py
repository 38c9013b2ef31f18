"""kill -9 of every part of vLLM's instances under load: lost requests and leftover processes.

A node that runs vLLM first answers every question undisturbed. Then waves of streams ask the same questions, and once
all streams have begun, one part of an instance is killed: its API server, its watchdog, its engine core, or its worker.
An answer with an error or without all its tokens is lost; one with another text is different. At the end the supervisor
is killed. Processes of a killed part that survive count as left.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.common.report import table
from launchers.http_client import stream
from runtime.errors import TrinityError
from runtime.testing.node import Node

Json = dict[str, Any]

PARTS = ("server", "watchdog", "core", "worker")
_GONE_S = 60.0
_ANSWER_S = 900.0  # includes the restart of an instance
_SERVER = "vllm.entrypoints.openai.api_server"
_CORE = "EngineCore"


class Stream(threading.Thread):
    """Thread that streams one answer. `began` is set by its first text, or its end."""

    def __init__(self, url: str, model: str, number: int, tokens: int) -> None:
        super().__init__(name=f"stream {number}", daemon=True)
        self._url, self.number, self._tokens = url, number, tokens
        self._body = {
            "model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "messages": [{"role": "user", "content": f"Question {number}: what is a generator?"}],
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.began = threading.Event()
        self.text, self.finish, self.error, self.made = "", "", "", 0

    def run(self) -> None:
        try:
            for event in stream(self._url, "/v1/chat/completions", self._body, timeout_s=_ANSWER_S):
                self._take(event)
        except (TrinityError, OSError) as error:
            self.error = str(error)
        finally:
            self.began.set()

    def _take(self, event: Json) -> None:
        if event.get("usage"):
            self.made = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish
        if self.text:
            self.began.set()

    @property
    def whole(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and self.finish == "length" and self.made == self._tokens


@dataclass(slots=True)
class Wave:
    """One kill of a part of a worker: the outcome of its streams, and the time until the node was ready again."""

    worker: str
    part: str
    ready_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    different: int = 0
    left: list[int] = field(default_factory=list)


def parts_of(worker: int) -> dict[str, int]:
    """Return the processes of an instance by part, given its worker's pid."""
    children = psutil.Process(worker).children()
    server = next(child for child in children if _SERVER in child.cmdline())
    below = server.children()
    cores = [child for child in below if _CORE in child.name()] or below
    watchdog = next(child for child in children if child.name() == "sh")
    return {"worker": worker, "watchdog": watchdog.pid, "server": server.pid, "core": cores[0].pid}


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def still_there(processes: list[psutil.Process], within_s: float = _GONE_S) -> list[int]:
    """Return the pids still alive after `within_s`; zombies count as dead."""
    until = time.monotonic() + within_s
    while alive := [one.pid for one in processes if _lives(one)]:
        if time.monotonic() > until:
            return alive
        time.sleep(0.1)
    return []


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def start_streams(url: str, model: str, count: int, tokens: int) -> list[Stream]:
    """Start streams and wait until all have begun."""
    streams = [Stream(url, model, number, tokens) for number in range(count)]
    for one in streams:
        one.start()
    for one in streams:
        one.began.wait(_ANSWER_S)
    return streams


def _ended(streams: list[Stream]) -> list[Stream]:
    for one in streams:
        one.join(_ANSWER_S)
    return streams


@dataclass(frozen=True)
class Target:
    """A ready node: its URL, its supervisor's pid and its instances' names; `pid` returns a worker's pid by name,
    `wait_ready` waits until the node is ready again."""

    url: str
    supervisor: int
    engines: Sequence[str]
    pid: Callable[[str], int]
    wait_ready: Callable[[], None]

    @classmethod
    def of(cls, node: Node) -> "Target":
        engines = [worker.name for worker in node.status().workers if worker.name.startswith("engine-")]
        return cls(node.info.url, node.process.pid, engines, node.pid, node.wait_ready)


def kills(node: Target, model: str, *, streams: int, tokens: int) -> Json:
    """Kill each part once, alternating the instances; finally kill the node."""
    url = node.url
    known = _ended(start_streams(url, model, streams, tokens))
    assert all(one.whole for one in known), f"undisturbed: {[one.error for one in known if not one.whole]}"
    waves = []
    for number, part in enumerate(PARTS):
        wave = Wave(node.engines[number % len(node.engines)], part)
        pid = node.pid(wave.worker)
        before, parts = family(pid), parts_of(pid)
        begun = start_streams(url, model, streams, tokens)
        os.kill(parts[part], signal.SIGKILL)
        begin = time.monotonic()
        wave.left = still_there(before)
        for one in _ended(begun):
            if not one.whole:
                wave.lost.append(one.error or f"{one.made} of {tokens} tokens, {one.finish or 'no end'}")
            wave.different += one.whole and one.text != known[one.number].text
        node.wait_ready()
        wave.ready_s = time.monotonic() - begin
        waves.append(wave)
    everything = family(node.supervisor)
    begun = start_streams(url, model, min(streams, 8), tokens)
    os.kill(node.supervisor, signal.SIGKILL)
    left = still_there(everything)
    _ended(begun)  # their connections must end
    return {
        "asked": streams * len(waves),
        "lost": sum(len(wave.lost) for wave in waves),
        "different": sum(wave.different for wave in waves),
        "left": sum(len(wave.left) for wave in waves) + len(left),
        "hang": sum(one.is_alive() for one in begun),
        "waves": waves,
    }


def report(found: Json) -> list[str]:
    """Format the result as Markdown."""
    rows = [
        (f"{wave.worker}: {wave.part}", len(wave.lost), wave.different, len(wave.left), f"{wave.ready_s:.0f} s")
        for wave in found["waves"]
    ]
    reasons = sorted({reason for wave in found["waves"] for reason in wave.lost})
    return [
        f"{found['asked']} requests in flight when a part of an instance was killed: {found['lost']} lost, "
        f"{found['different']} with another text; {found['left']} processes left, including after the supervisor's "
        f"kill; {found['hang']} clients hanging.",
        "",
        *table(("kill -9 of", "lost", "different", "left", "all ready after"), rows),
        *("", *(f"- {reason}" for reason in reasons)),
    ]
