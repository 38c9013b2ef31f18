"""A scripted worker process without a role: it writes heartbeats and follows the test's orders.

A supervisor forks its workers from this file instead of `runtime.worker_process`. The orders are a JSON file named by
the environment variable TINY_ORDERS: for each worker the behaviours of its processes, of which the last one repeats. It
writes its table by the layout of `runtime.node.metrics.table` and imports of Trinity only what forks it, so that it
starts fast; a behaviour "real …" runs the real `main` with the scripted loop.
"""

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.node.forking import serve

STATE, BEAT, EPOCH = 2, 3, 4  # words of the table
READY = 1


def live(life: str, name: str, ready: Callable[[], None], beat: Callable[[], None], stop: Callable[[], bool]) -> None:
    """Run one behaviour until it ends or `stop` returns True."""
    if life == "crash":
        os._exit(3)
    if life == "with child":
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["TINY_ORDERS"] + ".child").write_text(str(child.pid))
    if life != "never ready":
        ready()
    if life == "crash when ready":
        os._exit(3)
    if life == "bus error when ready":
        os.kill(os.getpid(), signal.SIGBUS)
    if life == "ignore stop":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not stop() or life == "busy":
        if life != "hang":
            beat()
        time.sleep(0.005)
    with Path(os.environ["TINY_ORDERS"] + ".stopped").open("a") as file:
        file.write(f"{name}\n")


def tiny(life: str, spec: dict[str, Any]) -> None:
    """Run a behaviour with a table and a signal handler only."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != spec["supervisor_pid"]:
        os._exit(1)
    stop: list[bool] = []
    for kind in (signal.SIGTERM, signal.SIGRTMIN):  # `runtime.node.worker.DRAIN_SIGNAL`
        signal.signal(kind, lambda signum, frame: stop.append(True))
    for kind in (signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    beat, ready = table_of(spec)
    if "-spare-" in spec["worker"] and life == "serve":
        ready()
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            beat()
        spec = json.loads(sys.stdin.buffer.readline())
        beat, ready = table_of(spec)
        life = life_of(spec)
    live(life, spec["worker"], ready, beat, lambda: bool(stop))


def table_of(spec: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Take over a worker's table. Returns functions that write a heartbeat, and that report readiness."""
    place = spec["table"]
    fd = os.open(f"/proc/{place['pid']}/fd/{place['fd']}", os.O_RDWR)
    words = memoryview(mmap.mmap(fd, place["size"])).cast("Q")

    def beat() -> None:
        words[BEAT] = time.monotonic_ns()

    def ready() -> None:
        beat()
        words[STATE] = READY

    words[STATE], words[EPOCH] = 0, spec["epoch"]
    return beat, ready


def life_of(spec: dict[str, Any]) -> str:
    """Return the behaviour of this process of the worker."""
    lives: list[str] = json.loads(Path(os.environ["TINY_ORDERS"]).read_text()).get(spec["worker"], ["serve"])
    return lives[min(int(spec["epoch"]), len(lives)) - 1]


def real(life: str, line: bytes, descriptors: Mapping[str, int]) -> int:
    """Run the same behaviour inside the real worker."""
    from runtime.errors import ConfigError
    from runtime.node import worker as module

    def run(worker: module.Worker) -> None:
        if life == "refuse":
            raise ConfigError(f"{worker.name} cannot be")
        worker.await_assignment()
        live(life, worker.name, worker.ready, lambda: worker.table.beat(), lambda: worker.stopping)

    sys.stdin = Unread(line)
    return module.main(lambda role: run, descriptors)


class Unread:
    """Standard input whose first line, already read, is returned again."""

    def __init__(self, line: bytes) -> None:
        self.buffer, self._lines, self._input = self, [line], sys.stdin

    def readline(self) -> bytes:
        return self._lines.pop() if self._lines else self._input.buffer.readline()

    def fileno(self) -> int:
        return self._input.fileno()


def main(descriptors: Mapping[str, int]) -> int:
    line = sys.stdin.buffer.readline()
    spec = json.loads(line)
    life = life_of(spec)
    if life.startswith("real "):
        return real(life.removeprefix("real "), line, descriptors)
    tiny(life, spec)
    return 0


def load(roles: Sequence[str]) -> None:
    """Import nothing, for as long as the test says."""
    while Path(os.environ["TINY_ORDERS"] + ".imports").exists():
        time.sleep(0.005)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), load, main)
