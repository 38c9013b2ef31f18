"""Commands use the only running node by default; with several, the error lists them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.errors import InvalidRequest, Unavailable
from runtime.node.run_dir import NodeInfo, RunDir

COMMANDS = (
    ["status"], ["top"], ["restart"], ["stop"], ["logs"], ["trace", "an-id"],
    ["workers", "add", "decode"], ["workers", "drain", "decode"], ["workers", "flip", "decode"],
)  # fmt: skip
NOWHERE = "ipc://@nobody-is-there"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def only(home: Path) -> Iterator[RunDir]:
    held = RunDir.acquire(home / "trinity" / "only")
    held.write(NodeInfo("only", 1, "http://127.0.0.1:1", NOWHERE, (), (), logs=str(home)))
    yield held
    held.release()


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words))
def test_with_several_nodes_the_error_lists_them(words: Sequence[str], only: RunDir, home: Path) -> None:
    other = RunDir.acquire(home / "trinity" / "other")
    other.write(NodeInfo("other", 1, "http://127.0.0.1:1", NOWHERE, (), ()))
    refused = CliRunner().invoke(command_line(), list(words)).exception
    other.release()
    assert isinstance(refused, InvalidRequest)
    assert "2 nodes run: 'only', 'other'" in refused.message


@pytest.mark.parametrize("words", [["trace", "an-id"], ["top"]], ids=["trace", "top"])
def test_the_only_node_is_the_default_whatever_its_name(words: Sequence[str], only: RunDir) -> None:
    assert "http://127.0.0.1:1" in str(CliRunner().invoke(command_line(), list(words)).exception)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words))
def test_a_command_about_a_node_takes_it_as_argument_and_others_by_option(words: Sequence[str]) -> None:
    named = [*words, "there-is-none"] if len(words) == 1 else [*words, "--node", "there-is-none"]
    refused = CliRunner().invoke(command_line(), named).exception
    assert isinstance(refused, Unavailable)
    assert "there-is-none" in refused.message


def test_the_logs_of_the_only_node_are_read(only: RunDir, home: Path) -> None:
    assert CliRunner().invoke(command_line(), ["logs"]).exit_code == 0
