"""Lifecycle of worker processes: a reconciler that moves each worker from its observed to its desired state.

```
             start         reports ready     DRAIN_SIGNAL            process exit
BACKOFF ────────────▶ STARTING ────▶ READY ────────────▶ DRAINING ──┬──────────▶ BACKOFF, due at once  (RESTART)
   ▲      when due        │            │  RESTART or STOP is desired └──────────▶ STOPPED               (STOP)
   │                      ▼            ▼
   └──── process exit ─ KILLED: start timeout in STARTING, or no heartbeat in READY or DRAINING
```

A worker that ends unexpectedly restarts with exponential back-off. A worker that cannot run (exit code `EXIT_CONFIG`,
or `MAX_FAILED_STARTS` failed starts in a row) stops the node if it was never ready and is needed, is removed if it was
added to a running node, and is retried with growing back-off if it ran before: the other workers keep serving.
"""

import logging
import signal
from collections.abc import Callable, Iterable, Sequence

from runtime.errors import EXIT_CONFIG
from runtime.node.config import NodeConfig
from runtime.node.supervisor.forks import describe_exit, kill_group
from runtime.node.supervisor.supervised_worker import (
    MAX_FAILED_STARTS,
    Desired,
    Phase,
    SupervisedWorker,
)
from runtime.node.worker import DRAIN_SIGNAL

HEARTBEAT_S = 30.0  # a worker without a heartbeat for this time is killed; loops write several a second
_SLOW_START_S = 15.0  # a start that takes longer is logged
_ABORT_GRACE_S = 2.0  # time for a hung worker to write its stacks after SIGABRT, before SIGKILL

log = logging.getLogger("supervisor")


class Lifecycle:
    """Reconciler of one node's worker processes.

    `spawn` starts a worker's process; its second argument permits the use of a standby worker's process. It raises
    `OSError` if the system has no memory or process left. `can_spawn`: whether it would return at once; until then the
    worker is not started.
    """

    def __init__(
        self,
        config: NodeConfig,
        spawn: Callable[[SupervisedWorker, bool], None],
        clock: Callable[[], float],
        can_spawn: Callable[[SupervisedWorker], bool] = lambda worker: True,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._config, self._spawn, self._clock, self._can_spawn = config, spawn, clock, can_spawn
        self._stops_by: float | None = None  # deadline of the node's stop

    def reap(self, workers: Iterable[SupervisedWorker]) -> None:
        """Record the exits of ended processes."""
        for worker in workers:
            if worker.process is None or (code := worker.process.poll()) is None:
                continue
            kill_group(worker.process.pid)  # processes that it started and left behind
            worker.process.close_input()
            worker.process, worker.exit_code, worker.last_exit = None, code, code
            if stacks := worker.read_stacks():
                log.error("%s ended by a fatal signal; its stacks:", worker.name, extra={"detail": stacks})
            match worker.desired:
                case Desired.STOP:
                    worker.phase = Phase.STOPPED
                case Desired.RESTART:
                    worker.back_off()
                case Desired.RUN:
                    self._handle_failure(worker, describe_exit(code))

    def reconcile(self, workers: Sequence[SupervisedWorker]) -> None:
        """Take the next step towards the desired state of every worker that has one due."""
        for worker in workers:
            if worker.process is not None:
                self._advance(worker)
            elif worker.desired is Desired.STOP:
                worker.phase = Phase.STOPPED
            elif worker.phase is Phase.BACKOFF and self._clock() >= worker.due and self._can_spawn(worker):
                self._start(worker)

    def stop(self, workers: Sequence[SupervisedWorker], by: float) -> None:
        """Drain these workers until the deadline `by`, as part of the node's stop. Their clients have ended already."""
        self._stops_by = by
        for worker in workers:
            worker.desired = Desired.STOP
            if worker.phase is Phase.DRAINING:
                worker.drain(signal.SIGTERM, until=by)  # after DRAIN_SIGNAL it waits for a frontend, which has ended
        self.reconcile(workers)

    def _advance(self, worker: SupervisedWorker) -> None:
        """Take over readiness from the table; drain the process on request; kill it on a timeout."""
        now, node = self._clock(), self._config.node
        if worker.phase is Phase.STARTING and worker.reports_ready:
            worker.phase = Phase.READY if worker.placement.spare is None else Phase.STANDBY
            worker.was_ready, worker.failed_starts, worker.failure = True, 0, ""
        match worker.phase:
            case Phase.STARTING | Phase.STANDBY if worker.desired is not Desired.RUN:
                worker.kill_group()  # it has no requests, and may handle signals late while it loads
            case Phase.STARTING if now - worker.started > node.start_s:
                self._abort(worker, f"is not ready after node.start_s = {node.start_s:g} s")
            case Phase.STARTING if now >= worker.due:
                log.info(
                    "%s still starts: large models load slowly, and the first start compiles code (trinity precompile)",
                    worker.name,
                )
                worker.due = float("inf")
            case Phase.READY | Phase.STANDBY | Phase.DRAINING if worker.heartbeat_age_s > self._heartbeat_s:
                self._abort(worker, f"has no heartbeat for {self._heartbeat_s:g} s")
            case Phase.READY if worker.desired is not Desired.RUN:
                if self._stops_by is None:
                    worker.drain(DRAIN_SIGNAL, until=now + self._drain_s(worker))
                else:
                    worker.drain(signal.SIGTERM, until=self._stops_by)
            case Phase.DRAINING if now > worker.due:
                log.warning("%s has not drained within %g s: killed", worker.name, self._drain_s(worker))
                worker.kill_group()
                worker.due = float("inf")
            case Phase.KILLED if now >= worker.due:
                worker.kill_group()

    def _drain_s(self, worker: SupervisedWorker) -> float:
        """Return the drain timeout: a removed worker finishes its requests; those that a restart cuts off are retried
        by another worker or by the next process."""
        removed = worker.desired is Desired.STOP
        return self._config.http.request_timeout_s if removed else self._config.node.drain_s

    def _abort(self, worker: SupervisedWorker, reason: str) -> None:
        """Send SIGABRT, on which the process writes its threads' stacks and ends; SIGKILL follows after a grace."""
        log.error("%s %s: killed", worker.name, reason)
        worker.send_signal(signal.SIGABRT)
        worker.phase, worker.due = Phase.KILLED, self._clock() + _ABORT_GRACE_S

    def _start(self, worker: SupervisedWorker) -> None:
        worker.epoch += 1
        worker.started, worker.exit_code, worker.table.note = self._clock(), None, ""
        use_standby = worker.may_use_standby
        worker.desired = Desired.RUN
        try:
            self._spawn(worker, use_standby)
        except OSError as error:  # no memory, or no process left
            self._handle_failure(worker, f"could not be started: {error}")
        else:
            worker.phase, worker.due = Phase.STARTING, worker.started + _SLOW_START_S

    def _handle_failure(self, worker: SupervisedWorker, how: str) -> None:
        """Schedule the restart of a worker that ended unexpectedly or could not be started, or give it up."""
        ran_s = self._clock() - worker.started if worker.reports_ready else 0.0
        worker.was_ready = worker.was_ready or worker.reports_ready  # it may have ended before `_advance` saw it
        worker.failed_starts = 0 if worker.reports_ready else worker.failed_starts + 1
        if worker.exit_code == EXIT_CONFIG:
            worker.failed_starts = max(worker.failed_starts, MAX_FAILED_STARTS)
        exited = worker.exit_code is not None and worker.exit_code > 0  # else its note is from an earlier epoch
        reason = f"{how}: {worker.table.note}" if exited and worker.table.note else how
        if worker.cannot_run and not worker.was_ready and worker.placement.spare is None:
            log.error("%s cannot run (%s): %s", worker.name, reason, "the node stops" if worker.needed else "removed")
            if worker.needed:
                worker.phase = Phase.FATAL
            else:
                worker.desired, worker.phase = Desired.STOP, Phase.STOPPED
            return
        delay = worker.backoff.next_delay(ran_s)
        worker.back_off(self._clock() + delay)
        worker.restarts += 1
        if worker.cannot_run:
            worker.failure = f"cannot run ({reason})"
            log.error("%s cannot run (%s): the others keep serving, it restarts in %.2f s", worker.name, reason, delay)
        else:
            worker.failure = f"ended ({reason})"
            log.warning("%s ended (%s); it restarts in %.2f s", worker.name, reason, delay)
