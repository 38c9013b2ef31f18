"""The life of a node's worker processes: each is brought, step by step, to what is desired of it.

```
             start          says ready         SIGHUP                 its end
BACKOFF ────────────▶ STARTING ────▶ READY ────────────▶ DRAINING ──┬──────────▶ BACKOFF, due at once  (RESTART)
   ▲    when it is due    │            │  RESTART or GONE is desired └──────────▶ STOPPED               (GONE)
   │                      ▼            ▼
   └─────── its end ─── KILLED: too long in STARTING, or without a heartbeat in READY or DRAINING
```

A worker that ends unasked starts again after a growing delay. One that cannot run (it says so by its exit code, or it
fails to start time after time) ends the node if the node needs it to be ready at all, is given up if it was added to a
node that has done without it, and else, when it has run before, is tried again less and less often: the others go on.
"""

import logging
import signal
from collections.abc import Callable, Iterable, Sequence

from runtime.errors import EXIT_CONFIG
from runtime.node.config import NodeConfig
from runtime.node.supervisor.supervised_worker import (
    MOST_FAILED_STARTS,
    Child,
    Desired,
    Phase,
    close_input,
    how,
    kill_group,
)

_SLOW_START_S = 15.0  # after it a person who waits is told why
_LAST_WORDS_S = 2.0  # for a worker that hangs to write its stacks, before it is killed

log = logging.getLogger("supervisor")


class Lifecycle:
    """Of one node's processes.

    `spawn` gives a child a process, which may be a standby worker's if it is told True. It raises `OSError` if there is
    none to be had.
    """

    def __init__(self, config: NodeConfig, spawn: Callable[[Child, bool], None], clock: Callable[[], float]) -> None:
        self._config, self._spawn, self._clock = config, spawn, clock
        self._stops_by: float | None = None  # when the node stops

    def reap(self, children: Iterable[Child]) -> None:
        """Take note of whose process has ended."""
        for child in children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            kill_group(child.process.pid)  # what it started and left behind
            close_input(child.process)
            child.process, child.exit_code, child.last_exit = None, code, code
            if stacks := child.take_stacks():
                log.error("%s ended by a fatal signal; its stacks:", child.name, extra={"detail": stacks})
            match child.desired:
                case Desired.GONE:
                    child.phase = Phase.STOPPED
                case Desired.RESTART:
                    child.back_off()
                case Desired.RUN:
                    self._ended(child, how(code))

    def reconcile(self, children: Sequence[Child]) -> None:
        """Bring every one of them nearer to what is desired of it, where that is possible now."""
        for child in children:
            if child.process is not None:
                self._guide(child)
            elif child.desired is Desired.GONE:
                child.phase = Phase.STOPPED
            elif child.phase is Phase.BACKOFF and self._clock() >= child.due:
                self._start(child)

    def stop(self, children: Sequence[Child], by: float) -> None:
        """The node stops: have these end when they have finished what they have, by then. Who asks them has ended."""
        self._stops_by = by
        for child in children:
            child.desired = Desired.GONE
            if child.phase is Phase.DRAINING:
                child.drain(signal.SIGTERM, until=by)  # the frontend, which it waits for, releases it no more
        self.reconcile(children)

    def _guide(self, child: Child) -> None:
        """Note what its process says; have it drain if it shall end; kill it if it hangs."""
        now, node = self._clock(), self._config.node
        if child.phase is Phase.STARTING and child.says_ready:
            child.phase = Phase.READY if child.place.spare is None else Phase.STANDBY
            child.was_ready, child.failed_starts, child.failure = True, 0, ""
        match child.phase:
            case Phase.STARTING | Phase.STANDBY if child.desired is not Desired.RUN:
                child.kill_group()  # it holds nothing yet, and may be far from looking at signals
            case Phase.STARTING if now - child.started > node.start_s:
                self._abort(child, f"is not ready after node.start_s = {node.start_s:g} s")
            case Phase.STARTING if now >= child.due:
                log.info("%s still starts: code is compiled the first time, and large models take long", child.name)
                child.due = float("inf")
            case Phase.READY | Phase.STANDBY | Phase.DRAINING if child.silent_s > node.heartbeat_s:
                self._abort(child, f"has no heartbeat for {node.heartbeat_s:g} s")
            case Phase.READY if child.desired is not Desired.RUN:
                if self._stops_by is None:
                    child.drain(signal.SIGHUP, until=now + self._drain_s(child))
                else:
                    child.drain(signal.SIGTERM, until=self._stops_by)
            case Phase.DRAINING if now > child.due:
                log.warning("%s has not drained within %g s: killed", child.name, self._drain_s(child))
                child.kill_group()
                child.due = float("inf")
            case Phase.KILLED if now >= child.due:
                child.kill_group()

    def _drain_s(self, child: Child) -> float:
        """Who leaves finishes all that it has; what a restart cuts short goes on at another worker, or at the next."""
        gone = child.desired is Desired.GONE
        return self._config.http.request_timeout_s if gone else self._config.node.drain_s

    def _abort(self, child: Child, reason: str) -> None:
        """Have it write its threads' stacks by which it ends; what does not end by that is killed soon after."""
        log.error("%s %s: killed", child.name, reason)
        child.send(signal.SIGABRT)
        child.phase, child.due = Phase.KILLED, self._clock() + _LAST_WORDS_S

    def _start(self, child: Child) -> None:
        child.epoch += 1
        child.started, child.exit_code, child.table.note = self._clock(), None, ""
        by_standby = child.desired is Desired.RUN and not child.failed_starts
        child.desired = Desired.RUN
        try:
            self._spawn(child, by_standby)
        except OSError as error:  # no memory or no process to be had just now
            self._ended(child, f"could not be started: {error}")
        else:
            child.phase, child.due = Phase.STARTING, child.started + _SLOW_START_S

    def _ended(self, child: Child, how: str) -> None:
        """A life is over that should have gone on, or could not begin: the next one after a while, or none."""
        ran_s = self._clock() - child.started if child.says_ready else 0.0
        child.was_ready = child.was_ready or child.says_ready  # if it ended before anybody could see it
        child.failed_starts = 0 if child.says_ready else child.failed_starts + 1
        if child.exit_code == EXIT_CONFIG:
            child.failed_starts = max(child.failed_starts, MOST_FAILED_STARTS)
        by_itself = child.exit_code is not None and child.exit_code > 0  # its note says why; else it is an older one
        said = f"{how}: {child.table.note}" if by_itself and child.table.note else how
        if child.cannot_run and not child.was_ready and child.place.spare is None:
            log.error("%s cannot run (%s): %s", child.name, said, "the node stops" if child.needed else "given up")
            if child.needed:
                child.phase = Phase.FATAL
            else:
                child.desired, child.phase = Desired.GONE, Phase.STOPPED
            return
        delay = child.backoff.next_delay(ran_s)
        child.back_off(self._clock() + delay)
        child.restarts += 1
        if child.cannot_run:
            child.failure = f"cannot run ({said})"
            log.error("%s cannot run (%s): the others go on, it starts again in %.2f s", child.name, said, delay)
        else:
            child.failure = f"ended ({said})"
            log.warning("%s ended (%s); it starts again in %.2f s", child.name, said, delay)
