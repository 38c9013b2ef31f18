"""A supervisor over tiny workers, in a process of its own that is forked from one where all is imported."""

import itertools
import logging
import os
import signal
import sys
import time
from pathlib import Path

from runtime.node.config_file import load_config
from runtime.node.logs.format import Formatter
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import resolve
from runtime.node.supervisor.supervisor import Supervisor

TINY_WORKER = (sys.executable, str(Path(__file__).with_name("tiny_worker.py")))


def serve(config: str, orders: str, log: str, command: tuple[str, ...], gpus: int = 0) -> None:
    """The process. `command` is what runs a worker; with `gpus` the layout is that of so many simulated ones."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ["TINY_ORDERS"] = orders
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter("text", "supervisor"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    settings = load_config(Path(config))
    plan = lay_out(settings, Machine.with_simulated_gpus(gpus)) if gpus else resolve(settings)
    supervisor = Supervisor(plan, seed=0, command=command)
    code = supervisor.run(lambda info: logging.info("announced"))
    os._exit(code)


def serve_eight_gpus(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process on eight simulated GPUs."""
    serve(config, orders, log, command, gpus=8)


def serve_where_sigint_is_ignored(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, begun as one that a script started in its background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(config, orders, log, command)


def serve_in_a_terminal(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, begun where SIGHUP is not ignored, wherever the tests were."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    serve(config, orders, log, command)


def serve_under_nohup(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, begun where SIGHUP is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    serve(config, orders, log, command)


def serve_with_a_wall_clock_that_jumps(config: str, orders: str, log: str, command: tuple[str, ...]) -> None:
    """The same process, with a `time.time` that is a day ahead or behind with every look at it."""
    wall, days = time.time, itertools.cycle((86_400.0, -86_400.0, 0.0))
    time.time = lambda: wall() + next(days)
    serve(config, orders, log, command)
