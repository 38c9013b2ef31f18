"""Scripts of docs/examples report usage errors and a missing node in one line."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fork_server import ROOT, ForkServer

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
RINGS = ("search", "search_asyncio")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("numpy", "openai", "runtime.retrieval.search.async_client", "httpx") as fork_server:
        yield fork_server


def said(fork_server: ForkServer, script: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of standard error."""
    done = fork_server.run(str(script), *arguments)
    assert not done.stdout
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_with_too_few_or_too_many_arguments_shows_its_usage(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ((), ("one",), ("one", "two", "three", "four")):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")  # here, where what it imports is imported once
        assert ended.value.code == 2
        told = capsys.readouterr()
        (line,) = told.err.splitlines()
        assert line.startswith(f"usage: python docs/examples/{script.name} ")
        assert not told.out


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_without_a_node_prints_an_error(script: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    file = str(tmp_path / "queries.npy")  # file_search wants one that exists; to the others it is a name
    np.save(file, np.ones((2, 8), np.float32))
    node = str(tmp_path / "nowhere") if script.stem in RINGS else "http://127.0.0.1:1/v1"
    code, (line,) = said(fork_server, script, node, file, *(() if script.stem in RINGS else ("why?",)))
    assert code == 1
    assert node in line
