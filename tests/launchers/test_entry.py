"""Ctrl-C at any time during startup of a command: no traceback, and the exit code shells expect."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from tests.retrieval.long_builds import long_source, wait_until_it_reads

# `python -m launchers.entry` that gets Ctrl-C as it begins to import the module named in the environment. A signal from
# outside would come some time later, on a busy machine after the command's end.
INTERRUPTED = """
import os, runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            try:
                os.kill(os.getpid(), 2)
            except KeyboardInterrupt:
                if name in ("signal", "launchers.progress"):  # imported by the project's own modules
                    raise
                raise ImportError("third-party modules, which come after it, may do this")

sys.modules.pop(os.environ["INTERRUPTED_IMPORT"], None)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("launchers.entry", run_name="__main__", alter_sys=True)
"""


@contextmanager
def sigint(handler: Any) -> Iterator[None]:
    """Signal state of child processes: exec keeps an ignored signal ignored and resets a caught one to the default."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def trinity(*arguments: str | Path, interrupted: str = "") -> Iterator["subprocess.Popen[str]"]:
    """The command as a process. It gets Ctrl-C as it begins to import the module `interrupted`."""
    program = ["-c", INTERRUPTED] if interrupted else ["-m", "launchers.entry"]
    with sigint(signal.default_int_handler):  # this run may have been started in the background, where it is ignored
        process = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)], env=os.environ | {"INTERRUPTED_IMPORT": interrupted},
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("moment", ["signal", "typer", "numpy", "gpu.index.storage", "msgspec", "launchers.progress"])
def test_ctrl_c_during_imports_exits_with_130_silently(moment: str) -> None:
    with trinity("index", "--help", interrupted=moment) as process:
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130


def test_these_tests_hold_where_sigint_is_ignored_as_in_a_script_s_background() -> None:
    with sigint(signal.SIG_IGN):
        test_ctrl_c_during_imports_exits_with_130_silently("signal")


def test_ctrl_c_during_a_command_runs_its_cleanup(tmp_path: Path) -> None:
    source, out = long_source(tmp_path), tmp_path / "parent" / "docs"
    with trinity("index", "build", source, "--out", out, "--embedder", "hashing-64") as process:
        wait_until_it_reads(out)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=60)[1]
        assert process.returncode == 130
    assert os.listdir(out.parent) == []


def test_a_signal_after_the_node_has_stopped_does_not_end_the_command_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.toml").write_text('model = {engine = "openai", name = "m", url = "http://127.0.0.1:9/v1"}')
    monkeypatch.setattr("launchers.main.Supervisor.run", lambda self, announce: 0)
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        ended = CliRunner().invoke(command_line(), ["serve", "--config", str(tmp_path / "node.toml"), "--port", "0"])
        for kind in before:  # the second Ctrl-C, while the interpreter ends
            os.kill(os.getpid(), kind)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    assert ended.exit_code == 0, ended.output
