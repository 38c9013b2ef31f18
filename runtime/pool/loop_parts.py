"""Compilation of the pool's loop in parallel, where its machine code is not cached yet.

The loop takes longer to compile than the engine. Its parts are compiled by processes of their own, which leave the code
in the cache, while the pool's process compiles the engine:

    pool     engine ────────────────────▶ the rest of the loop
    parts    search ─▶ schedule ─▶ … ─▶ cache

`python -m runtime.pool.loop_parts NAME …` compiles these parts.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence

from numba import int64

from gpu.cpu import running_batch
from ipc.native.records import numba_type
from ipc.ring.exchange import ClientTable
from runtime.pool import loop, loop_driver, policy
from runtime.pool.loop_layout import Loop
from runtime.pool.tables import Tables

_LOOP, _CLIENTS = numba_type(Loop), numba_type(ClientTable)

PARTS = {
    "search": (running_batch.extend_active, (int64[:, ::1], int64)),
    "schedule": (policy.schedule, (numba_type(Tables), int64)),
    "receive": (loop.receive, (_LOOP, _CLIENTS)),
    "admit": (loop.apply_schedule, (_LOOP, _CLIENTS, int64)),
    "extend": (loop.extend, (_LOOP, _CLIENTS)),
}
"""Name → a function and the types with which compiled code calls it. `search` is of the CPU engine, which is compiled
meanwhile, and reaches it last."""


def compile_parts(names: Sequence[str]) -> None:
    """Compile these parts, or find them in the cache."""
    for name in names:
        function, arguments = PARTS[name]
        function.compile_inner(*arguments)


def is_cached() -> bool:
    """Whether the whole loop is in the cache."""
    return bool(loop_driver.serve_loop.is_cached(int64, int64, int64))


@contextlib.contextmanager
def compiled_in_background(device: str = "cpu", cores: Collection[int] | None = None) -> Iterator[None]:
    """Compile the parts in processes of their own during the block, and wait for them at its end.

    Does nothing where the loop is cached. `device`: that of the engine which the block compiles. `cores`: those to use,
    by default the parent process's, because a pool worker may have a single one; one is left to this process.
    """
    cores = _cores_of_parent() if cores is None else cores
    names = [name for name in PARTS if name != "search" or (device == "cpu" and len(cores) > 2)]
    count = min(len(cores) - 1, len(names))
    shares = [] if is_cached() else [names[first::count] for first in range(count)]
    if not shares:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # of this thread, which the new processes inherit
    try:
        children = [
            subprocess.Popen([sys.executable, "-m", "runtime.pool.loop_parts", *share], stdin=subprocess.DEVNULL)
            for share in shares
        ]
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield
        for child in children:
            child.wait()  # one that failed has said why, and this process compiles what it has not
    finally:
        for child in children:
            child.kill()
            child.wait()


def _cores_of_parent() -> set[int]:
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        return os.sched_getaffinity(0)


if __name__ == "__main__":
    compile_parts(sys.argv[1:])
