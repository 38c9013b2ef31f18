"""Logging of a process, to standard error and to a file of its own. Logging never blocks the caller.

Records are formatted by the caller and written by a thread: a slow disk or a blocked reader of standard error fills the
queue, then lines are dropped. Dropped lines are counted and reported once writing works again. A full disk loses whole
lines, and never stops the node.

The standard library's QueueHandler reports a full queue by a traceback on standard error, which may be what blocks, and
counts nothing; its RotatingFileHandler leaves a part of a line when the disk is full, and follows links.
"""

import contextlib
import errno
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec

from runtime.files import open_regular
from runtime.node.config import LogSection
from runtime.node.placement.plan import NodePlan
from runtime.node.run_dir import LOGS

# ---- log lines: one event each, as JSON (in files) or as text


Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[str, int] = {level: getattr(logging, level.upper()) for level in get_args(Level)}
_MAX_EVENT = 8_192  # characters; longer ones are truncated
_MAX_DETAIL = 32_768
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One log event. `time` is UTC, ISO 8601, with microseconds; `request` the id that clients see in `x-request-id`.

    `source` is the component that logged it, if it is not the process's main loop. `detail` is a traceback or a stack,
    of several lines.
    """

    time: str
    level: str
    process: str
    pid: int
    event: str
    request: str = ""
    source: str = ""
    detail: str = ""

    def text(self) -> str:
        """Format as one line of text; control characters are escaped."""
        source = f" {self.source}" if self.source else ""
        request = f" [{escape_control(self.request)}]" if self.request else ""
        detail = f" | {escape_control(self.detail)}" if self.detail else ""
        head = f"{self.time} {self.level[:1].upper()} {self.process}{source}{request}"
        return f"{head}: {escape_control(self.event)}{detail}"


def escape_control(text: str) -> str:
    """Escape control characters and line separators."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Formatter(logging.Formatter):
    """Formatter of records as `LogLine`; pass the request id as `extra={"request": id}`."""

    def __init__(self, kind: Literal["text", "json"], process: str) -> None:
        super().__init__()
        self._text = kind == "text"
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        detail = getattr(record, "detail", "")
        if record.exc_info:
            detail = self.formatException(record.exc_info)
        line = LogLine(
            time=datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            level=record.levelname.lower(),
            process=self._process,
            pid=record.process or 0,
            event=_valid(record.getMessage()[:_MAX_EVENT]),
            request=_valid(str(getattr(record, "request", ""))),
            source="" if record.name in (self._process, "root") else record.name.rpartition(".")[2],
            detail=_valid(detail[-_MAX_DETAIL:]),
        )
        return line.text() if self._text else msgspec.json.encode(line).decode()


def _valid(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode; file names may contain them."""
    return text.encode(errors="backslashreplace").decode()


_decode = msgspec.json.Decoder(LogLine).decode


def parse(line: bytes) -> LogLine | None:
    """Parse a line of a log file; None if it is not one, such as a partial line."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


QUEUE_LINES = 2_000
_FILE_BYTES = 2 << 20  # of each of a process's two files; a run directory is often memory

Write = Callable[[bytes], None]


class LogFile:
    """A rotating log file of at most `max_bytes`, and the previous one."""

    def __init__(self, path: Path, max_bytes: int = _FILE_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._fd = -1
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append a line, completely or not at all. Raises `OSError`; the next call tries again."""
        if self._fd < 0:
            self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            self.close()
            self._path.replace(previous(self._path))
            self._open()
        written = os.write(self._fd, line)
        if written < len(line):
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def previous(path: Path) -> Path:
    """Return the path of a log file after its rotation."""
    return path.with_name(f"{path.name}.1")


def to_stderr(line: bytes) -> None:
    """Write a complete line to standard error. Raises `OSError`."""
    while line:
        line = line[os.write(2, line) :]


class QueuedHandler(logging.Handler):
    """Logging handler with a writer thread, which calls `write` for each line, and `on_lost` with the number of dropped
    lines.

    At the end of the process it waits up to `close_s` for the thread to write the rest.
    """

    def __init__(
        self, write: Write, formatter: Formatter, on_lost: Callable[[int], None] = lambda lines: None,
        queue_lines: int = QUEUE_LINES, close_s: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._close_s = close_s
        self.setFormatter(formatter)
        self._write, self._on_lost = write, on_lost
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # without a lock that callers wait for
        self._queue_lines = queue_lines
        self._full = 0  # lines dropped because the queue was full; written by the callers
        self._full_reported = 0  # of these, those that the thread has reported
        self._unreported = 0  # dropped lines that are not reported yet
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a wrong logging call is reported, and does not fail the caller
            line = self._own_line(f"formatting failed: {error!r}: {record.msg!r}")
        if self._queue.qsize() < self._queue_lines:
            self._queue.put(line.encode() + b"\n")
        else:
            self._full += 1  # under the handler's lock

    def close(self) -> None:
        """Write the queued lines within `close_s`: a blocked standard error must not keep the process alive."""
        self._queue.put(None)
        self._thread.join(timeout=self._close_s)
        super().close()

    def _run(self) -> None:
        while True:
            line = self._queue.get()
            if (more := self._full - self._full_reported) > 0:
                self._full_reported += more
                self._lost(more, f"{self._queue_lines} were waiting to be written")
            if self._unreported:
                self._report_lost()
            if line is None:
                return
            try:
                self._write(line)
            except OSError as error:
                self._lost(1, error.strerror or str(error))

    def _lost(self, lines: int, reason: str) -> None:
        self._unreported += lines
        self._reason = reason
        self._on_lost(lines)

    def _report_lost(self) -> None:
        text = f"{self._unreported} log lines were lost here: {self._reason}"
        with contextlib.suppress(OSError):
            self._write(self._own_line(text).encode() + b"\n")
            self._unreported = 0

    def _own_line(self, text: str) -> str:
        return self.format(logging.LogRecord("log", logging.WARNING, "", 0, text, None, None))


def log_directory(plan: NodePlan) -> Path:
    """Return the directory of a node's log files: the configured one, or one in the run directory."""
    return Path(plan.config.log.directory) if plan.config.log.directory else Path(plan.run_dir) / LOGS


@contextlib.contextmanager
def log_to_stderr(section: LogSection, process: str) -> Iterator[None]:
    """Log to standard error in the configured format; warnings and exceptions of threads are logged, too."""
    hook = threading.excepthook
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    try:
        with _logging_through(QueuedHandler(to_stderr, Formatter(section.format, process)), section):
            yield
    finally:
        threading.excepthook = hook
        logging.captureWarnings(False)


@contextlib.contextmanager
def log_to_file(plan: NodePlan, process: str, on_lost: Callable[[int], None] = lambda lines: None) -> Iterator[None]:
    """Log as JSON to the process's own file in the node's log directory."""
    section = plan.config.log
    file = LogFile(log_directory(plan) / f"{process}.log")
    with (
        contextlib.closing(file),
        _logging_through(QueuedHandler(file.write, Formatter("json", process), on_lost), section),
    ):
        yield


@contextlib.contextmanager
def _logging_through(handler: logging.Handler, section: LogSection) -> Iterator[None]:
    """Add a handler to the root logger, at the configured level, for the duration of the block."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(LEVELS[section.level])
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def _log_thread_exception(fault: threading.ExceptHookArgs) -> None:
    name = fault.thread.name if fault.thread else "a thread"
    exception = (fault.exc_type, fault.exc_value, fault.exc_traceback) if fault.exc_value else None
    logging.getLogger("thread").error("unhandled exception in %s", name, exc_info=exception)
