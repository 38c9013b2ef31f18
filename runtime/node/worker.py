"""One worker process: told what it is on its standard input, it runs its role's loop until it is told to stop.

`python -m runtime.node.worker` is started by the supervisor alone. It dies with the supervisor, never after it.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import platform
import select
import signal
import socket
import sys
from types import FrameType

import msgspec

from ipc import MemoryReference
from runtime.errors import TrinityError
from runtime.node.logs.log import log_to_file, log_to_stderr
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.metrics.worker_metrics import WorkerMetrics
from runtime.node.placement.plan import NodePlan
from runtime.node.startup import StartupTimer, process_age_s

_BEAT_S = 0.1  # between two heartbeats of a standby worker

LOOPS = {
    "pool": "runtime.pool.process",
    "prefill": "runtime.serving.prefill.process",
    "decode": "runtime.serving.decode.process",
    "engine": "runtime.engines.vllm.process",
    "frontend": "runtime.engines.frontend",
}


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is told: the plan, its name in it, its epoch, its table, and two file descriptors (or -1).

    `listen_fd` is the listening socket, `stack_fd` the file for its threads' stacks if it ends by a fatal signal.
    `node_ready`: the node was ready once, so that others may be serving. `last_exit`: how the life before this ended.
    """

    plan: NodePlan
    worker: str
    epoch: int
    table: MemoryReference
    supervisor_pid: int
    listen_fd: int = -1
    stack_fd: int = -1
    node_ready: bool = False
    last_exit: int = 0


class Worker:
    """What a role's loop is handed: the plan, its own place in it, its table, and whether it shall stop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.pid = os.getpid()
        self.startup = StartupTimer(age_s=process_age_s())
        self.stopping = False
        self.awaits_release = False
        self._listen_fd = spec.listen_fd
        self.stack_fd = spec.stack_fd if spec.stack_fd >= 0 else 2
        self._logs = contextlib.ExitStack()
        self._become(spec)

    def _become(self, spec: WorkerSpec) -> None:
        self.plan = spec.plan
        self.placement = next(place for place in spec.plan.processes if place.name == spec.worker)
        self.name = spec.worker
        self.epoch = spec.epoch
        self.table = WorkerTable.open(spec.table, self.placement.role, spec.plan.config.slo)
        self.table.begin(spec.epoch, self.pid)
        self.log = logging.getLogger(spec.worker)
        self.node_ready = spec.node_ready
        self.faulted = -spec.last_exit in (signal.SIGBUS, signal.SIGSEGV)  # the last life, in reading or writing memory

    def open_logs(self) -> None:
        """Have what is said go where the node's configuration has it, under the worker's name of now."""
        self._logs.close()
        self._logs.enter_context(log_to_stderr(self.plan.config.log, self.name))
        self._logs.enter_context(log_to_file(self.plan, self.name, self.count_lost_lines))

    def close_logs(self) -> None:
        self._logs.close()

    def await_assignment(self) -> bool:
        """Called by a role that has loaded all that does not depend on its worker's name, epoch, table and plan.

        A standby worker waits here until it is given the place of one that died: these are other ones then. Any other
        goes on at once. Returns whether it has waited. Raises `SystemExit` if it is to stop instead.
        """
        if self.placement.spare is None:
            return False
        self.ready()
        while not select.select([sys.stdin], [], [], _BEAT_S)[0]:
            self.table.beat()
            if self.stopping:
                raise SystemExit(0)
        if not (line := sys.stdin.buffer.readline()):
            raise SystemExit(0)  # nobody is there any more who could give it a place
        self.startup, former = StartupTimer(), self.table
        self._become(msgspec.json.decode(line, type=WorkerSpec))
        former.close()
        self.open_logs()
        return True

    def ready(self) -> None:
        """Everything is loaded; what lives now lives on, so the garbage collector need not look at it again.

        Nor need it look first: a start leaves 8,000 objects of garbage among 400,000, and finding them takes 0.2 s.
        What loading has freed goes back to the kernel: 70 MB of a model worker.
        """
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)
        gc.enable()
        self.startup.mark("rest")
        self.table.beat()
        self.table.state = State.READY
        self.log.info("ready after %s", self.startup)

    def stop(self) -> None:
        """Finish what there is and end; the frontend is gone, or goes before."""
        self.stopping = True
        self.awaits_release = False
        self.table.state = State.DRAINING

    def stop_when_released(self) -> None:
        """As `stop`, in a node that goes on: the frontend may have placed on it what is still on its way."""
        self.stop()
        self.awaits_release = True

    def should_continue(self, *, busy: bool, released: bool) -> bool:
        """Whether a serving loop has another round to do; `released`: the frontend has nothing placed on it now."""
        return not self.stopping or busy or (self.awaits_release and not released)

    def count_lost_lines(self, lines: int) -> None:
        """Told by the thread that writes the log."""
        self.table.add(WorkerMetrics.LOG_LINES_LOST, lines)

    def listening_socket(self) -> socket.socket:
        """The HTTP socket, bound by the supervisor: it outlives a frontend that dies."""
        return socket.socket(fileno=self._listen_fd)


def die_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `how` to this process when its parent ends; end at once if that has happened already."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> int:
    gc.disable()  # until `Worker.ready`: while modules are imported it finds nothing, and takes a fifth of the time
    try:
        spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
        die_with_parent(spec.supervisor_pid)
        worker = Worker(spec)
    except (msgspec.MsgspecError, ValueError) as error:  # Trinity was replaced by another version under a running node
        print(f"the supervisor runs another version of Trinity, restart the node: {error}", file=sys.stderr)
        return 1
    worker.open_logs()
    try:
        return _run(worker)
    finally:
        worker.close_logs()


def _run(worker: Worker) -> int:
    """Its role's loop, from the first import to its end; the exit code."""

    def stop(signum: int, frame: FrameType | None) -> None:
        worker.stop()

    def roll(signum: int, frame: FrameType | None) -> None:
        worker.stop_when_released()

    faulthandler.enable(worker.stack_fd)  # on SIGABRT too: the supervisor sends it to a loop that hangs
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, roll)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's: it drains
    if worker.placement.cores:
        os.sched_setaffinity(0, worker.placement.cores)
    node = worker.placement.numa_node
    if node is not None and not prefer_numa_node(node, platform.machine()):
        worker.log.warning("the kernel does not let memory prefer NUMA node %d", node)
    try:
        loop = importlib.import_module(LOOPS[worker.placement.role])
        worker.startup.mark("imports")
        loop.run(worker)
    except TrinityError as error:
        worker.log.error("%s: %s", error.code, error.message)
        worker.table.note = error.message
        return error.exit_code
    except Exception as error:
        worker.log.exception("the loop ended with a fault")
        worker.table.note = repr(error)
        return 1
    worker.log.info("stopped")
    return 0


# ---- memory near a GPU: the kernel's policy for where a process's pages go

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MAX_NODE = 64


def prefer_numa_node(node: int, machine: str) -> bool:
    """Have this process's new pages come from a NUMA node while it has some. False if the kernel does not let us."""
    number = _SET_MEMPOLICY.get(machine)
    if number is None or not 0 <= node < _MAX_NODE:
        return False
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(number, _MPOL_PREFERRED, ctypes.byref(mask), ctypes.c_ulong(_MAX_NODE + 1))) == 0


if __name__ == "__main__":
    sys.exit(main())
