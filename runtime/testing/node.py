"""A whole node in processes of its own: `trinity serve` with a TOML file, queried over HTTP, stopped at the end."""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from runtime.errors import TrinityError, Unavailable
from runtime.node.config_file import load_config
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PrefillMetrics
from runtime.node.placement.plan import default_run_dir
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import NodeStatus, node_status
from runtime.testing.waiting import pause_s

_START_S = 600.0  # generous: it only ends tests that would hang
_END_S = 120.0


class Node:
    """A running node. `run_dir` is its run directory, `log` its output."""

    def __init__(self, config: Path, *arguments: str, look_s: float = 0.0) -> None:
        """Start the node and wait until every worker is ready; raises `RuntimeError` with its log if it ends before.

        `arguments`: of `trinity serve`. `look_s`: polling interval of `wait`, for measurements; else see `pause_s`.
        """
        self.config, self._look_s = config, look_s
        self.run_dir = self.run_dir_of(config)
        self.log = config.with_suffix(".log")
        self.log.unlink(missing_ok=True)  # another running node keeps writing to its own file
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launchers.main", "serve", "--config", str(config), *arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self.wait_ready()
        except BaseException:
            self.stop()  # not killed: it removes its run directory
            raise

    @staticmethod
    def run_dir_of(config: Path) -> Path:
        """Return the run directory of the node of a TOML file."""
        section = load_config(config).node
        return Path(section.run_dir) if section.run_dir else default_run_dir(section.name)

    # ---- state

    @functools.cached_property
    def info(self) -> NodeInfo:
        """Endpoints of the node. Raises `Unavailable` until it has started."""
        info = find_node(self.run_dir)
        if info.pid != self.process.pid:
            raise Unavailable(f"another node, of process {info.pid}, runs in {self.run_dir}")
        return info

    def status(self) -> NodeStatus:
        return node_status(self.info)

    def ready(self) -> bool:
        """Whether every worker is ready and /health returns 200."""
        with contextlib.suppress(TrinityError, OSError):
            status = self.status()
            return status.ready and self._get(status.info, "/health")[0] == 200
        return False

    def pids(self) -> dict[str, int]:
        """Return the process ids by name, including the supervisor and standby workers."""
        status = self.status()
        return {"supervisor": self.process.pid} | {w.name: w.pid for w in (*status.workers, *status.spares) if w.pid}

    def pid(self, worker: str) -> int:
        """Return a worker's process id; wait for its next process if it has none, whose 0 means the caller's group."""
        pid = 0

        def known() -> int:
            nonlocal pid
            pid = next(process.pid for process in self.status().workers if process.name == worker)
            return pid

        self.wait(known, what=f"a process of {worker}")
        return pid

    def wait(self, condition: Callable[[], object], within_s: float = _START_S, what: str = "it") -> float:
        """Wait until `condition()` holds; returns the seconds. Raises `TimeoutError`, and `RuntimeError` if the node
        has ended."""
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the node ended:\n{self.log.read_text(errors='replace')[-4000:]}")
            if time.monotonic() - begin > within_s:
                raise TimeoutError(f"waited {within_s:.0f} s for {what}; log:\n{self.log.read_text()[-4000:]}")
            select.select([], [], [], self._look_s or pause_s(time.monotonic() - begin))
        return time.monotonic() - begin

    def wait_ready(self) -> None:
        self.wait(self.ready, what="the node to be ready")

    def wait_idle(self) -> None:
        """Wait until no worker and no frontend has a request."""
        for gauge in (DecodeMetrics.RUNNING, PrefillMetrics.RUNNING, FrontendMetrics.IN_FLIGHT):
            self.wait(lambda gauge=gauge: self.metric(str(gauge)) == 0, 60, f"{gauge} to be 0")  # type: ignore[misc]

    # ---- requests

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a counter or gauge over all series with these labels."""
        matching = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in self.metrics_text().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in matching)]
        assert values, f"no metric {name}"
        return sum(values)

    def metrics_text(self) -> str:
        return self._get(self.info, "/metrics")[1].decode()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a POST; bytes are sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self._ask(
            urllib.request.Request(self.info.url + path, data, {"Content-Type": "application/json"}, method="POST")
        )
        return status, json.loads(answer)

    def _get(self, info: NodeInfo, path: str) -> tuple[int, bytes]:
        return self._ask(urllib.request.Request(info.url + path))

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=_END_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    # ---- stopping

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL, and wait until the process is gone."""
        pid = self.pid(worker)
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not psutil.pid_exists(pid), 60, f"{worker} to be gone")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Drain the node and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=_END_S)


def trinity(*arguments: str | Path, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, without input."""
    command = [sys.executable, "-m", "launchers.main", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
    )


@contextlib.contextmanager
def running(config: Path, *arguments: str) -> Iterator[Node]:
    """Run the node of a TOML file for the duration of the block."""
    node = Node(config, *arguments)
    try:
        yield node
    finally:
        node.stop()


def token_of(info: NodeInfo) -> str:
    """Return the common part of a node's endpoints."""
    return info.control.removeprefix("ipc://@").removesuffix("-control")


def leftovers(token: str, pids: Iterable[int], *directories: Path) -> list[str]:
    """Return what an ended node has left behind: processes, abstract sockets, these directories."""
    left = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
    left += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if token in line]
    return left + [f"directory {directory}" for directory in directories if directory.exists()]
