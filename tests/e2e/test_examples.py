"""Every script of docs/examples runs as described in its first lines; `rerank.py` in test_rerank.py, on its node."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.testing.node import Node

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples"
EXAMPLES = sorted(script for script in FOLDER.glob("*.py") if script.stem != "rerank")


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_the_example_answers(script: Path, node: Node, tmp_path: Path) -> None:
    run_example(script, node, tmp_path)


def run_example(script: Path, node: Node, tmp_path: Path) -> list[str]:
    """Run a script as its usage says; return its output's lines."""
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32))
    handbook = tmp_path / "handbook.md"
    handbook.write_text("\n".join(f"# Part {n}\n\nThe with statement of part {n} closes its file.\n" for n in range(5)))
    told = {
        "URL": f"{node.info.url}/v1",
        "MODEL": "tiny",
        "SOURCE": "python",
        "FILE": str(handbook),
        "QUESTION": "with statement",
        "NODE": str(node.run_dir),
        "QUERIES.npy": str(tmp_path / "queries.npy"),
    }
    (usage,) = re.findall(r"usage: python docs/examples/\S+ (.*)\"", script.read_text())
    done = subprocess.run(
        [sys.executable, str(script), *map(told.__getitem__, usage.split())],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 4
    return lines
