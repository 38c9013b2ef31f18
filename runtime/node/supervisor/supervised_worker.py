"""State that the supervisor keeps for each worker, and helpers that start, feed and kill its process."""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from runtime.node.metrics.table import State, WorkerTable
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.backoff import Backoff
from runtime.node.supervisor.forks import Forked, Template, kill_group
from runtime.node.worker import WorkerSpec

MAX_FAILED_STARTS = 3  # consecutive failed starts after which a worker is reported as unable to run
_MISSED_HEARTBEAT_S = 3.0  # `trinity status` shows a note from this age on; a loop writes several heartbeats a second
_MAX_STACKS_BYTES = 32 << 10


class Desired(Enum):
    """Desired state of a worker."""

    RUN = "run"
    RESTART = "restart"  # drain and end its process, then start another one
    STOP = "stop"  # drain and end its process, start no other


class Phase(Enum):
    """Observed state of a worker, see `lifecycle`. In BACKOFF, STOPPED and FATAL it has no process."""

    BACKOFF = "backoff"
    STARTING = "starting"
    READY = "ready"
    STANDBY = "standby"  # a standby worker that is ready
    DRAINING = "draining"
    KILLED = "killed"
    STOPPED = "stopped"
    FATAL = "fatal"


@dataclass
class SupervisedWorker:
    """A worker of the plan and its current process, if it has one. `due`: time of the next transition of its phase.

    `needed`: the node becomes ready only after this worker has. `failed_starts`: consecutive ones. `failure`: how its
    last process ended, if that was not requested.
    """

    placement: WorkerPlan
    table: WorkerTable
    backoff: Backoff
    needed: bool = True
    desired: Desired = Desired.RUN
    phase: Phase = Phase.BACKOFF
    process: Forked | None = None
    epoch: int = 0
    restarts: int = 0
    started: float = 0.0
    due: float = 0.0
    was_ready: bool = False  # in any epoch
    exit_code: int | None = None
    last_exit: int = 0  # exit code of the previous process
    failed_starts: int = 0
    failure: str = ""
    stack_fd: int = -1  # anonymous file to which the process writes its threads' stacks on a fatal signal
    clock_ns: Callable[[], int] = time.monotonic_ns  # the clock of the heartbeats

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def reports_ready(self) -> bool:
        """Whether the current process has become ready. Until it opens the table, the table has the last epoch's
        state."""
        return self.table.epoch == self.epoch and self.table.state is not State.STARTING

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat of its loop."""
        return self.table.age_s(self.clock_ns())

    @property
    def cannot_run(self) -> bool:
        """Whether its last start ended with a configuration error, or several starts in a row failed."""
        return self.failed_starts >= MAX_FAILED_STARTS

    @property
    def may_use_standby(self) -> bool:
        """Whether its next start may take a standby worker's process: not if it was requested, nor as a retry."""
        return self.desired is Desired.RUN and not self.failed_starts

    def note(self, now_s: float) -> str:
        """Return the line that `trinity status` shows about the worker, "" if there is nothing to report."""
        if self.phase is Phase.READY and self.heartbeat_age_s > _MISSED_HEARTBEAT_S:
            return f"no heartbeat for {self.heartbeat_age_s:.0f} s"
        if not self.failure:
            return self.table.note
        if self.phase is Phase.BACKOFF:
            return f"{self.failure}; restarts in {max(0.0, self.due - now_s):.0f} s"
        return self.failure

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to its process; ignored if the process has ended."""
        if self.process is not None:
            self.process.send_signal(signum)

    def back_off(self, until: float = 0.0) -> None:
        """Enter BACKOFF; `until` is the earliest time of the next start, 0 for as soon as possible."""
        self.phase, self.due = Phase.BACKOFF, until

    def drain(self, signum: signal.Signals, until: float) -> None:
        """Drain its process until a deadline. DRAIN_SIGNAL: the node keeps running; SIGTERM: the node stops."""
        self.phase, self.due = Phase.DRAINING, until
        self.send_signal(signum)

    def read_stacks(self) -> str:
        """Return the stacks that its ended process wrote, "" if no fatal signal ended it, and close their file."""
        if self.stack_fd < 0:
            return ""
        with open(self.stack_fd, "rb") as file:
            self.stack_fd = -1
            file.seek(0)
            return file.read(_MAX_STACKS_BYTES).decode(errors="replace")

    def kill_group(self) -> None:
        """Kill its process and every process that it has started; it leads a session of its own."""
        if self.process is not None:
            kill_group(self.process.pid)


def spawn(template: Template, spec: WorkerSpec, placement: WorkerPlan, descriptors: Mapping[str, int]) -> Forked:
    """Fork a worker's process and send it its `WorkerSpec` on standard input. Raises `OSError`.

    The standard input of a standby worker stays open: its second `WorkerSpec` follows when it replaces a worker.
    """
    visible, threads = placement.visible_devices, str(placement.threads)
    process = template.fork(
        {
            "OMP_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
        },
        descriptors,
    )
    process.write(msgspec.json.encode(spec) + b"\n", last=placement.spare is None)
    return process
