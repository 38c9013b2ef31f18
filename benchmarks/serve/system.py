"""System under test: the production processes of one plan, each pinned, without a supervisor.

Both kinds have two model workers, one on each core. "node": a prefill worker and a decode worker. "colocated": two
workers that do both (`colocated.py`), with the same classes, model, limits and batch rules. The frontend and the pool
are the same.
"""

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from runtime.node.config import parse_config
from runtime.node.control.loop import ControlLoop
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.supervisor.listen import listen
from runtime.node.worker import WorkerSpec

Kind = Literal["node", "colocated"]
START_S = 120.0


@dataclass(frozen=True)
class SystemParts:
    """Inputs of the systems of a run: a model, a collection, and the folder for logs."""

    model: str
    collection: Path
    folder: Path
    context_tokens: int

    def config(self, kind: Kind, more: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the node's configuration as TOML tables; `more` overrides keys."""
        workers = 1 if kind == "node" else 2
        core = {"prefill": 0, "decode": -1}
        cores = sorted(os.sched_getaffinity(0))
        tables: dict[str, Any] = {
            "node": {"name": f"bench-{kind}"},
            "http": {"port": 0, "max_in_flight": 10_000},
            "model": {"name": self.model, "context_tokens": self.context_tokens},
            "prefill": {"workers": workers, "slots": 8, "chunk_tokens": 256},
            "decode": {"workers": workers, "slots": 16},
            "prompts": {"passage_tokens": 160},
            "pool": {"workers": 1},
            "handover": {} if kind == "node" else {"disaggregate": "always"},  # to its own decode half
            "collections": [{"name": "docs", "path": str(self.collection)}],
        }
        for role in ("prefill", "decode"):
            pinned = [[cores[core[role]]]] if kind == "node" else [[cores[0]], [cores[-1]]]
            tables[role]["cores"] = pinned
        for name, table in more.items():
            tables[name] = tables.get(name, {}) | table
        return tables


_WORKER = """
import sys
from runtime.node.forking import LISTEN, STACK
from runtime.node.worker import main
from runtime.worker_process import loop_of
sys.exit(main(loop_of, {LISTEN: int(sys.argv[1]), STACK: 2}))
"""


class System:
    """A running node of one kind: a context manager that kills its processes at the end."""

    def __init__(
        self,
        parts: SystemParts,
        kind: Kind = "node",
        **more: dict[str, Any],
    ) -> None:
        self.kind = kind
        self.plan = lay_out(parse_config(parts.config(kind, more)))
        self.tables = {
            worker.name: WorkerTable.create(worker.role, worker.name, self.plan.config.slo)
            for worker in self.plan.workers
        }
        self._log = (parts.folder / f"{kind}-{self.plan.token}.log").open("wb")
        self._listener = listen(self.plan.config.http)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._control = ControlLoop(self.plan.config, self.tables)
        self._tuning = threading.Thread(target=self._tune, daemon=True)

    def __enter__(self) -> Self:
        try:
            for worker in self.plan.workers:
                if self.kind == "node" or worker.role not in ("prefill", "decode"):
                    self._start(("-c", _WORKER), worker.name)
                elif worker.role == "prefill":
                    self._start(("-m", "benchmarks.serve.colocated"), worker.name, f"decode-{worker.index}")
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        self._tuning.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=30)
        self._listener.close()
        self._log.close()

    def _start(self, program: tuple[str, str], *workers: str) -> None:
        fd = self._listener.fileno() if workers == ("frontend-0",) else -1
        process = subprocess.Popen(
            [sys.executable, *program, str(fd)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(fd,) if fd >= 0 else (),
            env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._processes.append(process)
        assert process.stdin is not None
        for name in workers:
            spec = WorkerSpec(self.plan, name, 1, self.tables[name].reference, os.getpid())
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.close()

    def _await_ready(self) -> None:
        end = time.monotonic() + START_S
        while not (all(table.state is State.READY for table in self.tables.values()) and self._healthy()):
            if any(process.poll() is not None for process in self._processes):
                raise SystemExit(f"a worker of the {self.kind} system ended:\n{Path(self._log.name).read_text()}")
            if time.monotonic() > end:
                raise SystemExit(f"the {self.kind} system was not ready within {START_S:.0f} s")
            time.sleep(0.05)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

    def _tune(self) -> None:
        """Run the control loop, as the supervisor does: adjust the pool's reserve."""
        while not self._ended.wait(0.1):
            self._control.step(time.monotonic())
