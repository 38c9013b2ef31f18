"""Every script of docs/examples runs as its first lines say."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.testing.node import Node

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
QUESTION = "with statement"


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_the_example_answers(script: Path, node: Node, tmp_path: Path) -> None:
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32))
    url = f"{node.info.url}/v1"
    rings, http = [str(node.run_dir), str(tmp_path / "queries.npy")], [url, "tiny", QUESTION]
    arguments = rings if "NODE QUERIES.npy" in script.read_text() else http
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4
