"""A worker of role "engine": one instance of vLLM's API server, from its start to its end.

Its heartbeat is vLLM's own /health. When it is to leave a node that goes on, its socket gets another name: new requests
go to other instances then, and it ends when those that it has are over.
"""

import contextlib
import http.client
import os
import time
from collections.abc import Callable
from pathlib import Path

from runtime.engines.vllm.command import check_arguments, command, environment, installed
from runtime.engines.vllm.instance import Instance, Lines, get, unfinished
from runtime.engines.vllm.transfer import check_transfer, remove_files
from runtime.errors import EngineFailed
from runtime.node.engine_config import VllmSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.worker import Worker

_LOOK_S = 0.5  # between two looks at /health, and with it at how long a death is not seen that no pidfd tells
_ANSWER_S = 10.0
_METRICS_EVERY = 4  # looks
_QUIET = 2  # looks in a row without a request: one that was sent just before is counted once vLLM has read it
_END_S = 10.0


class Watch:
    """Looks at one instance: beats while it is well, and leaves its metrics where the supervisor finds them."""

    def __init__(self, socket: str, metrics: Path, table: WorkerTable) -> None:
        self.socket, self._metrics, self._table = socket, metrics, table
        self._looks = 0

    def look(self) -> bool:
        """Whether it is well. Raises `EngineFailed` if it says that it never will be again."""
        try:
            status, _ = get(self.socket, "/health", _ANSWER_S)
        except (OSError, http.client.HTTPException):
            return False
        if status >= 500:
            raise EngineFailed(f"vLLM's /health answers {status}: its engine is dead")
        self._table.beat()
        self._looks += 1
        if self._looks % _METRICS_EVERY == 1:
            self.unfinished()
        return status == 200

    def unfinished(self) -> int | None:
        """Requests that run or wait there, by the metrics, which are stored; None if they are not to be had."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, text = get(self.socket, "/metrics", _ANSWER_S)
            if status == 200:
                new = self._metrics.with_suffix(".new")
                new.write_bytes(text)
                new.rename(self._metrics)
                return unfinished(text.decode(errors="replace"))
        return None


def run(worker: Worker) -> None:
    """The process: start vLLM, watch it, end it. Raises TrinityError for what vLLM cannot run with, or ended by."""
    section = worker.plan.config.model
    assert isinstance(section, VllmSection), "planned for such a section alone"
    check_arguments(section)
    found = installed(section)
    check_transfer(section, nixl=found.nixl)
    worker.log.info("vLLM %s", found.version)
    socket, metrics = worker.plan.engine_socket(worker.name), worker.plan.engine_metrics(worker.name)
    for left in (socket, f"{socket}.old", metrics):  # of a life that was cut short
        Path(left).unlink(missing_ok=True)
    remove_files(worker.plan, worker.place)
    asked = command(section, worker.plan, worker.place, nixl=found.nixl)
    worker.log.info("%s", " ".join(asked))
    try:
        instance = Instance(asked, environment(section, worker.plan, worker.place), Lines(worker.log))
    except OSError as error:
        raise EngineFailed(f"vLLM could not be started: {error}") from error
    watch = Watch(socket, metrics, worker.table)
    worker.start.part("vLLM's processes")
    _serve(worker, instance, watch)
    metrics.unlink(missing_ok=True)
    remove_files(worker.plan, worker.place)


def _serve(worker: Worker, instance: Instance, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
    """Until it is to stop. Raises EngineFailed when vLLM ends first."""
    ready = False
    while not worker.stopping:
        if watch.look() and not ready:
            ready = True
            worker.start.part("model")
            worker.ready()
        if instance.wait(_LOOK_S):
            raise EngineFailed(instance.how())
    if worker.awaits_release and ready:
        drain(worker, instance, watch)
    instance.terminate(_END_S)


def drain(worker: Worker, instance: Instance, watch: Watch) -> None:
    """Nobody new comes; wait for those that are there. The supervisor bounds it."""
    with contextlib.suppress(OSError):
        os.rename(watch.socket, f"{watch.socket}.old")
        watch.socket = f"{watch.socket}.old"
    quiet = 0
    while worker.awaits_release and not instance.wait(_LOOK_S):
        watch.look()
        quiet = quiet + 1 if watch.unfinished() == 0 else 0
        if quiet == _QUIET:
            return
