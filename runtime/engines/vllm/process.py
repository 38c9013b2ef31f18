"""A worker of role "engine": runs one instance of vLLM's API server.

The worker's heartbeat follows vLLM's own /health. To drain, the worker renames the socket, so that new requests go to
other instances, and ends the instance once its requests have finished.
"""

import contextlib
import http.client
import os
from pathlib import Path

from runtime.engines.openai.load import parse_load
from runtime.engines.vllm.command import check_arguments, command, environment, find_vllm
from runtime.engines.vllm.instance import Instance, LogForwarder, get
from runtime.engines.vllm.transfer import check_transfer, remove_files
from runtime.errors import EngineFailed
from runtime.node.engine_config import VllmSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.worker import Worker

_CHECK_INTERVAL_S = 0.5  # of /health: also the delay of noticing a death that no pidfd reports
_TIMEOUT_S = 10.0
_METRICS_EVERY = 4  # checks
_IDLE_CHECKS = 2  # in a row, before the instance is drained: vLLM counts a request only once it has read it
_TERMINATE_S = 10.0


class HealthMonitor:
    """Checks one instance: beats while it is healthy, and stores its metrics for the supervisor."""

    def __init__(self, socket: str, metrics: Path, table: WorkerTable) -> None:
        self.socket, self._metrics, self._table = socket, metrics, table
        self._checks = 0

    def check(self) -> bool:
        """Return whether the instance is healthy. Raises `EngineFailed` if /health reports a dead engine."""
        try:
            status, _ = get(self.socket, "/health", _TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return False
        if status >= 500:
            raise EngineFailed(f"vLLM's /health answers {status}: its engine is dead")
        self._table.beat()
        self._checks += 1
        if self._checks % _METRICS_EVERY == 1:
            self.read_metrics()
        return status == 200

    def read_metrics(self) -> int | None:
        """Store the metrics; return the number of running and waiting requests, None if unavailable."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, text = get(self.socket, "/metrics", _TIMEOUT_S)
            if status == 200:
                new = self._metrics.with_suffix(".new")
                new.write_bytes(text)
                new.rename(self._metrics)
                load = parse_load(text.decode(errors="replace"))
                return None if load is None else load.requests
        return None


def run(worker: Worker) -> None:
    """Run the process: start vLLM, monitor it, end it. Raises TrinityError for a failed check, start or instance."""
    section = worker.plan.config.model
    assert isinstance(section, VllmSection), "role engine is planned only with engine = vllm"
    check_arguments(section)
    vllm = find_vllm(section)
    check_transfer(section, nixl=vllm.nixl)
    worker.log.info("vLLM %s", vllm.version)
    socket, metrics = worker.plan.http_socket(worker.name), worker.plan.engine_metrics(worker.name)
    for leftover in (socket, f"{socket}.old", metrics):  # of a killed predecessor
        Path(leftover).unlink(missing_ok=True)
    remove_files(worker.plan, worker.placement)
    arguments = command(section, worker.plan, worker.placement, nixl=vllm.nixl, events=vllm.events)
    worker.log.info("%s", " ".join(arguments))
    try:
        instance = Instance(arguments, environment(section, worker.plan, worker.placement), LogForwarder(worker.log))
    except OSError as error:
        raise EngineFailed(f"vLLM could not be started: {error}") from error
    monitor = HealthMonitor(socket, metrics, worker.table)
    worker.startup.mark("vLLM's processes")
    _serve(worker, instance, monitor)
    metrics.unlink(missing_ok=True)
    remove_files(worker.plan, worker.placement)


def _serve(worker: Worker, instance: Instance, monitor: HealthMonitor) -> None:
    """Monitor the instance until the worker stops. Raises EngineFailed if vLLM ends first."""
    ready = False
    while not worker.stopping:
        if monitor.check() and not ready:
            ready = True
            worker.startup.mark("model")
            worker.ready()
        if instance.wait(_CHECK_INTERVAL_S):
            raise EngineFailed(instance.exit_reason())
    if worker.awaits_release and ready:
        drain(worker, instance, monitor)
    instance.terminate(_TERMINATE_S)


def drain(worker: Worker, instance: Instance, monitor: HealthMonitor) -> None:
    """Stop accepting requests and wait for those in flight; the supervisor limits the wait."""
    with contextlib.suppress(OSError):
        os.rename(monitor.socket, f"{monitor.socket}.old")
        monitor.socket = f"{monitor.socket}.old"
    idle = 0
    while worker.awaits_release and not instance.wait(_CHECK_INTERVAL_S):
        monitor.check()
        idle = idle + 1 if monitor.read_metrics() == 0 else 0
        if idle == _IDLE_CHECKS:
            return
