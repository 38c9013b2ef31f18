"""Prometheus and its promtool, from Debian's package `prometheus`; without them, tests skip, but never in CI."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """Return the program's path, or skip the test."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed (Debian's package prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool"), *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
