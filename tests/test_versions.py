"""CI runs the oldest versions that pyproject.toml allows of what machine code is made with; of torch, whoever asks."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def test_the_oldest_versions_that_ci_runs_are_the_lower_bounds() -> None:
    wanted = dict(re.findall(r"^([\w-]+)>=([\d.]+)(?:,<[\d.]+)?$", "\n".join(_dependencies()), re.MULTILINE))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE))
    for package in ("numpy", "numba", "onnxruntime"):
        assert pinned[package] == f"{wanted[package]}.0"


def test_the_oldest_torch_that_the_tests_can_be_run_with_is_the_lower_bound() -> None:
    (lower,) = (one.removeprefix("torch>=") for one in _project()["optional-dependencies"]["llm"] if "torch" in one)
    assert f"torch=={lower}.0" in (ROOT / "tests/serving/oldest.txt").read_text().splitlines()


def _dependencies() -> list[str]:
    found: list[str] = _project()["dependencies"]
    return found


def _project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found
