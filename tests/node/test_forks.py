"""Workers are forked from a process with their imports, as children of the supervisor."""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runtime.node.forking import ONE_THREAD
from runtime.node.supervisor.forks import Template
from tests.clock import Clock

ROOT = Path(__file__).parents[2]
WAIT_S = 60
PR_GET_CHILD_SUBREAPER = 37
CODE = """
import os, signal, socket, sys
from runtime.node.forking import serve
fork, template = os.fork, os.getpid()
def fork_or_fail():
    if os.environ.get("NO_PROCESS_LEFT") and os.getpid() != template:
        raise BlockingIOError("no process left")
    child = fork()
    if os.environ.get("KILLED_AS_IT_FORKS") and child and os.getpid() == template:
        os.kill(template, signal.SIGKILL)
    return child
os.fork = fork_or_fail
def load(roles):
    if "prefill" in roles and os.environ.get("BREAKS"):
        os._exit(7)
def run(descriptors):
    line = sys.stdin.readline().strip()
    if line == "wait":
        signal.pause()
    if line == "kill":
        os.kill(template, signal.SIGKILL)
    told = f"{os.getppid()} {os.getsid(0) == os.getpid()} {os.environ['THREADS']} {line}"
    if "stack" in descriptors:
        os.write(descriptors["stack"], told.encode())
    return 5
serve(socket.socket(fileno=int(sys.argv[1])), load, run)
"""
ENVIRONMENT: dict[str, str] = {"THREADS": "1"}
DESCRIPTORS: dict[str, int] = {}


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Template]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with contextlib.ExitStack() as stack:

        def start(clock: Callable[[], float] = time.monotonic) -> Template:
            made = Template((sys.executable, "-c", CODE), clock=clock)
            stack.callback(made.close)
            assert not made.can_fork("pool")  # it imports
            heard(made)
            return made

        yield start


def heard(template: Template) -> None:
    """Wait until a template says something."""
    assert select.select([template], [], [], WAIT_S)[0], "it says nothing"
    template.receive()


def test_a_worker_is_a_child_with_its_environment_and_descriptors(template: Callable[[], Template]) -> None:
    made = template()
    with os.fdopen(os.memfd_create("told"), "rb+") as told:
        worker = made.fork({"THREADS": "3"}, {"stack": told.fileno()})
        with worker.stdin:
            worker.stdin.write(b"hello\n")
        assert worker.wait(WAIT_S) == worker.poll() == 5
        told.seek(0)
        assert told.read().decode() == f"{os.getpid()} True 3 hello"
    orphans_parent = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(orphans_parent), 0, 0, 0)
    assert not orphans_parent.value  # later orphans are another's


def test_a_worker_outlives_the_process_that_it_is_forked_from(template: Callable[[], Template]) -> None:
    made = template()
    with (worker := made.fork(ENVIRONMENT, DESCRIPTORS)).stdin as stdin:
        made.close()
        assert worker.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.0)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT_S) == -signal.SIGTERM
        worker.send_signal(signal.SIGTERM)  # it has ended
        stdin.close()


def test_model_workers_are_forked_once_what_they_use_is_imported(template: Callable[[], Template]) -> None:
    made = template()
    assert made.can_fork("pool")
    assert not made.can_fork("prefill")
    made.import_wanted()
    assert not made.can_fork("pool")  # it would wait
    heard(made)
    assert made.can_fork("prefill")
    assert made.can_fork("pool")
    assert not made.can_fork("decode")


def test_imports_that_end_their_process_fail_one_start(
    template: Callable[[], Template], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS", "1")
    made = template()
    assert not made.can_fork("prefill")
    made.import_wanted()
    heard(made)
    assert made.can_fork("prefill")
    with pytest.raises(OSError, match="the process from which workers are forked ended with exit code 7"):
        made.fork(ENVIRONMENT, DESCRIPTORS)
    assert not made.can_fork("prefill")  # the next one imports
    heard(made)
    assert made.can_fork("pool")


def test_a_process_that_was_killed_is_replaced(template: Callable[[], Template]) -> None:
    made = template()
    with (worker := made.fork(ENVIRONMENT, DESCRIPTORS)).stdin as stdin:
        stdin.write(b"kill\n")
    assert worker.wait(WAIT_S) == 5
    heard(made)
    assert not made.can_fork("pool")  # another one imports
    heard(made)
    with (worker := made.fork(ENVIRONMENT, DESCRIPTORS)).stdin:
        pass
    worker.wait(WAIT_S)


def test_a_process_that_is_stopped_is_not_waited_for_and_replaced(template: Callable[..., Template]) -> None:
    clock = Clock()
    others = psutil.Process().children()
    made = template(lambda: clock.now / 1e9)
    (stopped,) = [child for child in psutil.Process().children() if child not in others]
    stopped.suspend()
    made.receive()
    assert not made.can_fork("pool")  # it is asked whether it answers
    stopped.resume()
    heard(made)
    assert made.can_fork("pool")
    stopped.suspend()
    for passed_s in (0.0, 5.0):
        clock.advance(passed_s)
        made.receive()
        assert not made.can_fork("pool")
    clock.advance(0.1)
    made.receive()
    assert not stopped.is_running()
    assert not made.can_fork("pool")  # another one imports
    heard(made)
    assert made.can_fork("pool")
    with (worker := made.fork(ENVIRONMENT, DESCRIPTORS)).stdin:
        pass
    assert worker.wait(WAIT_S) == 5


def test_a_worker_is_forked_though_the_process_it_is_forked_from_is_killed_meanwhile(
    template: Callable[[], Template], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_AS_IT_FORKS", "1")
    others = psutil.Process().children()
    made = template()
    with (worker := made.fork(ENVIRONMENT, DESCRIPTORS)).stdin as stdin:
        heard(made)
        assert not made.can_fork("pool")
        assert worker.poll() is None
        stdin.write(b"hello\n")
    assert worker.wait(WAIT_S) == 5
    made.close()
    assert psutil.Process().children() == others  # the process between is not left as a zombie


def test_a_process_that_cannot_fork_says_so_at_once(
    template: Callable[[], Template], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROCESS_LEFT", "1")
    made = template()
    with pytest.raises(OSError, match="the process from which workers are forked ended with exit code 1"):
        made.fork(ENVIRONMENT, DESCRIPTORS)
    assert not made.can_fork("pool")  # the next one imports


def test_what_is_imported_before_a_fork_starts_no_thread_and_opens_no_gpu(tmp_path: Path) -> None:
    if compiler := shutil.which("g++"):  # a driver that could be loaded, where there is none
        driver = ("-shared", "-x", "c++", os.devnull, "-o")
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            subprocess.run([compiler, *driver, tmp_path / name], check=True)
    code = """
import os
from typing import get_args
from runtime.node.config import Role
from runtime.worker_process import load
load(())
load(get_args(Role))
opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
opened += open("/proc/self/maps").read().split()
drivers = ("/dev/nvidia", "/libcuda.so", "/libnvidia-ml.so")
print(len(os.listdir("/proc/self/task")), [path for path in opened if any(name in path for name in drivers)])
"""
    libraries = ":".join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    environment = os.environ | ONE_THREAD | {"LD_LIBRARY_PATH": libraries}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "1 []\n", done.stderr
