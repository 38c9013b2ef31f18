"""Standby workers: processes that have loaded a role's model and libraries and replace a worker that dies.

A standby worker takes over name, epoch, table and endpoint of a worker with the same placement (device and cores). It
replaces workers that died; a requested restart starts a new process, and so do the retries of a failed start. Standby
workers start in the background, one at a time, once the node has been ready and while none of its workers is starting,
so that loading does not compete with them.
"""

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.supervised_worker import Desired, Phase, SupervisedWorker

log = logging.getLogger("supervisor")


class StandbyWorkers:
    """The standby workers of one node (`spares`). `workers` is the supervisor's list, which changes as it scales."""

    def __init__(self, spares: Sequence[SupervisedWorker], workers: Sequence[SupervisedWorker]) -> None:
        self.spares, self._workers = tuple(spares), workers

    def assign(self, worker: SupervisedWorker) -> bool:
        """Move the process of a matching standby worker to `worker`. Returns False if there is none.

        The caller sends the process its new `WorkerSpec`.
        """
        spare = self._match(worker.placement)
        if spare is None:
            return False
        log.info("%s replaces %s", spare.name, worker.name)
        worker.process, worker.stack_fd = spare.process, spare.stack_fd
        spare.process, spare.stack_fd = None, -1
        spare.back_off()
        return True

    def is_loaded_for(self, placement: WorkerPlan) -> bool:
        """Return whether a standby worker would take this place: its memory is allocated already."""
        return self._match(placement) is not None

    def _match(self, placement: WorkerPlan) -> SupervisedWorker | None:
        matching = (s for s in self.spares if s.phase is Phase.STANDBY and _matches(s.placement, placement))
        return next(matching, None)

    def restart_all(self) -> None:
        """Restart them, as part of a restart of the whole node."""
        for spare in self.spares:
            if spare.process is not None:
                spare.desired = Desired.RESTART

    def step(self, *, may_start: bool) -> tuple[SupervisedWorker, ...]:
        """Update their desired states, and return those that are to be reconciled now.

        A standby worker runs only while there is a worker that it could replace: not on a GPU that was drained. A
        worker that died skips its back-off if a standby worker matches: loading the next one limits the rate enough.
        """
        for worker in self._workers:
            if worker.phase is Phase.BACKOFF and not worker.failed_starts and self.is_loaded_for(worker.placement):
                worker.due = 0.0
        restarting = [worker for worker in self._workers if worker.phase is Phase.BACKOFF and not worker.cannot_run]
        starting = [worker for worker in (*self._workers, *self.spares) if worker.phase is Phase.STARTING]
        may_start = may_start and not restarting and not starting
        chosen = []
        for spare in self.spares:
            useful = any(
                _matches(spare.placement, worker.placement)
                for worker in self._workers
                if worker.desired is not Desired.STOP
            )
            if not useful:
                spare.desired = Desired.STOP
            elif spare.desired is Desired.STOP and spare.process is None:
                spare.desired = Desired.RUN
                spare.back_off()
            if spare.process is not None or not useful:
                chosen.append(spare)
            elif may_start:
                chosen.append(spare)
                may_start = False
        return tuple(chosen)


def _matches(spare: WorkerPlan, placement: WorkerPlan) -> bool:
    return replace(spare, index=placement.index, spare=None) == placement
