"""A node of workers that do nothing but what they are told: how the supervisor is tested.

The supervisor runs in a process of its own that is forked from one where all is imported; its workers are
`tiny_worker.py`.
"""

import itertools
import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil

from runtime.errors import Unavailable
from runtime.node.config_file import load_config
from runtime.node.logs.log import Formatter
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.run_dir import NodeInfo, RunDir, find_node
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus, node_status
from runtime.node.supervisor.supervisor import Supervisor

TINY_WORKER = (sys.executable, str(Path(__file__).with_name("tiny_worker.py")))

_FORKED = multiprocessing.get_context("forkserver")
CONFIG = """
[node]
name = "tiny"
run_dir = "run"
drain_s = {drain_s}
heartbeat_s = {heartbeat_s}
start_s = {start_s}

[http]
port = 0

[[collections]]
name = "docs"
path = "."
"""


class TinyNode:
    """A node of a pool worker and a frontend that do nothing but what the orders say."""

    def __init__(
        self,
        home: Path,
        orders: dict[str, list[str]] | None = None,
        command: tuple[str, ...] = TINY_WORKER,
        process: Callable[..., None] | None = None,
        more: str = "",
        **times: float,
    ) -> None:
        """`orders`: what each worker's lives do, see `tiny_worker.py`. `command`: what runs a worker. `process`: what
        runs the supervisor, `serve` or one of the others here. `more`: of the TOML file; `times`: of its [node]."""
        self.home = home
        self.log = home / "log"
        self.orders = home / "orders.json"
        self.orders.write_text(json.dumps(orders or {}))
        config = home / "node.toml"
        config.write_text(CONFIG.format(**{"drain_s": 60.0, "heartbeat_s": 60.0, "start_s": 60.0} | times) + more)
        self.process = _FORKED.Process(
            target=process or serve, args=(str(config), str(self.orders), str(self.log), command)
        )
        self.process.start()

    def eventually(self, condition: Callable[[NodeStatus], bool], what: str) -> NodeStatus:
        """The first status for which `condition` holds. The bound only ends a test that would hang."""
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end, f"waited for {what}; {self.log.read_text()}"
            assert self.process.exitcode is None, f"the node ended, waited for {what}; {self.log.read_text()}"
            try:
                status = node_status(self.info)
            except Unavailable:
                continue
            if condition(status):
                return status
            select.select([], [], [], 0.005)

    def ready(self) -> NodeStatus:
        return self.eventually(lambda status: status.ready, "every worker to be ready")

    @property
    def info(self) -> NodeInfo:
        return find_node(self.home / "run")

    def signal(self, kind: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, kind)

    def close(self) -> None:
        """Kill what still runs."""
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        """Its exit code."""
        self.process.join(timeout=60)
        assert self.process.exitcode is not None, "the node still runs"
        return self.process.exitcode

    def stopped(self) -> list[str]:
        """The workers that stopped by themselves, in that order."""
        path = Path(f"{self.orders}.stopped")
        return path.read_text().split() if path.exists() else []


def worker(status: NodeStatus, name: str = "pool-0") -> WorkerStatus:
    """What the node says of one worker."""
    return next(found for found in status.workers if found.name == name)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its new parent has yet to notice
    except psutil.NoSuchProcess:
        return True


def serve(
    config: str,
    orders: str,
    log: str,
    command: tuple[str, ...],
    gpus: int = 0,
    handlers: Mapping[signal.Signals, signal.Handlers] = {},
) -> None:
    """The process. `command` is what runs a worker; with `gpus` the layout is that of so many simulated ones; it begins
    with these `handlers` of signals."""
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
    supervisor = Supervisor(plan, seed=0, command=command)
    code = supervisor.run(lambda info: logging.info("announced"))
    os._exit(code)


serve_eight_gpus = partial(serve, gpus=8)
serve_where_sigint_is_ignored = partial(serve, handlers={signal.SIGINT: signal.SIG_IGN})  # as a script's background
serve_in_a_terminal = partial(serve, handlers={signal.SIGHUP: signal.SIG_DFL})  # wherever the tests were begun
serve_under_nohup = partial(serve, handlers={signal.SIGHUP: signal.SIG_IGN})


def serve_stopped_as_soon_as_it_is_found(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, which gets SIGTERM at the moment at which it has said where it is."""
    write = RunDir.write

    def and_stop(self: RunDir, info: NodeInfo) -> None:
        write(self, info)
        os.kill(os.getpid(), signal.SIGTERM)

    RunDir.write = and_stop  # type: ignore[method-assign]
    serve(config, orders, log, command)


def serve_with_a_wall_clock_that_jumps(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, with a `time.time` that is a day ahead or behind with every look at it."""
    wall, days = time.time, itertools.cycle((86_400.0, -86_400.0, 0.0))
    time.time = lambda: wall() + next(days)
    serve(config, orders, log, command)
