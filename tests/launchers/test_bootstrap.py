"""The bootstrap handles help and usage errors with the standard library, before anything is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from launchers import bootstrap
from launchers.commands import LAZY_COMMANDS, MAIN_COMMANDS
from launchers.main import command_line


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The path of the environment to create."""
    return tmp_path / "venv"


def bootstrapped(environment: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The bootstrap with the standard library alone (-S), and where pip could install nothing."""
    variables = os.environ | {"TRINITY_VENV": str(environment), "PIP_NO_INDEX": "1"}
    variables.pop("PYTHONPATH", None)
    command = [sys.executable, "-S", "-m", "launchers.bootstrap", *arguments]
    return subprocess.run(command, cwd=bootstrap.ROOT, env=variables, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "missing command"),
        (("nope",), 2, "unknown command 'nope'"),
        (("--questions", "2"), 2, "unknown command '--questions'"),
        (("--help",), 0, "run every check of the project"),
        (("test", "-h"), 0, "run every check of the project"),
        (("index", "build", "--help"), 0, "The options of 'index' are available once `test` or `demo` has created"),
    ],
)
def test_help_is_printed_a_wrong_command_line_is_refused_and_nothing_is_installed(
    environment: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    ended = bootstrapped(environment, *arguments)
    silent, said = (ended.stdout, ended.stderr) if code else (ended.stderr, ended.stdout)
    assert (ended.returncode, silent) == (code, "")
    assert text in " ".join(said.split())
    assert not environment.exists()


@pytest.mark.parametrize("arguments", [["test", "tests/gpu", "-k", "recall"], ["demo", "--max-tokens", "24", "--keep"]])
def test_valid_arguments_are_accepted(arguments: list[str]) -> None:
    bootstrap.check(arguments)


def test_the_bootstrap_knows_the_commands() -> None:
    commands = get_command(command_line()).commands  # type: ignore[attr-defined]
    assert {*MAIN_COMMANDS, *LAZY_COMMANDS} == set(commands)


def test_arguments_of_test_go_to_pytest_after_the_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "PYTHON", Path("/bin/true"))  # what compiles beside the checks
    monkeypatch.setattr(bootstrap, "install", lambda: None)
    monkeypatch.setenv("MYPY_CACHE_DIR", "its own")
    monkeypatch.setattr(bootstrap, "run", lambda *command: run.append(tuple(map(str, command[1:]))))
    bootstrap.main(["test", "tests/gpu", "-k", "recall"])
    assert run == [*(command for _, command in bootstrap.CHECKS), (*bootstrap.TESTS, "tests/gpu", "-k", "recall")]
    run.clear()
    bootstrap.main(["test"])
    assert run[-1] == (*bootstrap.TESTS, "-m", "not nodes")


@pytest.mark.parametrize(("tests", "check", "code"), [("0", "0", None), ("0", "3", 3), ("4", "0", 4), ("4", "3", 4)])
def test_a_check_that_runs_beside_the_tests_shows_its_output_and_fails_the_run(
    tests: str, check: str, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", Path("/bin/sh"))
    failed = None
    try:
        with bootstrap.beside("types", ("-c", f"echo found; exit {check}")):
            bootstrap.run("/bin/sh", "-c", f"exit {tests}")
    except SystemExit as ended:
        failed = ended.code
    assert failed == code
    assert "==> types, checked meanwhile\nfound\n" in capsys.readouterr().out
