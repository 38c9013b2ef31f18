"""The loop's parts that processes of their own compile are those that the loop calls, and with the same types."""

import os
from typing import Any

import pytest
from numba import int64, typeof
from numba.core import event

from gpu.cpu.running_batch import extend_active
from gpu.cpu.state import BatchState
from ipc.native.dispatcher import Dispatcher
from runtime.pool import loop_parts
from runtime.pool.loop import run_loop
from runtime.pool.loop_parts import CALLED, INNER, PARTS, compile_parts, compiled_in_background
from tests.pool.conftest import MakePool


class Compilations(event.Listener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        pass


def test_after_its_parts_the_loop_and_the_engine_compile_little_else() -> None:
    compile_parts(list(PARTS))
    options = {"nogil": True, "error_model": "numpy", "_nrt": False}
    loop = Dispatcher(run_loop.py_func, options, "another stamp")
    handle = INNER["exact"][1][0]
    engine = Dispatcher(extend_active.py_func, options, "another stamp")
    listener = Compilations()
    with event.install_listener("numba:compile", listener):
        loop.compile((int64, int64, int64))
        engine.compile((handle, int64))
    parts = {function.py_func.__name__ for function, _ in INNER.values()}
    assert parts & set(listener.names) == {"run_loop"}


def test_one_function_that_python_calls_contains_the_loop() -> None:
    listener = Compilations()
    with event.install_listener("numba:compile", listener):
        for called in CALLED.values():
            for function, types in called:
                Dispatcher(function.py_func, {"_nrt": False}, "another stamp").compile(types)
    assert sum(name in ("run_loop", "serve_loop") for name in listener.names) == 1, "each is compiled with all of it"


def test_searches_are_compiled_for_the_arrays_of_a_batch() -> None:
    state = BatchState((), 4, 64, 1, 10)
    handle, active, finished = map(typeof, (state.handle, state.batch.active, state.batch.finished))
    for name in ("exact", "code scan", "rabitq"):
        assert INNER[name][1] == (handle, active, finished)
    batch, slot = INNER["distances"][1][0], active.dtype
    assert batch.types[4:] == tuple(map(typeof, state.batch.arrays))
    assert INNER["merge"][1] == INNER["scan"][1] == (batch, active, finished)
    assert INNER["results"][1] == (batch, slot, typeof(state.batch.nodes[0]), typeof(state.batch.found[0]))
    assert INNER["query"][1][-1] == typeof(state.batch.queries[0])
    for name in ("rabitq's start", "rabitq's end"):
        assert INNER[name][1] == (handle, active.dtype)


def test_python_calls_no_function_with_other_types_than_its_parts_are_compiled_for(make_pool: MakePool) -> None:
    make_pool().step()
    for called in CALLED.values():
        for function, types in called:
            assert function.signatures == [types], function.py_func.__name__


def test_no_process_is_started_where_the_loop_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("runtime.pool.loop_parts.subprocess.Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(loop_parts, "is_cached", lambda: True)
    with compiled_in_background():
        assert not started


def test_the_parts_are_divided_among_processes_on_all_cores_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Child:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command[3:])

        def wait(self) -> None:
            pass

        kill = wait

    monkeypatch.setattr("runtime.pool.loop_parts.subprocess.Popen", Child)
    monkeypatch.setattr(loop_parts, "is_cached", lambda: False)
    pinned: list[set[int]] = []
    monkeypatch.setattr("runtime.pool.loop_parts.os.sched_setaffinity", lambda _, cores: pinned.append(set(cores)))
    with compiled_in_background(cores=range(3)):
        pass
    assert pinned == [{0, 1, 2}, os.sched_getaffinity(0)]
    assert len(started) == 2
    assert sorted(name for share in started for name in share) == sorted(PARTS)
    started.clear()
    with compiled_in_background("cuda:0", cores=range(16)):
        pass
    loop = ["admit", "control", "extend", "receive", "run", "schedule", "serve"]
    assert sorted(started) == [[name] for name in loop], "no part of the CPU's engine"
