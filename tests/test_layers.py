"""Tests of test layers and of parallel runs."""

import re
from pathlib import Path

import pytest

from tests.layers import E2E, NODES, PROCESS, layer_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("test", "layer"),
    [
        ("tests/e2e/test_logs.py::test_one", "nodes"),
        ("tests/e2e/test_request_path.py::test_one", "e2e"),
        ("tests/pool/test_kills.py::test_one[1-2]", "process"),
        ("tests/pool/test_loop.py::TestMachine::runTest", "unit"),
        ("tests/test_readme.py::test_one", "unit"),
    ],
)
def test_a_test_has_the_layer_of_its_file(test: str, layer: str) -> None:
    assert layer_of(test) == layer


def test_every_listed_file_exists() -> None:
    files = [
        (TESTS if folder == "tests" else TESTS / folder) / f"{name}.py"
        for folder, names in [*PROCESS.items(), *NODES.items(), ("e2e", E2E)]
        for name in names
    ]
    assert [file for file in files if not file.exists()] == []


def test_no_unit_test_file_starts_processes() -> None:
    units = [file for file in TESTS.rglob("test_*.py") if layer_of(file.relative_to(TESTS.parent).as_posix()) == "unit"]
    starts = re.compile(
        r"subprocess\.|\bPopen\(|\bchild\(|FORKSERVER\.|\bemulator\(|NewDriver|BACKEND|require_compiler"
    )
    assert len(units) > 50
    assert [file for file in units if file != Path(__file__) and starts.search(file.read_text())] == []
