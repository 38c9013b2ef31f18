"""Machine code that is kept on disk."""

import shutil
import subprocess
import sys
from pathlib import Path

import gpu
from gpu.cpu import keys

_PROGRAM = """
import numpy as np
from gpu.cpu import keys
print(keys.key_of(np.float32(1), 2), len(keys.key_of.stats.cache_hits))
"""


def run(directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=directory, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.split()


def test_code_is_kept_for_the_next_process_until_any_source_changes(tmp_path: Path) -> None:
    shutil.copytree(Path(gpu.__file__).parent, tmp_path / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    key = str(keys.key_of(1.0, 2))
    assert run(tmp_path) == [key, "0"]
    assert run(tmp_path) == [key, "1"]
    with (tmp_path / "gpu" / "cpu" / "simd.py").open("a") as source:
        source.write("# changed\n")
    assert run(tmp_path) == [key, "0"]
