"""CI runs the oldest versions that pyproject.toml allows of what machine code is made with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_oldest_versions_that_ci_runs_are_the_lower_bounds() -> None:
    wanted = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", "\n".join(_dependencies()), re.MULTILINE))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE))
    for package in ("numpy", "numba", "onnxruntime"):
        assert pinned[package] == f"{wanted[package]}.0"


def _dependencies() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[str] = tomllib.load(file)["project"]["dependencies"]
    return found
