"""A node with scripted workers, for tests of the supervisor.

The supervisor runs in a process that is forked from one with all imports done; its workers run `tiny_worker.py`.
"""

import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from runtime.errors import Unavailable
from runtime.node.config_file import load_config
from runtime.node.logs.log import Formatter
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.run_dir import NodeInfo, find_node
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus, node_status
from runtime.node.supervisor.supervisor import Supervisor
from runtime.testing.waiting import pause_s

TINY_WORKER = (sys.executable, str(Path(__file__).with_name("tiny_worker.py")))

_FORKED = multiprocessing.get_context("forkserver")
CONFIG = """
[node]
name = "tiny"
run_dir = "run"
drain_s = {drain_s}
start_s = {start_s}

[http]
port = 0

[[collections]]
name = "docs"
path = "."
"""


class TinyNode:
    """A node of a scripted pool worker and frontend."""

    def __init__(
        self,
        home: Path,
        orders: dict[str, list[str]] | None = None,
        command: tuple[str, ...] = TINY_WORKER,
        process: Callable[..., None] | None = None,
        more: str = "",
        heartbeat_s: float = 60.0,
        poll_s: float = 0.1,
        **times: float,
    ) -> None:
        """`orders`: script of each worker's processes, see `tiny_worker.py`. `command`: starts a worker. `process`:
        runs the supervisor, `serve` or a variant below. `more`: appended to the TOML file; `times`: timeouts of its
        [node]."""
        self.home = home
        self.log = home / "log"
        self.orders = home / "orders.json"
        self.order(orders or {})
        config = home / "node.toml"
        config.write_text(CONFIG.format(**{"drain_s": 60.0, "start_s": 60.0} | times) + more)
        self.process = _FORKED.Process(
            target=process or serve, args=(str(config), str(self.orders), str(self.log), command, heartbeat_s, poll_s)
        )
        self.process.start()

    def order(self, orders: dict[str, list[str]]) -> None:
        """Set the script of the processes that start from now on."""
        new = self.orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self.orders)

    def eventually(self, condition: Callable[[NodeStatus], bool], what: str) -> NodeStatus:
        """Return the first status for which `condition` holds. The timeout only ends a test that would hang."""
        begin = time.monotonic()
        while True:
            waited_s = time.monotonic() - begin
            assert waited_s < 240, f"waited for {what}; {self.log.read_text()}"
            assert self.process.exitcode is None, f"the node ended, waited for {what}; {self.log.read_text()}"
            with suppress(Unavailable):
                if condition(status := node_status(self.info)):
                    return status
            select.select([], [], [], pause_s(waited_s))

    def ready(self) -> NodeStatus:
        return self.eventually(lambda status: status.ready, "every worker to be ready")

    @property
    def info(self) -> NodeInfo:
        return find_node(self.home / "run")

    def signal(self, kind: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, kind)

    def close(self) -> None:
        """Kill the supervisor."""
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        """Wait for its end and return the exit code."""
        self.process.join(timeout=60)
        assert self.process.exitcode is not None, "the node still runs"
        return self.process.exitcode

    def template(self, status: NodeStatus) -> int | None:
        """Return the pid of the process from which workers are forked."""
        workers = [found.pid for found in (*status.workers, *status.spares)]
        others = [child.pid for child in psutil.Process(self.process.pid).children() if child.pid not in workers]
        return others[0] if others else None

    def stopped(self) -> list[str]:
        """Return the workers that stopped after a signal, in that order."""
        path = Path(f"{self.orders}.stopped")
        return path.read_text().split() if path.exists() else []


def worker(status: NodeStatus, name: str = "pool-0") -> WorkerStatus:
    return next(found for found in status.workers if found.name == name)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # not reaped yet by its new parent
    except psutil.NoSuchProcess:
        return True


def serve(
    config: str,
    orders: str,
    log: str,
    command: tuple[str, ...],
    heartbeat_s: float = 60.0,
    poll_s: float = 0.1,
    gpus: int = 0,
    handlers: Mapping[signal.Signals, signal.Handlers] = {},
) -> None:
    """Main function of the supervisor's process. `command` starts a worker; with `gpus` the node is laid out on so many
    simulated GPUs; `handlers` are signal handlers set at the start."""
    for kind, handler in handlers.items():
        signal.signal(kind, handler)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ["TINY_ORDERS"] = orders
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(Formatter("text", "supervisor"))
    logging.basicConfig(handlers=[output], level=logging.INFO)
    settings = load_config(Path(config))
    plan = lay_out(settings, Machine.with_simulated_gpus(gpus) if gpus else None)
    supervisor = Supervisor(plan, seed=0, command=command, heartbeat_s=heartbeat_s, poll_s=poll_s)
    code = supervisor.run(lambda info: logging.info("announced"))
    os._exit(code)


serve_eight_gpus = partial(serve, gpus=8)
serve_where_sigint_is_ignored = partial(
    serve, handlers={signal.SIGINT: signal.SIG_IGN}
)  # as in a script's background job
serve_where_ends_of_children_are_ignored = partial(serve, handlers={signal.SIGCHLD: signal.SIG_IGN})
serve_in_a_terminal = partial(serve, handlers={signal.SIGHUP: signal.SIG_DFL})  # however the tests were started
