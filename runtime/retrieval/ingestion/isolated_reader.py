"""Parsing of untrusted files in a child process with limits on CPU time and memory.

The child is `python -m runtime.retrieval.ingestion.isolated_reader`. A Word file of 40 KB, or a page of HTML, can keep
its parser busy for hours or exhaust memory. Then only the child dies: the file is skipped, and a new child reads the
next one.

A request is two messages, the file's name and its content; a response is one, of msgpack. Each message follows its
length, 4 bytes, little endian.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from typing import IO, Self

import msgspec

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
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, name: str, content: bytes) -> ParsedFile:
        """See `read_file`. Raises `UnreadableFile` also if the file exceeds a limit or crashes the child."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            _send(process.stdin, name.encode())
            _send(process.stdin, content)
            response = msgspec.msgpack.decode(_receive(process.stdout), type=_ReadResponse)
        except (OSError, EOFError):
            code = process.wait()
            self.close()
            raise UnreadableFile(self._exit_reason(code)) from None
        if response.file is None:
            raise UnreadableFile(response.error)
        return response.file

    def close(self) -> None:
        """Kill the child. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "runtime.retrieval.ingestion.isolated_reader",
            str(self._seconds),
            str(self._memory),
        ]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _exit_reason(self, code: int) -> str:
        if code == _NO_MEMORY:
            return f"reading it exceeds the limit of {self._memory:,} bytes of memory"
        if code == -signal.SIGXCPU:
            return f"reading it exceeds the limit of {self._seconds} s of CPU time"
        return f"its reader ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(4, "little"))
    stream.write(message)  # separately: a copy of a large file would hold the interpreter's lock
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Raises `EOFError`."""
    if len(head := stream.read(4)) < 4:
        raise EOFError
    message = stream.read(size := int.from_bytes(head, "little"))
    if len(message) < size:
        raise EOFError
    return message


def _set_limit(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(seconds: int, memory: int) -> None:
    """Serve read requests until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, whose end closes the pipe
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_AS, memory)
    try:
        while True:
            _serve_one(seconds)
    except EOFError:
        return
    except MemoryError:
        os._exit(_NO_MEMORY)


def _serve_one(seconds: int) -> None:
    name, content = _receive(sys.stdin.buffer).decode(), _receive(sys.stdin.buffer)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    try:
        response = msgspec.msgpack.encode(_ReadResponse(read_file(name, content)))
        if len(response) > MAX_TEXT_BYTES:
            raise UnreadableFile(f"its text has over {MAX_TEXT_BYTES >> 20} MiB")
    except UnreadableFile as error:
        response = msgspec.msgpack.encode(_ReadResponse(error=str(error)))
    _send(sys.stdout.buffer, response)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
