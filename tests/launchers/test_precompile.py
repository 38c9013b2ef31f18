"""`trinity precompile` leaves nothing to compile at a node's start."""

import subprocess
import sys

from runtime.pool.loop_parts import is_cached


def precompile(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launchers.entry", "precompile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_loop_and_the_engines_are_compiled() -> None:
    done = precompile()
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "search engine and pool",
        "model on CPUs",
        "search engine on GPUs",
    ]
    assert is_cached()


def test_kernels_that_cannot_be_compiled_are_an_error_without_a_traceback() -> None:
    done = precompile("--arch", "pentium")
    assert done.returncode == 78
    assert done.stderr.startswith("trinity: error: ")
    assert "Traceback" not in done.stderr
