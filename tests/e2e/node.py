"""A whole node in processes of its own, for tests: a tiny random Llama and a small index, run by `trinity serve`."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from runtime.errors import Unavailable
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import NodeStatus, node_status
from tests.waiting import eventually

START_S = 240.0  # bounds a wait that would never end, not a start on a busy machine


class RunningNode:
    """A started node. `close` stops it and says what it left behind."""

    def __init__(self, config: Path, run_dir: Path, arguments: tuple[str, ...] = (), start_s: float = START_S) -> None:
        self.config = config
        self.run_dir = run_dir
        self.log = config.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launchers.main", "serve", "--config", str(config), *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            eventually(self._is_ready, start_s, f"the node to be ready; log:\n{self.log.read_text()}")
        except BaseException:
            self.process.kill()
            self.process.wait(timeout=30)
            raise
        self.info: NodeInfo = find_node(run_dir)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the node ended:\n{self.log.read_text()}"
        try:
            status = node_status(find_node(self.run_dir))
        except Unavailable:
            return False
        return status.ready and self_health(status.info.url) == 200

    def status(self) -> NodeStatus:
        return node_status(self.info)

    def pid(self, worker: str) -> int:
        return next(w.pid for w in self.status().workers if w.name == worker)

    def wait_ready(self) -> None:
        eventually(self._is_ready, START_S, "the node to be ready again")

    def kill(self, worker: str) -> None:
        """kill -9, and wait until the process is gone."""
        pid = self.pid(worker)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(pid), 60, f"{worker} to be gone")

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.info.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter or gauge over all workers, of its series with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in self.metrics_text().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted)]
        assert values, f"no metric {name}"
        return sum(values)

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST; `body` is sent as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.info.url + path, data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_idle(self) -> None:
        """Until no worker and no frontend has a request."""
        for gauge in ("trinity_num_requests_running", "trinity_prefill_running", "trinity_requests_in_flight"):
            self._wait_for_none(gauge)

    def _wait_for_none(self, gauge: str) -> None:
        eventually(lambda: self.metric(gauge) == 0, 60, f"{gauge} to be 0")

    def pids(self) -> list[int]:
        status = self.status()
        return [self.process.pid, *(worker.pid for worker in (*status.workers, *status.spares) if worker.pid)]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=120)


def self_health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def leftovers(token: str, pids: list[int], run_dir: Path) -> list[str]:
    """What a node that has ended left behind: processes, abstract sockets, its run directory."""
    found = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
    found += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if token in line]
    return found + ([f"directory {run_dir}"] if run_dir.exists() else [])


def token_of(info: NodeInfo) -> str:
    """What all endpoints of a node have in common."""
    return info.control.removeprefix("ipc://@").removesuffix("-control")


def prompts(count: int) -> Iterator[str]:
    """Different short questions."""
    for number in range(count):
        yield f"question {number}: how does a with statement call __exit__?"
