"""What `.ci/run` starts in the background fails the run with its output, and ends with the run."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from runtime.testing.waiting import until

FUNCTIONS, ENVIRONMENTS = (Path(__file__).parents[1] / ".ci" / name for name in ("background", "environments"))
SLEEPER = "background sleeper sh -c 'sleep 600 & echo $! > sleeper.new; mv sleeper.new sleeper; wait'\n"


def started(tmp_path: Path, text: str) -> "subprocess.Popen[str]":
    command = ["bash", "-euo", "pipefail", "-c", f". {FUNCTIONS}\n{text}"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell traps nothing that it ignores
    )  # fmt: skip


def test_a_command_that_fails_in_the_background_fails_the_run_and_shows_its_output(tmp_path: Path) -> None:
    run = started(tmp_path, "background one sh -c 'echo reason; exit 3'\necho before\nfinish one\necho after")
    assert run.communicate(timeout=60)[0] == "before\nreason\n"
    assert run.returncode == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("ends", "code"), [("false", 1), ("kill -INT 0", 130), ("kill -TERM 0", 143)])
def test_whatever_ends_the_run_nothing_stays_in_the_background(tmp_path: Path, ends: str, code: int) -> None:
    run = started(tmp_path, f"{SLEEPER}until [ -f sleeper ]; do sleep .01; done\n{ends}\nsleep 600")
    run.communicate(timeout=60)
    assert run.returncode == code
    until(lambda: not psutil.pid_exists(int((tmp_path / "sleeper").read_text())))
    assert [path.name for path in tmp_path.iterdir()] == ["sleeper"]


@pytest.mark.parametrize(("ci", "code", "told"), [("true", 1, ""), ("", 0, "goes on\n")])
def test_what_cannot_be_installed_in_two_attempts_fails_the_run_in_ci_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, code: int, told: str
) -> None:
    monkeypatch.setenv("CI", ci)
    attempt = "attempt() { echo x >> attempts; [ $(wc -l < attempts) = $1 ]; }\n"
    run = started(
        tmp_path,
        f". {ENVIRONMENTS}\n{attempt}background second twice attempt 2\nfinish second\nrm attempts\n"
        "background never twice attempt 3\nfinish never || required_in_ci missing\necho goes on",
    )
    assert run.communicate(timeout=60)[0] == told
    assert run.returncode == code
    assert (tmp_path / "attempts").read_text() == "x\nx\n"
