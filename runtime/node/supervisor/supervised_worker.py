"""A worker of the plan as its supervisor holds it: the process that is it now, and how that is started and ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from runtime.node.metrics.table import State, WorkerTable
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.backoff import Backoff
from runtime.node.worker import WorkerSpec

MOST_FAILED_STARTS = 3  # one after the other: then it is a worker that cannot run
_SILENT_S = 3.0  # by then people are told; a loop beats several times a second
_MOST_STACKS = 32 << 10  # bytes
COMMAND = (sys.executable, "-m", "runtime.node.worker")


class Desired(Enum):
    """What shall become of a worker."""

    RUN = "run"
    RESTART = "restart"  # its process ends, drained, and another one begins
    GONE = "gone"  # its process ends, drained, and no other begins


class Phase(Enum):
    """Where a worker is (see `lifecycle`). In BACKOFF, STOPPED and FATAL it has no process."""

    BACKOFF = "backoff"
    STARTING = "starting"
    READY = "ready"
    STANDBY = "standby"  # what READY is of a worker, of one that waits to take another's place
    DRAINING = "draining"
    KILLED = "killed"
    STOPPED = "stopped"
    FATAL = "fatal"


@dataclass
class Child:
    """A worker of the plan and the process that is it now, if one is. `due`: when its phase calls for the next act.

    `needed`: the node is not ready before this worker was. `failed_starts`: one after the other. `failure`: how its
    last life ended, if it should have gone on.
    """

    place: WorkerPlan
    table: WorkerTable
    backoff: Backoff
    needed: bool = True
    desired: Desired = Desired.RUN
    phase: Phase = Phase.BACKOFF
    process: subprocess.Popen[bytes] | None = None
    epoch: int = 0
    restarts: int = 0
    started: float = 0.0
    due: float = 0.0
    was_ready: bool = False  # in any of its lives
    exit_code: int | None = None
    last_exit: int = 0  # how the life before this one ended
    failed_starts: int = 0
    failure: str = ""
    stack_fd: int = -1  # a file without a name, to which its process writes its threads' stacks at a fatal signal
    clock_ns: Callable[[], int] = time.monotonic_ns  # that of the heartbeats

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def says_ready(self) -> bool:
        """Whether its process of now has got ready; what the table says is that of the last one until it takes over."""
        return self.table.epoch == self.epoch and self.table.state is not State.STARTING

    @property
    def silent_s(self) -> float:
        """Seconds since its loop's last heartbeat."""
        return self.table.age_s(self.clock_ns())

    @property
    def cannot_run(self) -> bool:
        """Whether it said so at its last start, or failed to start time after time."""
        return self.failed_starts >= MOST_FAILED_STARTS

    def note(self, now_s: float) -> str:
        """What people should know of it, in a line; "" if nothing."""
        if self.phase is Phase.READY and self.silent_s > _SILENT_S:
            return f"no heartbeat for {self.silent_s:.0f} s"
        if not self.failure:
            return self.table.note
        if self.phase is Phase.BACKOFF:
            return f"{self.failure}; starts again in {max(0.0, self.due - now_s):.0f} s"
        return self.failure

    def send(self, kind: signal.Signals) -> None:
        """A signal to its process, which may have just ended."""
        if self.process is not None:
            self.process.send_signal(kind)

    def back_off(self, until: float = 0.0) -> None:
        """It has no process, and gets one when that time has come: 0: as soon as one may start."""
        self.phase, self.due = Phase.BACKOFF, until

    def drain(self, kind: signal.Signals, until: float) -> None:
        """Have its process finish what it has and end. SIGHUP: in a node that goes on, SIGTERM: in one that stops."""
        self.phase, self.due = Phase.DRAINING, until
        self.send(kind)

    def take_stacks(self) -> str:
        """What its process, which has ended, wrote there: "" if it did not end by such a signal."""
        if self.stack_fd < 0:
            return ""
        with open(self.stack_fd, "rb") as file:
            self.stack_fd = -1
            file.seek(0)
            return file.read(_MOST_STACKS).decode(errors="replace")

    def kill_group(self) -> None:
        """End its process and whatever that has started: it leads a session of its own."""
        if self.process is not None:
            kill_group(self.process.pid)


def spawn(command: Sequence[str], spec: WorkerSpec, place: WorkerPlan) -> subprocess.Popen[bytes]:
    """Start a worker's process; it finds its `WorkerSpec` on its standard input. Raises `OSError`.

    A standby worker's input stays open: who it shall be is told there later.
    """
    visible, threads = place.visible_devices, str(place.threads)
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
        pass_fds=[fd for fd in (spec.listen_fd, spec.stack_fd) if fd >= 0],
        env={
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
        },
    )
    tell(process, spec, last=place.spare is None)
    return process


def tell(process: subprocess.Popen[bytes], spec: WorkerSpec, *, last: bool = True) -> None:
    """Write a `WorkerSpec` to a process's standard input, and nothing after the `last`."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: who reaps will see it
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    if last:
        close_input(process)


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Nothing more will be said to it."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def kill_group(leader: int) -> None:
    """Kill a process group, if anything of it still lives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: all of it are zombies
        os.killpg(leader, signal.SIGKILL)


def how(code: int) -> str:
    """An exit code in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
