"""The logs of a process: to standard error and to a file of its own, and nobody who speaks waits for either.

A line is made where it is said, and written by a thread: a slow disk or a reader of standard error that has stopped
reading costs a full queue, and then lines, but no step of a loop. Lost lines are counted, and said as soon as
something can be written again. A full disk loses lines, never half of one, and never the node.
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

from runtime.node.config import LogSection
from runtime.node.placement.plan import NodePlan
from runtime.node.run_dir import LOGS

# ---- what a line of a log is: one event, as JSON (in files, and where programs read) or as text (where people do)


Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[str, int] = {level: getattr(logging, level.upper()) for level in get_args(Level)}
_MAX_EVENT = 8_192  # characters; of what is longer the end is cut off
_MAX_DETAIL = 32_768
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. `time` is UTC, ISO 8601, to the microsecond; `request` the id that clients see in `x-request-id`.

    `source` is the part of the process that speaks, if it is not the process's loop itself. `detail` is a traceback or
    a stack, of several lines.
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
        """As one line of text: what could end a line, or move a terminal's cursor, is shown as an escape."""
        source = f" {self.source}" if self.source else ""
        request = f" [{plain(self.request)}]" if self.request else ""
        detail = f" | {plain(self.detail)}" if self.detail else ""
        return f"{self.time} {self.level[:1].upper()} {self.process}{source}{request}: {plain(self.event)}{detail}"


def plain(text: str) -> str:
    """Text that stays on its line, whatever is in it."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Formatter(logging.Formatter):
    """A record as a `Line`. The request's id comes with the record: `log.info(..., extra={"request": id})`."""

    def __init__(self, kind: Literal["text", "json"], process: str) -> None:
        super().__init__()
        self._text = kind == "text"
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        detail = getattr(record, "detail", "")
        if record.exc_info:
            detail = self.formatException(record.exc_info)
        line = Line(
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
    """Without lone surrogates, which no UTF-8 has; a file name may."""
    return text.encode(errors="backslashreplace").decode()


_decode = msgspec.json.Decoder(Line).decode


def parse(line: bytes) -> Line | None:
    """A line of a log file; None for what is none, such as the half of one."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


QUEUE_LINES = 2_000

Write = Callable[[bytes], None]


class LogFile:
    """`path`, kept to `files` files of `max_bytes` each: `path.1` is the one before, and so on."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self._path, self._max_bytes, self._files = path, max_bytes, files
        self._fd = -1
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all. Raises `OSError`; the next one is tried again."""
        if self._fd < 0:
            self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            self._rotate()
        written = os.write(self._fd, line)
        if written < len(line):
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                rotated(self._path, number - 1).rename(rotated(self._path, number))
        if self._files == 1:
            self._path.unlink()
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def rotated(path: Path, number: int) -> Path:
    """The file that has been rotated so many times."""
    return path.with_name(f"{path.name}.{number}") if number else path


def to_stderr(line: bytes) -> None:
    """Write a line to standard error, all of it. Raises `OSError`."""
    while line:
        line = line[os.write(2, line) :]


class QueuedHandler(logging.Handler):
    """Hands lines to a thread that gives them to `write`. `on_lost` is told by that thread how many more were lost.

    The end of a process waits `close_s` for room for its last lines, and as long until they are written.
    """

    def __init__(
        self, write: Write, formatter: Formatter, on_lost: Callable[[int], None] = lambda lines: None,
        queue_lines: int = QUEUE_LINES, close_s: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._close_s = close_s
        self.setFormatter(formatter)
        self._write, self._on_lost = write, on_lost
        self._queue: queue.Queue[bytes | None] = queue.Queue(queue_lines)
        self._queue_lines = queue_lines
        self._full = 0  # lines that found the queue full; written by who speaks
        self._seen_full = 0  # of these, those that the thread has taken up
        self._unsaid = 0  # lost lines that no written line tells of yet
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a wrong call of the logger: said, and never a fault of who called
            line = self._own(f"a line could not be made: {error!r}: {record.msg!r}")
        try:
            self._queue.put_nowait(line.encode() + b"\n")
        except queue.Full:
            self._full += 1  # under the handler's lock

    def close(self) -> None:
        """Write what waits, for a while at most: a standard error that nobody reads must not keep a process alive."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._close_s)
            self._thread.join(timeout=self._close_s)
        super().close()

    def _run(self) -> None:
        while True:
            line = self._queue.get()
            if (more := self._full - self._seen_full) > 0:
                self._seen_full += more
                self._lost(more, f"{self._queue_lines} were waiting to be written")
            if self._unsaid:
                self._say_lost()
            if line is None:
                return
            try:
                self._write(line)
            except OSError as error:
                self._lost(1, error.strerror or str(error))

    def _lost(self, lines: int, reason: str) -> None:
        self._unsaid += lines
        self._reason = reason
        self._on_lost(lines)

    def _say_lost(self) -> None:
        text = f"{self._unsaid} log lines were lost here: {self._reason}"
        with contextlib.suppress(OSError):
            self._write(self._own(text).encode() + b"\n")
            self._unsaid = 0

    def _own(self, text: str) -> str:
        return self.format(logging.LogRecord("log", logging.WARNING, "", 0, text, None, None))


def log_directory(plan: NodePlan) -> Path:
    """Where the processes of a node write their files: the configured directory, or one in the run directory."""
    return Path(plan.config.log.directory) if plan.config.log.directory else Path(plan.run_dir) / LOGS


@contextlib.contextmanager
def log_to_stderr(section: LogSection, process: str) -> Iterator[None]:
    """Lines in the configured format to standard error; warnings and the faults of threads become lines too."""
    hook = threading.excepthook
    logging.captureWarnings(True)
    threading.excepthook = _thread_fault
    try:
        with _through(QueuedHandler(to_stderr, Formatter(section.format, process)), section):
            yield
    finally:
        threading.excepthook = hook
        logging.captureWarnings(False)


@contextlib.contextmanager
def log_to_file(plan: NodePlan, process: str, on_lost: Callable[[int], None] = lambda lines: None) -> Iterator[None]:
    """Lines as JSON to the process's own file in the node's log directory."""
    section = plan.config.log
    file = LogFile(log_directory(plan) / f"{process}.log", section.max_bytes, section.files)
    with contextlib.closing(file), _through(QueuedHandler(file.write, Formatter("json", process), on_lost), section):
        yield


@contextlib.contextmanager
def _through(handler: logging.Handler, section: LogSection) -> Iterator[None]:
    """Have this process's lines of the configured level go through `handler` as well."""
    root = logging.getLogger()
    root.setLevel(LEVELS[section.level])
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _thread_fault(fault: threading.ExceptHookArgs) -> None:
    name = fault.thread.name if fault.thread else "a thread"
    exception = (fault.exc_type, fault.exc_value, fault.exc_traceback) if fault.exc_value else None
    logging.getLogger("thread").error("%s ended with a fault", name, exc_info=exception)
