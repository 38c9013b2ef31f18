"""Ctrl-C at any moment of a command's begin: no traceback, and the exit code that shells expect."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

IMPORTED = "import time:"  # how `-X importtime` begins each line, which it prints when a module is there


@contextmanager
def trinity(*arguments: str | Path, tells: bool) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """The command as a process, and its standard error. `tells`: of each module that it has imported."""
    importtime = ["-X", "importtime"] if tells else []
    command = [sys.executable, *importtime, "-m", "launchers.entry", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, process.stderr
        finally:
            process.kill()
            process.communicate(timeout=60)


def imported(errors: IO[str], module: str) -> None:
    """Returns when the process has imported it."""
    for line in errors:
        if line.split()[-1] == module:
            return
    raise AssertionError(f"{module} was not imported")


@pytest.mark.parametrize("moment", ["signal", "typer", "numpy", "numba", "msgspec", "launchers.progress"])
def test_ctrl_c_during_imports_ends_it_with_130_and_without_a_word(moment: str) -> None:
    with trinity("index", "--help", tells=True) as (process, errors):
        imported(errors, moment)
        process.send_signal(signal.SIGINT)
        rest = errors.read()
        assert process.wait(timeout=60) == 130
    assert [line for line in rest.splitlines() if not line.startswith(IMPORTED)] == []


def test_ctrl_c_once_a_command_runs_lets_it_tidy_up(tmp_path: Path) -> None:
    source, out = tmp_path / "d.jsonl", tmp_path / "parent" / "docs"
    os.mkfifo(source)
    with trinity("index", "build", source, "--out", out, "--embedder", "hashing-64", tells=False) as (process, errors):
        with source.open("w"):  # returns when the build has begun to read
            process.send_signal(signal.SIGINT)
            rest = errors.read()
        assert process.wait(timeout=60) == 130
    assert "Traceback" not in rest
    assert os.listdir(out.parent) == []
