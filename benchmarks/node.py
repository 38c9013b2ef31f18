"""A node in processes of its own, for benchmarks: started from its TOML file, stopped at the end."""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launchers.http_client import get
from runtime.errors import TrinityError
from runtime.node.config import load_config
from runtime.node.placement.plan import default_run_dir
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import NodeStatus, node_status

_LOOK_S = 0.01
_START_S = 600.0


class BenchmarkNode:
    """`trinity serve` and what is asked of it. `config` names its run directory; `look_s` is how often `wait` looks."""

    def __init__(self, config: Path, look_s: float = _LOOK_S, *, quiet: bool = True) -> None:
        self._look_s = look_s
        self._where = self.run_dir_of(config)
        self.log = config.with_suffix(".log")
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "launchers.main", "serve", "--config", str(config)]
            command += ["--quiet"] * quiet
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self.wait(self.ready)
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def run_dir_of(config: Path) -> Path:
        """Where the node of a TOML file keeps what it has while it runs."""
        section = load_config(config).node
        return Path(section.run_dir) if section.run_dir else default_run_dir(section.name)

    @property
    def info(self) -> NodeInfo:
        return find_node(self._where)

    def status(self) -> NodeStatus:
        return node_status(self.info)

    def ready(self) -> bool:
        """Whether every worker is, and /health says so."""
        with contextlib.suppress(TrinityError):
            status = self.status()
            return status.ready and get(status.info.url, "/health")[0] == 200
        return False

    def wait(self, condition: Callable[[], object], within_s: float = _START_S) -> float:
        """Seconds until `condition()` held. Raises `TimeoutError`."""
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the node ended:\n{self.log.read_text()[-2000:]}")
            if time.monotonic() - begin > within_s:
                raise TimeoutError(f"waited {within_s:.0f} s")
            select.select([], [], [], self._look_s)
        return time.monotonic() - begin

    def pids(self) -> dict[str, int]:
        """Every process by name."""
        status = self.status()
        return {"supervisor": self.process.pid} | {w.name: w.pid for w in (*status.workers, *status.spares) if w.pid}

    def stop(self) -> int:
        """Drain it; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=30)


@contextlib.contextmanager
def running(config: Path) -> Iterator[BenchmarkNode]:
    """The node of a TOML file, for as long as the block runs."""
    node = BenchmarkNode(config)
    try:
        yield node
    finally:
        node.stop()
