"""Rolling reload of rebuilt collections: one pool worker after another, while the others serve, then the workers that
look documents up. Once a reload has finished, the directory may be replaced again."""

import logging
from collections.abc import Sequence

import msgspec

from runtime.node.config import Role
from runtime.node.metrics.worker_metrics import PoolMetrics, RetrievingMetrics
from runtime.node.supervisor.supervised_worker import Phase, SupervisedWorker

_ROLES: tuple[Role, ...] = ("pool", "prefill", "decode", "http", "frontend")

log = logging.getLogger("supervisor")


class ReloadStatus(msgspec.Struct, frozen=True):
    """Progress of the reload with this number: whether it has finished, the workers that have reloaded, and the error
    that stopped it. The names in JSON are part of the admin protocol."""

    number: int
    finished: bool = msgspec.field(name="over")
    workers: tuple[str, ...] = msgspec.field(name="done", default=())
    error: str = msgspec.field(name="trouble", default="")


class RollingReload:
    """The current reload; a new request replaces it. `step` is called by the supervisor's loop."""

    def __init__(self, workers: Sequence[SupervisedWorker], collections: Sequence[str]) -> None:
        self._workers, self._collections = workers, collections  # the supervisor's list, which changes as it scales
        self._number, self._collection = 0, -1.0
        self._waiting: list[str] = []
        self._current = ""  # the worker that has been sent the reload
        self._reloaded: list[str] = []
        self._error = ""

    def request(self, collection: str) -> ReloadStatus:
        """Start a reload of one collection, or of all with ""."""
        if not self._collections or (collection and collection not in self._collections):
            known = ", ".join(self._collections) or "none"
            return ReloadStatus(0, True, error=f"no collection {collection!r} on this node; known: {known}")
        self._number += 1
        self._collection = float(self._collections.index(collection)) if collection else -1.0
        self._waiting = [worker.name for role in _ROLES for worker in self._workers if worker.placement.role == role]
        self._current, self._reloaded, self._error = "", [], ""
        log.info("%s: reload %d", f"collection {collection}" if collection else "every collection", self._number)
        return self.status()

    def status(self) -> ReloadStatus:
        """Return the progress of the current reload."""
        finished = not self._waiting or bool(self._error)
        return ReloadStatus(self._number, finished, tuple(self._reloaded), self._error)

    def step(self) -> None:
        """Send the reload to the next worker once the previous one has finished."""
        if not self._waiting or self._error:
            return
        name = self._waiting[0]
        worker = next((worker for worker in self._workers if worker.name == name), None)
        # A starting worker may have opened the old files: wait for it. One that does not run opens the new ones.
        if worker is None or (self._current != name and worker.phase not in (Phase.READY, Phase.STARTING)):
            self._waiting.pop(0)
        elif worker.phase is Phase.READY:
            self._send_or_poll(worker)

    def _send_or_poll(self, worker: SupervisedWorker) -> None:
        table, pool = worker.table, worker.placement.role == "pool"
        metrics = PoolMetrics if pool else RetrievingMetrics
        if self._current != worker.name:
            self._current = worker.name
            table.set_knob("reload_of", self._collection)
            table.set_knob("reload", float(self._number))
        elif table.value(metrics.RELOAD) == self._number:
            self._waiting.pop(0)
            if table.value(metrics.RELOAD_REFUSED):
                self._error = f"{worker.name}: {table.note or 'the collection cannot be served'}"
            else:
                self._reloaded.append(worker.name)
