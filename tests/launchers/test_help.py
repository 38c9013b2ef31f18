"""Help texts are rendered literally, and the version is available."""

from collections.abc import Iterator
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from launchers import main
from launchers.main import command_line


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Return the help texts of a command, its parameters and all subcommands."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", "") or ""
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, f"{name} {below.name}")


def test_words_in_brackets_are_not_parsed_as_markup() -> None:
    for where, text in helps(get_command(command_line()), ""):
        assert Text.from_markup(text).plain == text.replace("\\[", "["), where


def test_the_extra_that_a_gpu_build_needs_is_named() -> None:
    shown = CliRunner().invoke(command_line(), ["index", "build", "--help"], env={"COLUMNS": "200"}).stdout
    assert "of the extra [cuvs]." in shown


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "node_version", lambda: "1.2.3")
    told = CliRunner().invoke(command_line(), ["--version"])
    assert (told.exit_code, told.stdout) == (0, "trinity 1.2.3\n")
    monkeypatch.setattr(main, "node_version", lambda: "")
    assert CliRunner().invoke(command_line(), ["--version"]).stdout == "trinity (not installed)\n"
