"""Standby workers: processes that have loaded what a role loads, and wait to take the place of a worker that dies.

A standby worker takes over name, epoch, table and endpoint of one that is placed as it is itself: on the same device,
with the same cores. It stands in for a death alone: a restart that was asked for begins with a new process, and so do
the next tries of a worker whose start has failed. Another standby worker is started in the background, one at a time,
when the node has been ready and none of its workers is starting: loading is left to who is needed first.
"""

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.supervised_worker import Child, Desired, Phase

log = logging.getLogger("supervisor")


class Standbys:
    """Those of one node, as children of its supervisor; `workers` are the node's own, who come and go."""

    def __init__(self, children: Sequence[Child], workers: Sequence[Child]) -> None:
        self.children, self._workers = tuple(children), workers

    def stand_in(self, child: Child) -> bool:
        """Make the process of a standby worker that fits `child`'s, but tell it nothing yet. False if there is none."""
        spare = self._for(child)
        if spare is None:
            return False
        log.info("%s takes the place of %s", spare.name, child.name)
        child.process, child.stack_fd = spare.process, spare.stack_fd
        spare.process, spare.stack_fd = None, -1
        spare.back_off()
        return True

    def _for(self, child: Child) -> Child | None:
        fitting = (s for s in self.children if s.phase is Phase.STANDBY and _fits(s.place, child.place))
        return next(fitting, None)

    def renew(self) -> None:
        """Start them anew, as they would be after a restart of the whole node."""
        for spare in self.children:
            if spare.process is not None:
                spare.desired = Desired.RESTART

    def step(self, *, may_start: bool) -> tuple[Child, ...]:
        """Those that are to be brought nearer to what is desired of them.

        A standby worker is there as long as a worker is that it could stand in for: not on a GPU that was drained. A
        worker that died does not wait for its back-off while one stands by: loading the next one slows deaths enough.
        """
        for child in self._workers:
            if child.phase is Phase.BACKOFF and not child.failed_starts and self._for(child) is not None:
                child.due = 0.0
        coming = [child for child in self._workers if child.phase is Phase.BACKOFF and not child.cannot_run]
        starting = [child for child in (*self._workers, *self.children) if child.phase is Phase.STARTING]
        may_start = may_start and not coming and not starting
        chosen = []
        for spare in self.children:
            of_use = any(_fits(spare.place, w.place) for w in self._workers if w.desired is not Desired.GONE)
            if not of_use:
                spare.desired = Desired.GONE
            elif spare.desired is Desired.GONE and spare.process is None:
                spare.desired = Desired.RUN
                spare.back_off()
            if spare.process is not None or not of_use:
                chosen.append(spare)
            elif may_start:
                chosen.append(spare)
                may_start = False
        return tuple(chosen)


def _fits(spare: WorkerPlan, place: WorkerPlan) -> bool:
    return replace(spare, index=place.index, spare=None) == place
