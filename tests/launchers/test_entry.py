"""Ctrl-C at any time during startup of a command: no traceback, and the exit code shells expect."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.retrieval.long_builds import long_source, wait_until_it_reads

IMPORTED = "import time:"  # how `-X importtime` begins each line, which it prints when a module is there


@contextmanager
def sigint(handler: Any) -> Iterator[None]:
    """Signal state of child processes: exec keeps an ignored signal ignored and resets a caught one to the default."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def trinity(*arguments: str | Path, tells: bool) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """The command as a process, and its standard error. `tells`: of each module that it has imported."""
    importtime = ["-X", "importtime"] if tells else []
    command = [sys.executable, *importtime, "-m", "launchers.entry", *map(str, arguments)]
    with sigint(signal.default_int_handler):  # this run may have been started in the background, where it is ignored
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stderr is not None
            yield process, process.stderr
        finally:
            process.kill()
            process.communicate(timeout=60)


def imported(errors: IO[str], module: str) -> None:
    """Wait until the process has imported the module."""
    for line in errors:
        if line.split()[-1] == module:
            return
    raise AssertionError(f"{module} was not imported")


@pytest.mark.parametrize("moment", ["signal", "typer", "numpy", "gpu.index.storage", "msgspec", "launchers.progress"])
def test_ctrl_c_during_imports_exits_with_130_silently(moment: str) -> None:
    with trinity("index", "--help", tells=True) as (process, errors):
        imported(errors, moment)
        process.send_signal(signal.SIGINT)
        rest = errors.read()
        assert process.wait(timeout=60) == 130
    assert [line for line in rest.splitlines() if not line.startswith(IMPORTED)] == []


def test_these_tests_hold_where_sigint_is_ignored_as_in_a_script_s_background() -> None:
    with sigint(signal.SIG_IGN):
        test_ctrl_c_during_imports_exits_with_130_silently("signal")


def test_ctrl_c_during_a_command_runs_its_cleanup(tmp_path: Path) -> None:
    source, out = long_source(tmp_path), tmp_path / "parent" / "docs"
    with trinity("index", "build", source, "--out", out, "--embedder", "hashing-64", tells=False) as (process, errors):
        wait_until_it_reads(out)
        process.send_signal(signal.SIGINT)
        rest = errors.read()
        assert process.wait(timeout=60) == 130
    assert "Traceback" not in rest
    assert os.listdir(out.parent) == []
