"""The processes of one vLLM instance, which end with the worker that started them.

vLLM's server starts further processes (its engine core, a worker for each GPU), which survive a kill of the server. All
of them are in the process group that the worker leads:

- if the server dies, the worker detects it and exits;
- if the worker dies, alone or with its supervisor, the watchdog reads end-of-file and kills the group. The supervisor,
  if alive, does the same.
"""

import http.client
import logging
import os
import re
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# ---- vLLM's output as our log lines, and the error in it that explains why it ended


_LINE = re.compile(
    r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: [\d-]+ [\d:]+)?:? *(?:\[[^\]]*\] ?)?(.*)", re.DOTALL
)
_ERROR = re.compile(r"(?:^|\s)(?:[\w.]+\.)?(\w*(?:Error|Exception): .*)")
_FOLLOW_UPS = ("Engine core initialization failed", "WorkerProc initialization failed")  # the cause was logged before


@dataclass(slots=True)
class LogForwarder:
    """Forwards output lines to `log`. `last_error`: the last error found in them."""

    log: logging.Logger
    last_error: str = ""

    def forward(self, line: str) -> None:
        """Log a line at the level that it contains, INFO by default."""
        line = line.rstrip()
        if not line:
            return
        if (error := _ERROR.search(line)) and not any(words in line for words in _FOLLOW_UPS):
            self.last_error = error[1][:500]
        parts = _LINE.fullmatch(line)
        level, text = (parts[1], parts[2]) if parts else ("INFO", line)
        self.log.log(logging.getLevelNamesMapping()[level], "%s", text)


_MAX_LINE_BYTES = 8192
_WATCHDOG = ("sh", "-c", "read _; kill -9 0")  # 0: its own process group, including itself


class Instance:
    """Starts an instance. Must be created by a process group leader. Raises `OSError`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: LogForwarder) -> None:
        assert os.getpgrp() == os.getpid(), "the whole process group is killed, so it must be ours"
        self._output = output
        self._watchdog = subprocess.Popen(_WATCHDOG, stdin=subprocess.PIPE)
        self._server = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._server.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._server.stdout,), name="vllm-output", daemon=True)
        self._reader.start()
        self._pidfds = [os.pidfd_open(process.pid) for process in (self._server, self._watchdog)]

    def wait(self, seconds: float) -> bool:
        """Wait for the instance to end, at most `seconds`; return whether it has."""
        return bool(select.select(self._pidfds, [], [], seconds)[0])

    def exit_reason(self) -> str:
        """Return how the instance ended, with the last error of its output."""
        code = self._server.poll()
        if code is None:
            return "its watchdog was killed"
        self._reader.join(timeout=1.0)  # surviving child processes may hold the pipe open
        error = f": {self._output.last_error}" if self._output.last_error else ""
        return f"vLLM ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{error}"

    def terminate(self, timeout_s: float) -> None:
        """Terminate the server gracefully; processes left after the timeout are killed when the worker exits."""
        self._server.terminate()
        select.select(self._pidfds[:1], [], [], timeout_s)

    def _read(self, output: IO[bytes]) -> None:
        while line := output.readline(_MAX_LINE_BYTES):
            self._output.forward(line.decode(errors="replace"))


# ---- /health and /metrics over the socket

_MAX_BODY_BYTES = 4 << 20


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(socket_path: str, target: str, timeout_s: float) -> tuple[int, bytes]:
    """GET `target` at a Unix socket; return status and body. Raises `OSError` or `HTTPException`."""
    connection = _Connection(socket_path, timeout_s)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BODY_BYTES)
    finally:
        connection.close()
