"""A process's log: one line per event, written completely or not at all, never blocking the caller."""

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from runtime.node.config import NodeConfig
from runtime.node.logs.log import (
    Formatter,
    LogFile,
    LogLine,
    QueuedHandler,
    Write,
    log_to_file,
    log_to_stderr,
    parse,
    previous,
)
from runtime.node.placement.plan import NodePlan


class Disk:
    """A log target that can be full or stuck."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self.full = False
        self.stuck = threading.Event()
        self.stuck.set()

    def write(self, line: bytes) -> None:
        assert self.stuck.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert line.endswith(b"\n")
        parsed = parse(line)
        assert parsed is not None
        self.lines.append(parsed)

    @property
    def events(self) -> list[str]:
        return [line.event for line in self.lines]


StartLog = Callable[..., tuple[logging.Logger, QueuedHandler]]


@pytest.fixture
def start() -> Iterator[StartLog]:
    """A logger of its own whose lines go to `write` as JSON; `close` of the handler waits for them."""
    loggers: list[logging.Logger] = []
    numbers = count()

    def start(write: Write, **options: object) -> tuple[logging.Logger, QueuedHandler]:
        log = logging.getLogger(f"test-{next(numbers)}")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        handler = QueuedHandler(write, Formatter("json", log.name), **({"close_s": 60.0} | options))  # type: ignore[arg-type]
        log.addHandler(handler)
        loggers.append(log)
        return log, handler

    yield start
    for log in loggers:
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()


def test_a_line_has_time_level_process_request_and_event(start: StartLog) -> None:
    disk = Disk()
    log, handler = start(disk.write)
    log.warning("held for %d ms", 7, extra={"request": "cmpl-1"})
    handler.close()
    (line,) = disk.lines
    assert (line.level, line.process, line.pid, line.request) == ("warning", log.name, os.getpid(), "cmpl-1")
    assert line.event == "held for 7 ms"
    assert line.time.endswith("Z")
    assert line.text().endswith(f" W {log.name} [cmpl-1]: held for 7 ms")


def test_an_event_is_one_line_whatever_its_content(capfd: pytest.CaptureFixture[str]) -> None:
    for kind in ("text", "json"):
        log = NodeConfig().log
        with log_to_stderr(msgspec.structs.replace(log, format=kind), "pool-0"):
            try:
                raise ValueError("first\nsecond\x1b[2J")
            except ValueError:
                logging.getLogger("pool-0").exception("a\r\nforged line\u2028 \udc80", extra={"request": "x\ny"})
            logging.getLogger("pool-0").info("next")
        written = capfd.readouterr().err
        assert written.count("\n") == 2, written
        assert "\r" not in written
        assert "\x1b" not in written
        assert "ValueError: first" in written


def test_a_process_whose_log_is_closed_logs_at_its_own_level_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with log_to_stderr(msgspec.structs.replace(NodeConfig().log, level="debug"), "pool-0"):
        assert logging.getLogger().level == logging.DEBUG
    assert logging.getLogger().level == logging.ERROR


def test_logging_does_not_block_on_a_stuck_disk_and_lost_lines_are_counted(start: StartLog) -> None:
    disk = Disk()
    lost: list[int] = []
    disk.stuck.clear()
    log, handler = start(disk.write, queue_lines=3, on_lost=lost.append)
    for number in range(100):  # would never end if it waited
        log.info("%d", number)
    disk.stuck.set()
    handler.close()
    said = [event.partition(" log lines were lost here: 3 were waiting")[0] for event in disk.events if "lost" in event]
    kept = [int(event) for event in disk.events if "lost" not in event]
    assert kept == sorted(kept)
    assert sum(map(int, said)) == sum(lost) == 100 - len(kept) > 90


def test_a_full_disk_drops_lines_and_reports_their_number(start: StartLog) -> None:
    disk, lost = Disk(), threading.Semaphore(0)
    log, handler = start(disk.write, on_lost=lost.release)
    disk.full = True
    for _ in range(5):
        log.info("to nowhere")
    for _ in range(5):
        assert lost.acquire(timeout=60)
    disk.full = False
    log.info("room again")
    handler.close()
    assert disk.events == ["5 log lines were lost here: No space left on device", "room again"]


def test_process_exit_waits_for_a_stuck_disk_up_to_a_limit(start: StartLog) -> None:
    disk = Disk()
    disk.stuck.clear()
    log, handler = start(disk.write, queue_lines=1, close_s=0.05)
    for number in range(10):
        log.info("%d", number)
    handler.close()
    assert disk.events == []
    disk.stuck.set()


def test_a_malformed_logging_call_is_logged_without_raising(start: StartLog) -> None:
    disk = Disk()
    log, handler = start(disk.write)
    handler.handle(logging.LogRecord(log.name, logging.INFO, "", 0, "%d tokens", ("many",), None))
    handler.close()
    assert "formatting failed" in disk.events[0]


def test_log_files_are_rotated_within_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "pool-0.log"
    file = LogFile(path, max_bytes=100)
    for number in range(40):
        file.write(b"%029d\n" % number)
    file.close()
    files = [path, previous(path)]
    assert sorted(path.parent.iterdir()) == sorted(files)
    assert all(found.stat().st_size <= 100 for found in files)
    kept = [int(line) for found in reversed(files) for line in found.read_bytes().splitlines()]
    assert kept == list(range(40 - len(kept), 40))


def test_a_full_disk_is_an_error_and_logging_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = LogFile(tmp_path / "x.log")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                file.write(b"line\n")
    file.write(b"line\n")
    file.close()


def test_lines_are_written_to_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")  # opening it would block
    (tmp_path / "device.log").symlink_to("/dev/full")
    for name, kind in (("pipe.log", "No such device"), ("device.log", "it is a device, not a regular file")):
        with pytest.raises(OSError, match=kind):
            LogFile(tmp_path / name).write(b"line\n")


def test_warnings_and_exceptions_of_threads_are_logged(tmp_path: Path) -> None:
    import warnings

    plan = NodePlan(config=NodeConfig(), run_dir=str(tmp_path), token="t", workers=())

    def fail() -> None:
        raise ValueError("of a thread")

    with log_to_stderr(plan.config.log, "pool-0"), log_to_file(plan, "pool-0"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("of a library", stacklevel=1)
        thread = threading.Thread(target=fail, name="helper")
        thread.start()
        thread.join(timeout=60)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "pool-0.log").read_text().splitlines()]
    assert "of a library" in lines[0]["event"]
    assert lines[1]["event"] == "unhandled exception in helper"
    assert "ValueError: of a thread" in lines[1]["detail"]
