"""A fake vLLM under the supervisor: its command, process lifetimes, and the cost of a death."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from runtime.errors import Unavailable
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus, node_status, stop_node
from runtime.node.supervisor.forks import COMMAND
from runtime.testing.waiting import eventually
from tests.engines.fake_openai import completion, rendered
from tests.node.tiny_node import gone, serve
from tests.process_context import FORKSERVER

ROOT = Path(__file__).parents[2]
TOKENS = 100
WAIT_S = 120.0
CONFIG = """
[node]
name = "fake-vllm"
run_dir = "run"
drain_s = 600
[http]
port = 0
drain_notice_s = 0
[model]
engine = "vllm"
name = "fake"
python = "./python"
devices = ["cpu"]
instances = 2
extra_args = ["--dtype", "float32"]
environment = {environment}
"""


HOLD = "hold"


def fake_python(home: Path, version: str = "0.32.0") -> Path:
    """Write a stand-in for the interpreter of vLLM's environment."""
    program = home / "python"
    variables = f"FAKE_VERSION={version} FAKE_HOLD={home / HOLD} PYTHONPATH={ROOT}"
    program.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} {ROOT}/tests/engines/fake_vllm.py "$@"\n')
    program.chmod(0o755)
    return program


class VllmNode:
    """A node with a frontend and the configured instances."""

    def __init__(self, home: Path, text: str) -> None:
        self.home, self.log = home, home / "log"
        config = home / "node.toml"
        config.write_text(text)
        self.process = FORKSERVER.Process(target=serve, args=(str(config), "", str(self.log), COMMAND))
        self.process.start()

    @property
    def info(self) -> NodeInfo:
        return find_node(self.home / "run")

    def status(self) -> NodeStatus | None:
        assert self.process.exitcode is None, self.log.read_text()
        with contextlib.suppress(Unavailable):
            return node_status(self.info)
        return None

    def worker(self, name: str) -> WorkerStatus:
        workers: Sequence[WorkerStatus] = ()

        def told() -> bool:
            nonlocal workers
            status = self.status()
            workers = () if status is None else status.workers
            return status is not None

        eventually(told, WAIT_S, "the supervisor to answer")
        return next(found for found in workers if found.name == name)

    def healthy(self) -> bool:
        status = self.status()
        with contextlib.suppress(httpx.HTTPError):
            return bool(status and status.ready and fetch(f"{status.info.url}/health").status_code == 200)
        return False

    def ready(self, timeout_s: float = WAIT_S) -> None:
        log = self.log.read_text() if self.log.exists() else ""
        eventually(self.healthy, timeout_s, f"the node to be ready; {log}")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep all streams from going beyond their first chunks for the duration of the block."""
        hold = self.home / HOLD
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def core(self, name: str) -> int:
        """The process id of an instance's engine core."""
        return int((self.home / "run" / f"{name}.sock.core").read_text())

    def server(self, name: str) -> int:
        """The process id of an instance's server."""
        return int(psutil.Process(self.core(name)).ppid())

    def everything(self) -> list[int]:
        """All processes of the node."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> None:
        self.process.kill()
        self.process.join(timeout=WAIT_S)


def fetch(url: str) -> httpx.Response:
    return httpx.get(url, timeout=WAIT_S)


Start = Callable[..., VllmNode]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmNode]:
    """A ready node, which the last test of it stops."""
    home = tmp_path_factory.mktemp("vllm")
    fake_python(home)
    node = VllmNode(home, CONFIG.format(environment="{}"))
    node.ready()
    yield node
    node.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[VllmNode] = []

    def start(**environment: str) -> VllmNode:
        fake_python(tmp_path)
        table = "{" + ", ".join(f'{name} = "{value}"' for name, value in environment.items()) + "}"
        nodes.append(VllmNode(tmp_path, CONFIG.format(environment=table)))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "max_tokens": TOKENS,
    } | more


def expected(number: int, tokens: int = TOKENS) -> str:
    return bytes(completion(list(rendered(body(number)["messages"]).encode()), tokens)).decode()


class Asker(threading.Thread):
    """A streaming client; `began` is set at the first token (or end), `text` is the answer, `error` the failure."""

    def __init__(self, url: str, number: int, model: str = "fake", tokens: int = TOKENS) -> None:
        super().__init__(daemon=True)
        self.url, self.number, self.model, self.tokens = url, number, model, tokens
        self.began = threading.Event()
        self.text, self.error, self.finish = "", "", ""

    def __repr__(self) -> str:
        return f"Asker({self.number}, finish={self.finish!r}, error={self.error!r}, text={self.text!r})"

    def run(self) -> None:
        try:
            self._ask()
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _ask(self) -> None:
        asked = body(self.number, stream=True, model=self.model, temperature=0, ignore_eos=True)
        asked["max_tokens"] = self.tokens
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=asked, timeout=900) as answer:
            if answer.status_code != httpx.codes.OK:
                self.error = f"{answer.status_code} {answer.read().decode()}"
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                self.error = str(chunk.get("error") or "")
                for choice in chunk.get("choices", ()):
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"] or ""
                    if "role" not in choice["delta"]:  # a token, of text or not: the end mark has none
                        self.began.set()


def asked(node: VllmNode, count: int = 6, first: int = 0, tokens: int = TOKENS) -> list[Asker]:
    """Start `count` streams and wait until they have begun."""
    askers = [Asker(node.info.url, number, tokens=tokens) for number in range(first, first + count)]
    for asker in askers:
        asker.start()
    for asker in askers:
        assert asker.began.wait(WAIT_S), asker
    return askers


def all_whole(askers: list[Asker]) -> None:
    for asker in askers:
        asker.join(timeout=WAIT_S)
        assert not asker.error
        assert asker.text == expected(asker.number, asker.tokens)


def test_a_node_runs_its_instances_and_exports_their_metrics(node: VllmNode) -> None:
    answer = httpx.post(f"{node.info.url}/v1/chat/completions", json=body(1), timeout=WAIT_S).json()
    assert answer["choices"][0]["message"]["content"] == expected(1)
    metrics = f"{node.info.url}/metrics"
    for name in ("engine-0", "engine-1"):
        wanted = f'vllm:num_requests_running{{engine="0",model_name="fake",node="fake-vllm",worker="{name}"}} 0.0'
        eventually(lambda wanted=wanted: wanted in fetch(metrics).text, WAIT_S, wanted)  # type: ignore[misc]
    text = fetch(metrics).text
    assert "python_gc" not in text
    assert text.count("# TYPE vllm:num_requests_running ") == 1, "the instances' own, not the node's as well"
    assert 'asked for ["--model", "fake", "--tensor-parallel-size", "1"' in node.log.read_text()
    assert '"--dtype", "float32"]' in (node.home / "run" / "logs" / "engine-0.log").read_text().replace('\\"', '"')
    assert node.worker("engine-0").resident_bytes > psutil.Process(node.server("engine-0")).memory_info().rss / 2
    assert {node.core("engine-0"), node.core("engine-1")} <= set(node.everything())


def test_a_stopped_node_leaves_no_process(node: VllmNode) -> None:
    everything = node.everything()
    stop_node(node.info, timeout_s=WAIT_S)
    eventually(lambda: all(gone(pid) for pid in everything), WAIT_S, "every process to be gone")
    assert not list((node.home / "run").glob("*.sock"))


def test_when_the_supervisor_is_killed_no_process_is_left(start: Start) -> None:
    node = start()
    node.ready()
    everything = node.everything()
    assert len(everything) >= 2 * 4 + 1  # of each instance: its worker, watchdog, server and core; and the frontend
    assert node.process.pid is not None
    os.kill(node.process.pid, signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in everything), WAIT_S, "every process to be gone")


def test_a_vllm_that_cannot_start_ends_the_node_with_its_error(start: Start) -> None:
    node = start(FAKE_FAULT="ValueError: Free memory on device cuda:0 (10 GiB) is less than desired")
    node.process.join(timeout=WAIT_S)
    assert node.process.exitcode == 1
    assert "exit code 1: ValueError: Free memory on device cuda:0 (10 GiB) is less than desired" in node.log.read_text()
