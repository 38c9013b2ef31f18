"""Compiled functions: one version for compiled code, another for Python; and where their machine code is cached."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from numba.core import event

import ipc
from ipc.native.compiled import compiled, stamp_of
from ipc.native.dispatcher import Dispatcher
from ipc.native.machine_code import Lock
from ipc.native.private import is_private

_TOGETHER = """
import sys
from pathlib import Path
from numba.core import event
from ipc.native.compiled import compiler_for

compiled = compiler_for(Path(__file__).parent)

@compiled
def low(a):
    return a + 1

@compiled
def high(a):
    return 2 * low(a)

class Compilations(event.Listener):
    count = 0
    def on_start(self, event):
        self.count += event.data["dispatcher"].py_func.__module__ == __name__
    def on_end(self, event):
        pass

if __name__ == "__main__":
    listener = Compilations()
    event.register("numba:compile", listener)
    print("loaded", flush=True)
    sys.stdin.readline()
    assert high(1) == 4
    print(listener.count)
"""
_COUNTED = """
from pathlib import Path
import numpy as np
from ipc.native.compiled import compiler_for

def tail(a):
    b = a + 1
    return b[1:]

compiled_tail = compiler_for(Path(__file__).parent)(tail, returns_array=True)
print(int(compiled_tail(np.arange(3))[0]), sum(compiled_tail.stats.cache_hits.values()))
"""


class Compilations(event.Listener):  # type: ignore[misc]
    """Names of the functions that are compiled."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        pass


def compilations_of(work: Any) -> list[str]:
    listener = Compilations()
    with event.install_listener("numba:compile", listener):
        work()
    return listener.names


def add(a: int, b: int) -> int:
    return a + b


def dispatcher(function: Any, stamp: str) -> Any:
    return Dispatcher(function, {"error_model": "numpy"}, stamp)


def test_a_function_is_compiled_once_for_all_literals_of_compiled_code(tmp_path: Path) -> None:
    called = dispatcher(add, str(tmp_path))

    def caller(a: int) -> Any:
        return called(a, 1) + called(a, 2) + called(a, a)

    calling = dispatcher(caller, str(tmp_path))
    assert compilations_of(lambda: calling(1)) == ["caller", "add"]


def test_code_is_not_loaded_from_a_directory_that_others_can_write(tmp_path: Path) -> None:
    assert is_private(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert not is_private(shared)
    (shared / "own").mkdir(mode=0o700)
    assert not is_private(shared / "own"), "others may replace it"
    shared.chmod(0o1777)
    assert is_private(shared / "own")


def test_a_change_of_any_source_of_a_folder_changes_the_stamp(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\n")
    before = stamp_of(tmp_path)
    (tmp_path / "two.py").write_text("")
    assert stamp_of(tmp_path) == before
    (tmp_path / "two.py").write_text("b = 2\n")
    assert stamp_of(tmp_path) != before
    assert compiled(add).is_cached() is False


def test_processes_that_start_together_on_an_empty_cache_compile_each_function_once(tmp_path: Path) -> None:
    program = tmp_path / "together.py"
    program.write_text(_TOGETHER)
    command, variables = [sys.executable, str(program)], os.environ | {"PYTHONPATH": str(Path(ipc.__file__).parents[1])}
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert sum(int(process.communicate(timeout=250)[0]) for process in processes) == 2
    assert not list(tmp_path.rglob("*.lock"))


def hits(program: Path, **more: str) -> int:
    """How many functions a process that runs `_COUNTED` has found in the cache: 0 or 1."""
    variables = os.environ | {"PYTHONPATH": str(Path(ipc.__file__).parents[1])} | more
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result, found = done.stdout.split()
    assert result == "2"
    return int(found)


def test_code_that_counts_references_is_loaded_by_a_process_that_has_compiled_nothing_also_from_beside_its_source(
    tmp_path: Path,
) -> None:
    program, elsewhere = tmp_path / "counted.py", tmp_path / "cache"
    program.write_text(_COUNTED)
    elsewhere.mkdir(mode=0o700)
    assert [hits(program), hits(program)] == [0, 1]
    assert hits(program, NUMBA_CACHE_DIR=str(elsewhere)) == 1, "where it cannot be written, as in an image"
    assert not list(elsewhere.rglob("*.nbc"))


def test_a_lock_is_waited_for_until_it_is_released(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "f.lock"), Lock(tmp_path / "f.lock")
    assert first.acquire()
    assert not first.acquire(), "it is held"
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    assert waiting.is_alive()
    first.release()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    second.release()
    assert not list(tmp_path.iterdir())


def test_a_process_that_holds_a_lock_for_too_long_is_not_waited_for(tmp_path: Path) -> None:
    held = Lock(tmp_path / "f.lock")
    assert held.acquire()
    assert not Lock(tmp_path / "f.lock", longest_s=0.0).acquire()
    held.release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = "import sys, time\nfrom pathlib import Path\nfrom ipc.native.machine_code import Lock\n"
    program += "Lock(Path(sys.argv[1])).acquire() and print(flush=True)\ntime.sleep(600)\n"
    path = tmp_path / "f.lock"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        assert not Lock(path, longest_s=0.0).acquire()
        holder.kill()
    assert Lock(path).acquire()


def test_a_lock_that_several_threads_release_is_released_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, unlink = Lock(tmp_path / "code.lock"), Path.unlink
    assert lock.acquire()

    def meanwhile(path: Path) -> None:  # the other thread comes in between
        unlink(path)
        lock.release()

    monkeypatch.setattr(Path, "unlink", meanwhile)
    lock.release()
    assert lock.acquire()
    lock.release()
