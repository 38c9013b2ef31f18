"""The processes of one instance. They end with the worker that started them, whatever dies first.

vLLM's server starts others (its engine core, a worker for each GPU), which live on when it is killed. All of them are
in the process group that the worker leads:

- the server dies: the worker sees it, and ends;
- the worker dies, by itself or with its supervisor: the keeper's input ends, and it kills the group. The supervisor,
  if it lives, does so too.
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

# ---- what vLLM says, a line at a time, as our log lines; and what of it says why it ended


_LINE = re.compile(
    r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: [\d-]+ [\d:]+)?:? *(?:\[[^\]]*\] ?)?(.*)", re.DOTALL
)
_FAULT = re.compile(r"(?:^|\s)(?:[\w.]+\.)?(\w*(?:Error|Exception): .*)")
_ELSEWHERE = ("Engine core initialization failed", "WorkerProc initialization failed")  # the reason was said before


@dataclass(slots=True)
class Lines:
    """`fault` is the last error that was named."""

    log: logging.Logger
    fault: str = ""

    def take(self, line: str) -> None:
        """One line, at the level that it names."""
        line = line.rstrip()
        if not line:
            return
        if (found := _FAULT.search(line)) and not any(words in line for words in _ELSEWHERE):
            self.fault = found[1][:500]
        parts = _LINE.fullmatch(line)
        level, text = (parts[1], parts[2]) if parts else ("INFO", line)
        self.log.log(logging.getLevelNamesMapping()[level], "%s", text)


_LINE_BYTES = 8192
_KEEPER = ("sh", "-c", "read _; kill -9 0")  # 0: its own group, itself included


class Instance:
    """Started when made. Raises `OSError`. `run` by a process that leads its group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lines: Lines) -> None:
        assert os.getpgrp() == os.getpid(), "the group is killed as a whole, so it must be nobody else's"
        self._lines = lines
        self._keeper = subprocess.Popen(_KEEPER, stdin=subprocess.PIPE)
        self._server = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._server.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._server.stdout,), name="lines", daemon=True)
        self._reader.start()
        self._pidfds = [os.pidfd_open(process.pid) for process in (self._server, self._keeper)]

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it ends; whether it has."""
        return bool(select.select(self._pidfds, [], [], seconds)[0])

    def how(self) -> str:
        """How it ended, and what it said of it."""
        code = self._server.poll()
        if code is None:
            return "its keeper was killed"
        self._reader.join(timeout=1.0)  # those that live on may hold its output open
        said = f": {self._lines.fault}" if self._lines.fault else ""
        return f"vLLM ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{said}"

    def terminate(self, within_s: float) -> None:
        """Have it end in order. What is left after that ends with the worker."""
        self._server.terminate()
        select.select(self._pidfds[:1], [], [], within_s)

    def _read(self, output: IO[bytes]) -> None:
        while line := output.readline(_LINE_BYTES):
            self._lines.take(line.decode(errors="replace"))


# ---- what it says of itself over its socket: /health and /metrics

_MOST_BYTES = 4 << 20
_UNFINISHED = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(path: str, what: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of GET `what` at the socket `path`. Raises `OSError` or `HTTPException` without an answer."""
    connection = _Connection(path, timeout_s)
    try:
        connection.request("GET", what)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def unfinished(metrics: str) -> int:
    """Requests that run or wait there, by its metrics."""
    return sum(int(float(count)) for count in _UNFINISHED.findall(metrics))
