"""The supervisor's side of the template from which it forks workers, see `runtime.node.forking`."""

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from runtime.node.config import Role
from runtime.node.forking import MESSAGE_BYTES, ONE_THREAD, READY, STDIN

COMMAND = (sys.executable, "-m", "runtime.worker_process")
"""Starts a template, with the descriptor of its socket as a further argument."""
_HEAVY: Collection[Role] = ("prefill", "decode")  # they import torch: the template does before it forks them
_NAME = "the process from which workers are forked"
_FORK_S = 30.0
_REPLY_S = 5.0
"""Limit of its answer before it forks: the supervisor's loop does not wait for a template that is stopped."""
_PR_SET_CHILD_SUBREAPER = 36
log = logging.getLogger("supervisor")


class Forked:
    """A worker's process, which this one did not start, but is the parent of."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal; ignored if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def write(self, line: bytes, *, last: bool) -> None:
        """Write a line to its standard input, and close it after the `last` one; ignored if it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(line)
            self.stdin.flush()
        if last:
            self.close_input()

    def close_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


class Template:
    """The template: started with the first worker, and anew with the next one if it has ended or does not answer.

    start_s: limit of `node` for its imports.
    """

    def __init__(
        self, command: Sequence[str], start_s: float = 600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._command, self._start_s, self._clock = command, start_s, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._imports_since_s: float | None = None
        self._asked_s: float | None = None  # since when it is to answer that it can fork
        self._answers = False  # it has since the last `receive`
        self._wanted: set[Role] = set()
        self._loaded: set[Role] = set()
        self._failure = ""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do; -1 if there is none."""
        return self._socket.fileno() if self._socket else -1

    def start(self) -> None:
        """Start it unless it runs. Raises `OSError`."""
        if self._socket:
            return
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(_FORK_S)
        with contextlib.ExitStack() as on_error, its:
            on_error.callback(own.close)
            self._process = subprocess.Popen(
                [*self._command, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
                pass_fds=[its.fileno()],
                env=os.environ | ONE_THREAD,
            )
            on_error.pop_all()
        self._socket, self._loaded, self._failure = own, set(), ""
        self._imports_since_s = self._clock()

    def receive(self) -> None:
        """Notice that it has imported what it was to, has ended, does not come to an end with its imports, or does not
        answer."""
        self._answers = False
        while self._socket and select.select([self._socket], [], [], 0)[0]:
            try:
                self._receive()
            except ChildProcessError as error:
                if self._imports_since_s is not None:  # else the next worker starts another one
                    self._failure = str(error)
        since_s = self._imports_since_s
        if self._socket and since_s is not None and self._clock() - since_s > self._start_s:
            self.close()
            self._failure = f"{_NAME} has not imported what they use within node.start_s = {self._start_s:g} s"
        if self._socket and self._asked_s is not None and self._clock() - self._asked_s > _REPLY_S:
            log.warning("%s did not answer within %g s: killed; another one is started", _NAME, _REPLY_S)
            self.close()

    def import_wanted(self) -> None:
        """Have it import what the roles use that have been asked for, once all workers are forked that can be."""
        if missing := sorted(self._wanted - self._loaded if self._socket and not self._is_busy else ()):
            self._imports_since_s = self._clock()
            self._loaded.update(missing)
            self._send({"roles": missing})

    def load(self, roles: Iterable[Role]) -> None:
        """Have it import what workers of these roles use, when it has time."""
        self._wanted.update(roles)

    def can_fork(self, role: Role) -> bool:
        """Whether `fork` returns at once. If not, ask again after `receive`."""
        if role in _HEAVY:
            self._wanted.add(role)
        if not self._socket and not self._failure:
            with contextlib.suppress(OSError):  # `fork` raises it
                self.start()
        if not self._socket:
            return True
        if self._is_busy or (role in _HEAVY and role not in self._loaded):
            return False
        if not self._answers:
            self._asked_s = self._clock()
            self._send({"roles": ()})
        return self._answers

    def fork(self, environment: Mapping[str, str], descriptors: Mapping[str, int]) -> Forked:
        """Return a new worker's process, with these environment variables, and descriptors by their names.

        Raises `OSError` if there is no memory or process left, or the template ends, or has ended while it imported.
        """
        if self._failure:
            failure, self._failure = self._failure, ""
            raise ChildProcessError(failure)
        self.start()
        assert self._socket
        read, write = os.pipe()
        with contextlib.ExitStack() as on_error, os.fdopen(read):
            stdin = on_error.enter_context(os.fdopen(write, "wb"))
            with _parent_of_orphans():
                names, numbers = (STDIN, *descriptors), (read, *descriptors.values())
                self._send({"environment": dict(environment), "names": names}, numbers)
                while (answer := self._receive()) == READY:
                    pass
            on_error.pop_all()
        return Forked(int(answer), stdin)

    @property
    def _is_busy(self) -> bool:
        return self._imports_since_s is not None or self._asked_s is not None

    def _send(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._socket
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: the next `recv` says so
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)

    def _receive(self) -> bytes:
        """Return what it says. Raises `ChildProcessError` if it has ended, or is silent for too long."""
        assert self._socket
        try:
            message = self._socket.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        except TimeoutError:
            self.close()
            raise ChildProcessError(f"{_NAME} did not answer within {_FORK_S:g} s") from None
        if not message:
            raise ChildProcessError(f"{_NAME} ended with {describe_exit(self.close())}")
        self._answers = True
        if message == READY:
            self._imports_since_s = self._asked_s = None
        return message

    def renew(self) -> None:
        """Have workers that are forked from now on use what is installed now."""
        self.close()
        with contextlib.suppress(OSError):  # `fork` raises it
            self.start()

    def close(self) -> int:
        """End it and return its exit code. Its workers live on."""
        code = 0
        if self._socket and self._process:
            self._socket.close()
            kill_group(self._process.pid)  # a process between it and a worker, too, and a worker that has not answered
            code = self._process.wait()
            _reap_group(self._process.pid)
        self._socket = self._process = self._asked_s = None
        return code


@contextlib.contextmanager
def _parent_of_orphans() -> Iterator[None]:
    """Be the parent of processes below this one whose parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def kill_group(leader: int) -> None:
    """Kill a process group; ignored if no process of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: only zombies are left
        os.killpg(leader, signal.SIGKILL)


def _reap_group(leader: int) -> None:
    """Reap the killed processes of a group whose parent this one has become, see `_parent_of_orphans`."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-leader, 0)


def describe_exit(code: int) -> str:
    """Return an exit code as text: "exit code 1", "signal SIGKILL"."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
