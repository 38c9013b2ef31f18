"""Tests of the on-disk cache of machine code."""

import shutil
import subprocess
import sys
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path
from typing import Any

import gpu
from gpu.compiled import c_function, compiled
from gpu.cpu.extend import keys

_PROGRAM = """
import numpy as np
from gpu.cpu.extend import keys
print(keys.key_of(np.float32(1), 2), len(keys.key_of.stats.cache_hits))
"""


def run(directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=directory, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.split()


def test_code_is_cached_across_processes_until_any_source_changes(tmp_path: Path) -> None:
    shutil.copytree(Path(gpu.__file__).parent, tmp_path / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    key = str(keys.key_of(1.0, 2))
    assert run(tmp_path) == [key, "0"]
    assert run(tmp_path) == [key, "1"]
    with (tmp_path / "gpu" / "cpu" / "simd.py").open("a") as source:
        source.write("# changed\n")
    assert run(tmp_path) == [key, "0"]


def test_code_is_compiled_without_a_cache_directory() -> None:
    names: dict[str, Any] = {}
    exec(compile("def add(a, b):\n    return a + b\n", "<nowhere>", "exec"), names)  # numba finds no cache directory
    assert compiled(names["add"])(2, 3) == 5
    address = c_function("int64(int64, int64)")(names["add"]).address
    assert CFUNCTYPE(c_int64, c_int64, c_int64)(address)(2, 3) == 5
