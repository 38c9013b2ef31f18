"""Rolling restart: drain and restart one worker after another while the others serve."""

import logging
from collections import deque
from collections.abc import Sequence

from runtime.node.supervisor.supervised_worker import Desired, Phase, SupervisedWorker

log = logging.getLogger("supervisor")


class RollingRestart:
    """Queue of workers to restart. `step` is called by the supervisor's loop."""

    def __init__(self, workers: Sequence[SupervisedWorker]) -> None:
        self._workers = workers  # the supervisor's list, which changes as it scales
        self._queue: deque[SupervisedWorker] = deque()

    def request(self, name: str) -> str:
        """Queue one worker, or all with "". Returns an error message, "" on success."""
        chosen = [worker for worker in self._workers if not name or worker.name == name]
        if not chosen:
            return f"no worker {name!r}; there are {', '.join(worker.name for worker in self._workers)}"
        for worker in chosen:
            if worker not in self._queue and worker.desired is not Desired.RESTART:
                self._queue.append(worker)
        return ""

    def step(self, now_s: float) -> None:
        """Restart the next worker once every worker is ready or cannot run.

        A worker that cannot run starts at once, without its back-off: the cause may have been fixed.
        """
        if not all(worker.phase is Phase.READY or worker.cannot_run for worker in self._workers):
            return
        while self._queue:
            worker = self._queue.popleft()
            if worker not in self._workers or worker.desired is Desired.STOP:  # removed since it was queued
                continue
            if worker.phase is Phase.READY:
                log.info("%s restarts: it drains first", worker.name)
                worker.desired = Desired.RESTART
            elif worker.phase is Phase.BACKOFF:
                worker.due = now_s
            return
