"""The loop's parts that processes of their own compile are those that the loop calls, and with the same types."""

import os
import signal
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest
from numba import int64, typeof
from numba.core import event

from gpu.cpu.running_batch import extend_active
from gpu.cpu.state import BatchState
from ipc.native.dispatcher import Dispatcher
from runtime.pool import loop_parts
from runtime.pool.loop import run_loop
from runtime.pool.loop_parts import CALLED, INNER, PARTS, compile_part, compiled_in_background
from tests.pool.conftest import MakePool


def qualified(dispatcher: Any) -> str:
    function = dispatcher.py_func
    return f"{function.__module__}.{function.__name__}"


class Compilations(event.Listener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(qualified(event.data["dispatcher"]))

    def on_end(self, event: Any) -> None:
        pass


def test_after_its_parts_the_loop_and_the_engine_compile_little_else() -> None:
    for name in PARTS:
        compile_part(name)
    options, stamp = {"nogil": True, "error_model": "numpy", "_nrt": False}, os.urandom(8).hex()  # not in the cache
    loop = Dispatcher(run_loop.py_func, options, stamp)
    handle = INNER["exact"][1][0]
    engine = Dispatcher(extend_active.py_func, options, stamp)
    listener = Compilations()
    with event.install_listener("numba:compile", listener):
        loop.compile((int64, int64, int64))
        engine.compile((handle, int64))
    assert not set(listener.names) & {qualified(function) for function, _ in INNER.values()}


def called_by(function: Any) -> set[str]:
    """Return the names of the compiled functions that a compiled one calls, and those call in turn."""
    found: set[str] = set()
    unseen = [function]
    while unseen:
        python = unseen.pop().py_func
        modules = [vars(used) for name in python.__code__.co_names if ismodule(used := python.__globals__.get(name))]
        for names in (python.__globals__, *modules):
            for name in python.__code__.co_names:
                if hasattr(called := names.get(name), "py_func") and qualified(called) not in found:
                    found.add(qualified(called))
                    unseen.append(called)
    return found


def test_one_function_that_python_calls_contains_the_loop() -> None:
    loop = qualified(run_loop)
    containing = [name for name, (function, _) in CALLED.items() if loop in {qualified(function), *called_by(function)}]
    assert containing == ["serve_loop"], "each is compiled with all of it"


def test_searches_are_compiled_for_the_arrays_of_a_batch() -> None:
    state = BatchState((), 4, 64, 1, 10)
    handle, active, finished = map(typeof, (state.handle, state.batch.active, state.batch.finished))
    for name in ("exact", "code scan", "rabitq"):
        assert INNER[name][1] == (handle, active, finished)
    batch, slot = INNER["distances"][1][0], active.dtype
    assert batch.types[4:] == tuple(map(typeof, state.batch.arrays))
    assert INNER["merge"][1] == INNER["scan"][1] == (batch, active, finished)
    assert INNER["results"][1] == (batch, slot, typeof(state.batch.nodes[0]), typeof(state.batch.result_distances[0]))
    assert INNER["query"][1][-1] == typeof(state.batch.queries[0])
    for name in ("rabitq's start", "rabitq's end"):
        assert INNER[name][1] == (handle, active.dtype)


def test_python_calls_no_function_with_other_types_than_its_parts_are_compiled_for(make_pool: MakePool) -> None:
    make_pool().step()
    for function, types in CALLED.values():
        assert function.signatures == [types], function.py_func.__name__


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has nothing cached, and a file for each part that would be compiled, with the process that would."""

    def compile_part(name: str) -> None:
        (tmp_path / name).write_text(str(os.getpid()))

    monkeypatch.setattr(loop_parts, "compile_part", compile_part)
    monkeypatch.setattr(loop_parts, "is_cached", lambda: False)
    return tmp_path


@pytest.mark.parametrize(("cached", "writable"), [(True, True), (False, False)])
def test_nothing_is_compiled_beside_where_the_loop_is_cached_or_cannot_be(
    cached: bool, writable: bool, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_parts, "is_cached", lambda: cached)
    monkeypatch.setattr(loop_parts, "can_cache", lambda: writable)
    with compiled_in_background(cores=range(2)):
        pass
    assert not list(compiled.iterdir())


def test_all_parts_are_compiled_by_processes_during_the_block(compiled: Path) -> None:
    with compiled_in_background(cores=range(3)):
        while len(list(compiled.iterdir())) < len(PARTS):
            os.sched_yield()
    assert {path.name for path in compiled.iterdir()} == set(PARTS)
    assert str(os.getpid()) not in {path.read_text() for path in compiled.iterdir()}


def test_with_one_core_all_parts_are_compiled_at_the_end_of_the_block(compiled: Path) -> None:
    with compiled_in_background(cores=range(1)):
        assert not list(compiled.iterdir())
    assert {path.name for path in compiled.iterdir()} == set(PARTS)


def test_for_a_gpu_no_part_of_the_cpus_engine_is_compiled(compiled: Path) -> None:
    with compiled_in_background("cuda:0", range(16)):
        pass
    assert {path.name for path in compiled.iterdir()} == {"receive", "extend", "schedule", "admit", *CALLED}


def test_what_a_process_fails_to_compile_is_left_to_those_that_need_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pool, (read, write) = os.getpid(), os.pipe()

    def compile_part(_name: str) -> None:
        if os.getpid() != pool:
            os.write(write, b"x")
            raise MemoryError("no memory")

    monkeypatch.setattr(loop_parts, "compile_part", compile_part)
    monkeypatch.setattr(loop_parts, "is_cached", lambda: False)
    with compiled_in_background(cores=range(2)):
        assert os.read(read, 1)
    os.close(read)
    os.close(write)
    assert "MemoryError: no memory" in capfd.readouterr().err


def test_processes_that_compile_end_when_the_pool_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()

    def compile_part(_name: str) -> None:
        os.write(write, b"x")
        signal.pause()

    monkeypatch.setattr(loop_parts, "compile_part", compile_part)
    monkeypatch.setattr(loop_parts, "is_cached", lambda: False)
    if not (pool := os.fork()):
        try:
            with compiled_in_background(cores=range(2)):
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(1) == b"x"
        os.kill(pool, signal.SIGKILL)
        assert pipe.read() == b"", "all that have the other end have ended"
    os.waitpid(pool, 0)
