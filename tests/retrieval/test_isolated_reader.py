"""Hostile files are read in an isolated process: they may crash it, and the next file is still read."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import threading
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from runtime.errors import Overloaded
from runtime.retrieval.ingestion import isolated_reader
from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.ingestion.sections import ParsedFile, Section, UnreadableFile
from tests.retrieval import sample_files

GOOD = ("good.html", b"<title>Good</title><p>text")
READ = ParsedFile("Good", [Section("text")])
PARAGRAPH = "<w:p><w:r><w:t>a</w:t></w:r></w:p>"
WIDE = (
    "<w:tbl><w:tblGrid><w:gridCol/></w:tblGrid><w:tr><w:tc><w:tcPr><w:gridSpan w:val='2000000000'/></w:tcPr>"
    f"{PARAGRAPH}</w:tc></w:tr></w:tbl>"
)
needs_docx = pytest.mark.skipif(importlib.util.find_spec("docx") is None, reason="python-docx is not installed")


def readers() -> list[psutil.Process]:
    """Return this process's reader processes."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended: another file's tests may leave a zombie
            if "runtime.retrieval.ingestion.isolated_reader" in child.cmdline():
                found.append(child)
    return found


class AnnouncedLock:
    """A lock that sets `requested` before a thread waits for it."""

    def __init__(self) -> None:
        self._lock, self.requested = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        self.requested.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@needs_docx
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"seconds": 1}, "the limit of 1 s of CPU time"),
        ({"memory": 256 << 20}, "the limit of 268,435,456 bytes of memory"),
    ],
)
def test_a_file_over_a_limit_is_unreadable_and_the_next_is_read(limit: dict[str, int], message: str) -> None:
    with IsolatedReader(**limit) as reader:
        assert reader.read(*GOOD) == READ
        with pytest.raises(UnreadableFile, match=f"exceeds {message}"):
            reader.read("wide.docx", sample_files.docx_of(WIDE))
        assert reader.read(*GOOD) == READ


def test_a_crashing_reader_makes_its_file_unreadable_and_the_next_is_read() -> None:
    with IsolatedReader() as reader:
        assert reader.read(*GOOD) == READ
        (process,) = readers()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(UnreadableFile, match=r"its reader ended with SIGKILL"):
            reader.read(*GOOD)
        assert reader.read(*GOOD) == READ


def test_a_reader_that_sends_more_than_the_limit_is_killed_and_the_next_file_is_read() -> None:
    with IsolatedReader() as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated_reader, "MAX_TEXT_BYTES", 8)  # of this process: the reader has the real one
        with pytest.raises(UnreadableFile, match=r"its reader ended with SIGKILL"):
            reader.read(*GOOD)
        assert not readers()
        patch.undo()
        assert reader.read(*GOOD) == READ


def test_a_file_for_which_no_process_can_be_started_is_no_unreadable_one_and_is_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with IsolatedReader() as reader:
        files = psutil.Process().num_fds()
        with monkeypatch.context() as limited:
            none_left = Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
            limited.setattr(subprocess, "Popen", none_left)
            with pytest.raises(Overloaded, match="no process can be started to read it: Resource temporarily unav"):
                reader.read(*GOOD)
        assert psutil.Process().num_fds() == files
        assert reader.read(*GOOD) == READ


def test_a_readers_error_is_reported_the_reader_continues_and_no_process_is_left() -> None:
    with IsolatedReader() as reader:
        with pytest.raises(UnreadableFile, match="not UTF-8 text at byte 0"):
            reader.read("bad.html", b"\xff")
        assert reader.read(*GOOD) == READ
        assert readers()
    assert not readers()


def test_a_reader_closed_while_its_process_starts_leaves_none_and_starts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, start = AnnouncedLock(), subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        reader = IsolatedReader()

    def close() -> None:
        reader.close()
        lock.requested.set()  # or it is over, without waiting for the start

    closer = threading.Thread(target=close)

    def start_during_close(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        lock.requested.clear()
        closer.start()
        assert lock.requested.wait(60)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start_during_close)
    with contextlib.suppress(UnreadableFile):  # its process may answer before it is killed
        reader.read(*GOOD)
    closer.join(60)
    assert not readers()
    monkeypatch.undo()
    with pytest.raises(UnreadableFile, match="was closed"):
        reader.read(*GOOD)
