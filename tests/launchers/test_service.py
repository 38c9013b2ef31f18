"""The systemd unit is valid and agrees with the exit codes of its commands."""

import configparser
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.errors import (
    EXIT_BUSY,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_USAGE,
    OutputRefused,
    ResourceBusy,
    TrinityError,
    error_from_code,
)
from runtime.node.config import NodeSection
from tests.fork_server import ForkServer

UNIT = Path(__file__).parents[2] / "launchers" / "trinity.service"
INSTALLED = "/opt/trinity/bin/trinity"


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(
        "launchers.main", "launchers.commands.config", "launchers.commands.index", "launchers.commands.simulate"
    ) as fork_server:
        yield fork_server


@pytest.fixture
def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_the_units_commands_exist(service: configparser.SectionProxy) -> None:
    known = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    for key in ("ExecStartPre", "ExecStart"):
        program, command, *options = shlex.split(service[key].lstrip("-"))
        assert program == INSTALLED
        named = {name for option in known[command].params for name in option.opts}
        assert {option for option in options if option.startswith("--")} <= named


def test_the_units_stop_timeout_covers_the_drain(service: configparser.SectionProxy) -> None:
    assert float(service["TimeoutStopSec"]) > NodeSection().drain_s


def test_the_unit_restarts_on_every_error_but_a_configuration_error(
    service: configparser.SectionProxy, fork_server: ForkServer, tmp_path: Path
) -> None:
    assert service["Restart"] == "on-failure"
    assert service["ExecStartPre"].startswith("-"), "its exit code must count as a failure that is restarted"
    assert service["RestartPreventExitStatus"].split() == [str(EXIT_CONFIG)]
    (tmp_path / "node.toml").write_text("[http]\nprot = 1\n")
    words = ("serve", "--config", str(tmp_path / "node.toml"))
    assert fork_server.run("-c", "from launchers.main import main; main()", *words).returncode == EXIT_CONFIG


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--config", "none.toml"),
        ("serve", "--config", "no-model.toml"),
        ("doctor", "--config", "none.toml"),
        ("simulate", "--config", "none.toml", "--trace", "none.jsonl"),
        ("simulate", "--config", "node.toml", "--trace", "none.jsonl"),
        ("simulate", "--config", "node.toml", "--trace", "none.jsonl", "--times", "none.json"),
        ("index", "info", "none"),
        ("index", "build", "none.jsonl", "--out", "new"),
        ("search", "none", "--queries", "none.npy"),
    ],
)
def test_a_missing_file_exits_with_78_for_every_command(
    tmp_path: Path, fork_server: ForkServer, words: tuple[str, ...]
) -> None:
    (tmp_path / "node.toml").write_text('[model]\nname = "smollm2-135m-instruct"\n')
    (tmp_path / "no-model.toml").write_text('[model]\nname = "./none"\n')
    run = fork_server.run("-c", "from launchers.main import main; main()", *words, cwd=tmp_path)
    assert (run.returncode, run.stderr.count("\n")) == (EXIT_CONFIG, 1), run.stderr
    assert run.stderr.startswith("trinity: error: ")
    assert "none" in run.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--config", "none"),
        ("doctor", "--config", "none"),
        ("simulate", "--config", "none", "--trace", "none"),
        ("index", "info", "none"),
        ("index", "build", "none", "--out", "new"),
        ("index", "add", "none", "--out", "new"),
        ("index", "upsert", "none", "none"),
        ("search", "none", "--queries", "none"),
    ],
)
def test_a_file_that_may_not_be_read_is_no_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *asked, **options: False)
    run = CliRunner().invoke(command_line(), words)
    assert isinstance(run.exception, TrinityError), run.output
    assert run.exception.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_stopped_node_is_named_in_one_line(tmp_path: Path, fork_server: ForkServer, command: str) -> None:
    run = fork_server.run("-c", "from launchers.main import main; main()", command, str(tmp_path / "nothing"))
    assert (run.returncode, run.stderr.count("\n")) == (EXIT_FAILED, 1), run.stderr
    assert run.stderr.startswith(f"trinity: error: no node runs in {tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    "words",
    [
        ("index", "delete", "none"),
        ("workers", "drain", "--gpu", "three"),
        ("mcp", "notes", "--url", "n"),
        ("search", "none", "--queries", "none.npy", "--k", "5000"),
        ("search", "none", "--queries", "none.npy", "--k", "9", "--top-m", "8"),
    ],
)
def test_a_usage_error_exits_with_2_and_one_line(fork_server: ForkServer, words: tuple[str, ...]) -> None:
    if words[0] == "mcp" and find_spec("mcp") is None:
        pytest.skip("mcp is not installed: [mcp]")
    run = fork_server.run("-c", "from launchers.main import main; main()", *words)
    assert (run.returncode, run.stderr.count("\n")) == (EXIT_USAGE, 1), run.stderr
    assert run.stderr.startswith("trinity: error: ")


def test_temporary_errors_exit_with_a_code_that_is_restarted(
    service: configparser.SectionProxy,
) -> None:
    assert ResourceBusy.exit_code == EXIT_BUSY
    assert str(EXIT_BUSY) not in service["RestartPreventExitStatus"].split()
    assert error_from_code("resource_busy", "taken").exit_code == EXIT_BUSY
    assert OutputRefused.exit_code == EXIT_USAGE, "what is there will be there again"


def test_caches_work_for_a_user_without_a_home_directory(service: configparser.SectionProxy) -> None:
    assert service["CacheDirectory"] == "trinity"
    assert "Environment=NUMBA_CACHE_DIR=%C/trinity XDG_CACHE_HOME=%C/trinity" in UNIT.read_text().splitlines()


def test_systemd_analyze_verifies_the_unit_without_warnings(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "trinity.service"
    unit.write_text(UNIT.read_text().replace(INSTALLED, "/bin/true"))
    command = [analyze, "verify", "--man=no", "--recursive-errors=no", str(unit)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")
