"""Parsing of untrusted files in a child process with limits on CPU time and memory.

The child is `python -m runtime.retrieval.ingestion.isolated_reader`. A Word file of 40 KB, or a page of HTML, can keep
its parser busy for hours or exhaust memory. Then only the child dies: the file is skipped, and a new child reads the
next one.

A request is two messages, the file's name and its content; a response is one, of msgpack. They pass through a socket,
which is the child's standard input.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Self

import msgspec

from runtime.errors import Overloaded
from runtime.retrieval.ingestion.readers import read_file
from runtime.retrieval.ingestion.sections import ParsedFile, UnreadableFile

READ_S = 60
READ_BYTES = 2 << 30
MAX_TEXT_BYTES = 256 << 20  # what the parent takes into its own memory
_NO_MEMORY = 3  # exit code of the child


class _ReadResponse(msgspec.Struct):
    """The parsed file, or the error."""

    file: ParsedFile | None = None
    error: str = ""


class IsolatedReader:
    """Parses files in a child process. `seconds`: CPU time per file; `memory`: the child's address space, in bytes."""

    def __init__(self, seconds: int = READ_S, memory: int = READ_BYTES) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._closed = False
        self._lock = threading.Lock()  # of these: another thread may close it

    def read(self, name: str, content: bytes) -> ParsedFile:
        """See `read_file`. Raises `UnreadableFile` also if the file exceeds a limit or crashes the child, and
        `Overloaded` if the system permits no child."""
        with self._lock:
            if self._closed:
                raise UnreadableFile("its reader was closed")
            if self._child is None:
                self._child = self._start()
            process, connection = self._child
        try:
            connection.send_bytes(name.encode())
            connection.send_bytes(content)
            answer = connection.recv_bytes(MAX_TEXT_BYTES)  # which the child checks too, of the whole message
        except (OSError, EOFError):
            self._kill()  # a child that ended keeps its exit code; one that sends too much is killed
            raise UnreadableFile(self._exit_reason(process.wait())) from None
        response = msgspec.msgpack.decode(answer, type=_ReadResponse)
        if response.file is None:
            raise UnreadableFile(response.error)
        return response.file

    def close(self) -> None:
        """Kill the child, also while it reads, and start no other. Idempotent."""
        with self._lock:
            self._closed = True
        self._kill()

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            process, _ = child  # the connection closes with its last user: another thread may wait for an answer
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        module, limits = "runtime.retrieval.ingestion.isolated_reader", (str(self._seconds), str(self._memory))
        try:
            ours, its = socket.socketpair()
            with ours, its:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *limits],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                return process, Connection(ours.detach())
        except OSError as error:  # not of the file: it is read later
            raise Overloaded(f"no process can be started to read it: {error.strerror}; try again later") from error

    def _exit_reason(self, code: int) -> str:
        if code == _NO_MEMORY:
            return f"reading it exceeds the limit of {self._memory:,} bytes of memory"
        if code == -signal.SIGXCPU:
            return f"reading it exceeds the limit of {self._seconds} s of CPU time"
        return f"its reader ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _set_limit(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(seconds: int, memory: int) -> None:
    """Serve read requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, whose end closes the connection
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_AS, memory)
    connection = Connection(sys.stdin.fileno())
    try:
        while True:
            _serve_one(connection, seconds)
    except EOFError:
        return
    except MemoryError:
        os._exit(_NO_MEMORY)


def _serve_one(connection: Connection, seconds: int) -> None:
    name, content = connection.recv_bytes().decode(), connection.recv_bytes()
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    try:
        response = msgspec.msgpack.encode(_ReadResponse(read_file(name, content)))
        if len(response) > MAX_TEXT_BYTES:
            raise UnreadableFile(f"its text has over {MAX_TEXT_BYTES >> 20} MiB")
    except UnreadableFile as error:
        response = msgspec.msgpack.encode(_ReadResponse(error=str(error)))
    connection.send_bytes(response)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
