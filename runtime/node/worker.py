"""A worker process: reads its `WorkerSpec` from standard input and runs the loop of its role until it is stopped.

It is forked from a process with its imports (`runtime.node.forking`), and killed when the supervisor dies.
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping

import msgspec

from ipc import MemoryReference
from runtime.errors import TrinityError
from runtime.node.config import Role
from runtime.node.forking import LISTEN, PRIVATE, STACK
from runtime.node.logs.log import log_to_file, log_to_stderr
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.metrics.worker_metrics import WorkerMetrics
from runtime.node.placement.plan import NodePlan
from runtime.node.startup import StartupTimer, process_age_s

DRAIN_SIGNAL = signal.SIGRTMIN
"""From the supervisor: drain, while the node keeps running. Nothing else sends it, as terminals send SIGHUP."""
_BEAT_S = 0.1  # interval of a standby worker's heartbeats


class WorkerSpec(msgspec.Struct, frozen=True):
    """Startup message of a worker: the plan, its name in the plan, its epoch, and its table.

    `node_ready`: the node has been ready before, so other replicas may be serving. `last_exit`: exit code of the
    previous process. `waited_s`: how long the worker waited for the imports of the process that it is forked from.
    """

    plan: NodePlan
    worker: str
    epoch: int
    table: MemoryReference
    supervisor_pid: int
    node_ready: bool = False
    last_exit: int = 0
    waited_s: float = 0.0


class Worker:
    """Context of a role's loop: the plan, the worker's own placement, its table, and its stop flags. `descriptors`: by
    their names in `forking`."""

    def __init__(self, spec: WorkerSpec, descriptors: Mapping[str, int] = {}) -> None:
        self.pid = os.getpid()
        self.startup = StartupTimer(age_s=process_age_s() + spec.waited_s)
        self.stopping = False
        self.awaits_release = False
        self.descriptors = descriptors
        self._logs = contextlib.ExitStack()
        self._apply(spec)

    def _apply(self, spec: WorkerSpec) -> None:
        self.plan = spec.plan
        self.placement = next(placement for placement in spec.plan.processes if placement.name == spec.worker)
        self.name = spec.worker
        self.epoch = spec.epoch
        self.table = WorkerTable.open(spec.table, self.placement.role, spec.plan.config.slo)
        self.table.begin(spec.epoch, self.pid)
        self.log = logging.getLogger(spec.worker)
        self.node_ready = spec.node_ready
        # the previous process ended on a memory fault
        self.faulted = -spec.last_exit in (signal.SIGBUS, signal.SIGSEGV)

    def open_logs(self) -> None:
        """Open the configured log outputs under the worker's current name."""
        self._logs.close()
        self._logs.enter_context(log_to_stderr(self.plan.config.log, self.name))
        self._logs.enter_context(log_to_file(self.plan, self.name, self.count_lost_lines))

    def close_logs(self) -> None:
        self._logs.close()

    def await_assignment(self) -> bool:
        """Wait, as a standby worker, until this process replaces a worker that died; return at once in any other
        worker.

        A role calls it once everything is loaded that does not depend on its name, epoch, table and plan: they have
        changed when it returns True. Raises `SystemExit` on a stop.
        """
        if self.placement.spare is None:
            return False
        self.ready()
        while not select.select([sys.stdin], [], [], _BEAT_S)[0]:
            self.table.beat()
            if self.stopping:
                raise SystemExit(0)
        if not (line := sys.stdin.buffer.readline()):
            raise SystemExit(0)  # the supervisor has closed the pipe or ended
        self.startup, former = StartupTimer(), self.table
        self._apply(msgspec.json.decode(line, type=WorkerSpec))
        former.close()
        self.open_logs()
        return True

    def ready(self) -> None:
        """Report that the worker is ready. Loaded objects are exempted from garbage collection.

        There is no collection before: a start leaves 8,000 objects of garbage among 400,000, and finding them takes 0.2
        s. Memory freed during loading is returned to the kernel: 70 MB in a model worker.
        """
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)
        gc.enable()
        self.startup.mark("rest")
        self.table.beat()
        self.table.state = State.READY
        self.log.info("ready after %s", self.startup)

    def stop(self) -> None:
        """Stop once all requests are finished; the frontend has ended, or ends first."""
        self.stopping = True
        self.awaits_release = False
        self.table.state = State.DRAINING

    def stop_when_released(self) -> None:
        """Stop as `stop` does, but not before the frontend, which may have requests on their way here, has released the
        worker."""
        self.stop()
        self.awaits_release = True

    def should_continue(self, *, busy: bool, released: bool) -> bool:
        """Whether a serving loop runs another iteration; `released`: the frontend has no request on this worker."""
        return not self.stopping or busy or (self.awaits_release and not released)

    def count_lost_lines(self, lines: int) -> None:
        """Count lost log lines; called by the logging thread."""
        self.table.add(WorkerMetrics.LOG_LINES_LOST, lines)

    def listening_socket(self) -> socket.socket:
        """Return the HTTP socket, which the supervisor has bound: it survives the death of a frontend."""
        return socket.socket(fileno=self.descriptors[LISTEN])

    def private_socket(self) -> socket.socket:
        """Return the socket on which the frontend answers HTTP workers, which survives it, too."""
        return socket.socket(fileno=self.descriptors[PRIVATE])


def die_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the parent ends; exit at once if it has ended already."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def main(loop_of: Callable[[Role], Callable[[Worker], None]], descriptors: Mapping[str, int]) -> int:
    """Run the worker that the first line of the standard input describes; return the exit code.

    loop_of: imports and returns the loop of a role. descriptors: as of `Worker`.
    """
    gc.disable()  # until `Worker.ready`: during imports it frees nothing and takes a fifth of the time
    try:
        spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
        die_with_parent(spec.supervisor_pid)
        worker = Worker(spec, descriptors)
    except (msgspec.MsgspecError, ValueError) as error:  # the installed version was changed under a running node
        print(f"the supervisor runs another version of Trinity, restart the node: {error}", file=sys.stderr)
        return 1
    worker.open_logs()
    try:
        return _run(worker, loop_of)
    finally:
        worker.close_logs()


def _run(worker: Worker, loop_of: Callable[[Role], Callable[[Worker], None]]) -> int:
    """Run the role's loop and return the exit code."""
    faulthandler.enable(worker.descriptors[STACK])  # also on SIGABRT, which the supervisor sends to a hung worker
    signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
    signal.signal(DRAIN_SIGNAL, lambda number, frame: worker.stop_when_released())
    for terminal in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C, or its end: the supervisor drains the node
        signal.signal(terminal, signal.SIG_IGN)
    if worker.placement.cores:
        os.sched_setaffinity(0, worker.placement.cores)
    try:
        run = loop_of(worker.placement.role)
        worker.startup.mark("imports")
        run(worker)
    except TrinityError as error:
        worker.log.error("%s: %s", error.code, error.message)
        worker.table.note = error.message
        return error.exit_code
    except Exception as error:
        worker.log.exception("unhandled exception in the loop")
        worker.table.note = repr(error)
        return 1
    worker.log.info("stopped")
    return 0
