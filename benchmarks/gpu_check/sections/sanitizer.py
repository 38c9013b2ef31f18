"""compute-sanitizer's tools on a small run in each launch form, if it is installed."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.time_limit import Skipped

_TOOLS = ("memcheck", "racecheck", "synccheck")
_FORMS = ("plain", "resident")
_SECONDS = 15
"""Time limit of a run; all tools run at once, and most of a run's time is its imports."""
_TOOLKIT = "/usr/local/cuda/bin"


def check(setup: Setup, outcome: Outcome) -> None:
    """Run the small run, under each tool on a GPU. An error is reported; the other tools still run."""
    small = [sys.executable, "-m", "benchmarks.gpu_check.sections.small_run", setup.device]
    if not setup.on_gpu:
        text = _run([*small, "plain"])
        outcome.add("small run", text.splitlines()[-1])
        for tool in _TOOLS:
            outcome.add(tool, "skipped: no GPU")
        return
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=_TOOLKIT)
    if sanitizer is None:
        raise Skipped(f"no compute-sanitizer on the PATH or in {_TOOLKIT}")
    with ThreadPoolExecutor() as pool:
        runs = {
            f"{tool}, {form}": pool.submit(_run, [sanitizer, "--tool", tool, "--error-exitcode", "9", *small, form])
            for form in _FORMS
            for tool in _TOOLS
        }
    for what, run in runs.items():
        try:
            text = run.result()
            summary = next((line for line in reversed(text.splitlines()) if "SUMMARY" in line), "no summary")
            outcome.add(what, summary.strip("= "))
        except subprocess.TimeoutExpired as error:
            text = str(error)
            if what.endswith("resident"):  # its host and its blocks wait for each other, which a tool may serialise
                outcome.add(what, f"skipped: the tool does not end within {_SECONDS} s with a persistent kernel")
            else:
                outcome.add(what, f"FAILED: {text.splitlines()[0]}")
                outcome.failed = True
        except AssertionError as error:
            text = str(error)
            outcome.add(what, f"FAILED: {text.splitlines()[0]}")
            outcome.failed = True
        outcome.data[what] = text[-4000:]


def _run(command: list[str]) -> str:
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command[:3])} ended with {done.returncode}: {text[-1500:]}"
    return text
