"""Compilation of the pool's loop and of the CPU engine in parallel, where the machine code is not cached yet.

Parts are compiled by forked processes, which take one after the other from a queue and leave the code in the cache,
while the pool's process compiles the engine and needs them one after the other. It waits for a part that is being
compiled, and compiles itself what nobody has begun (`ipc.native.machine_code`); then it takes parts, too:

    pool     … ─▶ (query) ─▶ admit ─▶ (rabitq, scan, code scan, exact, results) ─▶ the engine's extend ─▶ parts
    parts    distances ─▶ merge ─▶ … ─▶ exact ─▶ … ─▶ receive ─▶ schedule ─▶ … ─▶ the whole loop

The longest chain of functions that call each other ends with the engine's extend, so most parts are below it.
"""

import contextlib
import gc
import os
import signal
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from numba import float32, int32, int64, types, uint8, uint32, uint64
from numba.core.compiler_lock import global_compiler_lock

from gpu.cpu import queries, tables
from gpu.cpu.extend import code_scan, filtered, rabitq, results, stages
from ipc.native.compiled import can_cache
from ipc.native.records import Array, numba_type
from ipc.ring.exchange import ClientTable
from runtime.node.worker import DRAIN_SIGNAL, die_with_parent
from runtime.pool import loop, loop_driver, policy, sizing
from runtime.pool.loop_layout import Loop
from runtime.pool.tables import Tables

_LOOP, _CLIENTS = numba_type(Loop), numba_type(ClientTable)

_HANDLE, _SLOTS = int64[:, ::1], int32[::1]
_BATCH = types.NamedTuple(
    (
        int64, *map(numba_type, (Array[tables.Collection], Array[tables.Encoding], Array[tables.Slot])),
        uint8[:, ::1], uint64[:, ::1], uint32[:, ::1], int64[:, ::1], uint32[::1], float32[::1], _SLOTS, _SLOTS,
        int64[:, ::1], float32[:, ::1], uint64[:, ::1],
    ),
    tables.Batch,
)  # fmt: skip

_SEARCH = {
    "distances": (stages.compute_distances, (_BATCH, _SLOTS)),
    "merge": (stages.merge_top_m, (_BATCH, _SLOTS, _SLOTS)),
    "results": (results.write_result, (_BATCH, int32, int64[::1], float32[::1])),
    "scan": (filtered.extend_scan, (_BATCH, _SLOTS, _SLOTS)),
    "query": (queries.write_query, (float32[::1], numba_type(tables.Encoding), uint8[::1])),
    "exact": (stages.extend_exact, (_HANDLE, _SLOTS, _SLOTS)),
    "code scan": (code_scan.extend_code_scan, (_HANDLE, _SLOTS, _SLOTS)),
    "rabitq's start": (rabitq.start_search, (_HANDLE, int32)),
    "rabitq's end": (rabitq.try_finish, (_HANDLE, int32)),
    "rabitq": (rabitq.extend_rabitq, (_HANDLE, _SLOTS, _SLOTS)),
}
_LOOP_PARTS = {
    "receive": (loop.receive, (_LOOP, _CLIENTS)),
    "extend": (loop.extend, (_LOOP, _CLIENTS)),
    "schedule": (policy.schedule, (numba_type(Tables), int64)),
    "admit": (loop.apply_schedule, (_LOOP, _CLIENTS, int64)),
}
CALLED = {
    function.py_func.__name__: (function, arguments)
    for function, arguments in (sizing.CALLED, *loop_driver.CALLED_RARELY, *loop_driver.CALLED_OFTEN)
}
"""Name → a function that Python calls, and the types of its arguments."""
INNER: dict[str, tuple[Any, tuple[Any, ...]]] = {**_SEARCH, **_LOOP_PARTS}
"""Name → a function and the types with which compiled code calls it."""
PARTS = (*INNER, *CALLED)
"""In the order in which they are begun, callees first."""


def compile_part(name: str) -> None:
    """Compile a part, or find it in the cache."""
    if name in INNER:
        function, arguments = INNER[name]
        function.compile_inner(*arguments)
    else:
        function, arguments = CALLED[name]
        function.compile(arguments)


def is_cached() -> bool:
    """Whether the whole loop is in the cache."""
    return all(function.is_cached(*arguments) for function, arguments in CALLED.values())


@contextlib.contextmanager
def compiled_in_background(device: str = "cpu", cores: Collection[int] | None = None) -> Iterator[None]:
    """Compile the parts in processes of their own during the block, and at its end in this one, too, until all are.

    Does nothing where the loop is cached, or nothing can be. `device`: that of the engine which the block compiles.
    `cores`: those to use, by default the parent process's, because a pool worker may have a single one; one is left to
    this process.
    """
    if is_cached() or not can_cache():
        yield
        return
    cores = _cores_of_parent() if cores is None else cores
    names = [name for name in PARTS if device == "cpu" or name not in _SEARCH]
    queue, end = os.pipe()
    os.write(end, bytes(range(len(names))))
    os.close(end)
    children = [_forked(queue, names, cores) for _ in range(min(len(cores) - 1, len(names)))]
    try:
        yield
        _compile_from(queue, names)
        while children:
            os.waitpid(children[-1], 0)  # one that failed has said why, and this process compiles what it has not
            children.pop()
    finally:
        os.close(queue)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _compile_from(queue: int, names: Sequence[str]) -> None:
    """Compile the parts whose numbers are in a pipe, from which several processes take them."""
    while number := os.read(queue, 1):
        compile_part(names[number[0]])


def _forked(queue: int, names: Sequence[str], cores: Collection[int]) -> int:
    """Return the id of a new process that compiles parts on these cores."""
    parent = os.getpid()
    with global_compiler_lock:  # no other thread compiles, so the process inherits no lock that nobody will release
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        for signum in (signal.SIGTERM, DRAIN_SIGNAL):  # a worker's handlers change its table
            signal.signal(signum, signal.SIG_DFL)
        die_with_parent(parent)
        os.sched_setaffinity(0, cores)
        gc.disable()
        _compile_from(queue, names)
        code = 0
    except BaseException:  # nothing of it may reach the frames of the process that was forked
        traceback.print_exc()
    finally:
        os._exit(code)


def _cores_of_parent() -> set[int]:
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        return os.sched_getaffinity(0)
