"""Tests of test layers and of parallel runs."""

import re
from pathlib import Path

import pytest

from tests.layers import E2E, FIRST, NODES, PROCESS, TRANSFORMERS, layer_of, parallel_places, share_of

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
        for folder, names in [*PROCESS.items(), *NODES.items(), *TRANSFORMERS.items(), ("e2e", E2E)]
        for name in names
    ]
    files += [TESTS.parent / share for share in FIRST if "/" in share]
    assert [file for file in files if not file.exists()] == []


def test_no_unit_test_file_starts_processes() -> None:
    units = [file for file in TESTS.rglob("test_*.py") if layer_of(file.relative_to(TESTS.parent).as_posix()) == "unit"]
    starts = re.compile(
        r"subprocess\.|\bPopen\(|\bchild\(|FORKSERVER\.|\bemulator\(|NewDriver|BACKEND|require_compiler"
    )
    assert len(units) > 50
    assert [file for file in units if file != Path(__file__) and starts.search(file.read_text())] == []


def test_what_waits_and_what_computes_alternate_and_what_takes_longest_comes_first() -> None:
    waiting = ["tests/e2e/test_logs.py", "tests/e2e/test_examples.py", "tests/pool/test_kills.py"]
    computing = [f"tests/node/test_{number}.py" for number in range(6)]
    places = parallel_places(f"{file}::test_one" for file in [*computing, *reversed(waiting)])
    order = sorted(places, key=lambda share: places[share])
    assert [share for share in order if share not in computing] == [waiting[0], "e2e", waiting[2]]
    assert [share in computing for share in order] == [False, True, True, False, True, True, False, True, True]


def test_files_that_share_a_node_or_transformers_share_a_process() -> None:
    shares = {
        "tests/e2e/test_examples.py": "e2e",
        "tests/serving/test_model.py": "transformers",
        "tests/serving/test_blocks.py": "tests/serving/test_blocks.py",
        "tests/e2e/test_logs.py": "tests/e2e/test_logs.py",
    }
    assert {file: share_of(f"{file}::test_one[1]") for file in shares} == shares
