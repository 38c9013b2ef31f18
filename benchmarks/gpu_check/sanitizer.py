"""compute-sanitizer's memcheck and racecheck over a small run, where it is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check.report import Outcome, Skipped
from benchmarks.gpu_check.setup import Setup

_TOOLS = ("memcheck", "racecheck")
_SECONDS = 90


def check(setup: Setup) -> Outcome:
    """The small run: alone in a dry run, under each tool on a GPU. Raises AssertionError where a tool complains."""
    small = [sys.executable, "-m", "benchmarks.gpu_check.small_run", setup.device]
    if not setup.on_gpu:
        text = _run(small)
        return Outcome([("small run", text.splitlines()[-1]), *((tool, "skipped: no GPU") for tool in _TOOLS)])
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise Skipped("no compute-sanitizer on the PATH")
    lines, outputs = [], {}
    for tool in _TOOLS:
        text = _run([sanitizer, "--tool", tool, "--error-exitcode", "9", *small])
        outputs[tool] = text[-4000:]
        lines.append((tool, next(line for line in reversed(text.splitlines()) if "SUMMARY" in line).strip("= ")))
    return Outcome(lines, outputs)


def _run(command: list[str]) -> str:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command[:3])} ended with {done.returncode}: {text[-1500:]}"
    return text
