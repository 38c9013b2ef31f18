"""Processes of the pool benchmarks: pools without the rest of a node, clients, and the bare engine.

The pool is a real pool process, pinned to the first core; the clients' process (`clients.py`) is pinned to the last.
The configuration is the default, except that checksums are verified before the pool is ready. The pool is stopped while
something else is measured: its control work would wake it ten times a second on the same core.

The processes get a higher priority where permitted. A run in which other processes had their cores for more than
`_MAX_LOST` of the time is repeated, at most `_TRIES` times in all, and the run that lost least counts.
"""

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.common.cores import raise_priority, run_undisturbed
from benchmarks.common.stepwise import Stepwise
from benchmarks.pool.clients import Load, Outcome, QueryClass, Vectors, clients_main
from benchmarks.pool.wake_up import wake_up_main
from gpu.cpu.engine import CpuEngine
from ipc import MemoryReference
from runtime.node.config import parse_config
from runtime.node.metrics.kinds import Counter
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from runtime.pool.process import Pool
from runtime.pool.sizing import fewest_slots, measure
from runtime.retrieval.collections.reader import CollectionReader
from runtime.testing.worker import make_worker

_context = multiprocessing.get_context("spawn")
IDLE_PER_S = 20.0  # queries per second, few enough that the pool sleeps before each
_STEPWISE_SLOTS = 32  # limit for the engine alone
_MAX_LOST, _TRIES = 0.005, 3
T = TypeVar("T")


# ---- processes


def _pool_main(plan: NodePlan, table: MemoryReference, core: int, pipe: Connection) -> None:
    _pin(core)
    pool = Pool(make_worker(plan, "pool-0", table=table))
    gc.collect()
    gc.freeze()
    pipe.send(os.getpid())
    while pipe.recv() is not None:
        while not pipe.poll():
            pool.step()
        pipe.send(pipe.recv())
    pool.close()


def _engine_main(collection: Path, queries: Vectors, usual: QueryClass, seed: int, core: int, pipe: Connection) -> None:
    """Engine process, on one thread: queries run to completion, and stepwise with slots refilled as they become free.

    Queries are in random order, as the clients send them: consecutive ones in a file are often similar, and would find
    in the caches what their predecessors have read.
    """
    _pin(core)
    index = CollectionReader(collection).state.segments[0].index
    _, k, top_m, width = usual
    shuffled = np.random.default_rng(seed).permutation(queries)
    largest = CpuEngine({"docs": index}, slots=_STEPWISE_SLOTS, max_top_m=top_m, max_search_width=width)
    slots = fewest_slots(measure(largest.backend(), index.data, 0, top_m, width, _STEPWISE_SLOTS))
    engine = Stepwise(index, slots, top_m, width)

    def to_completion(part: Vectors) -> None:
        index.search(part, k, top_m=top_m, search_width=width)

    def stepwise(part: Vectors) -> None:
        engine.search(part, k, top_m, width)

    for search in (to_completion, stepwise):
        search(shuffled[:8])  # compiles
    gc.freeze()
    pipe.send(os.getpid())
    while (seconds := pipe.recv()) is not None:
        done, taken = [0, 0], [0.0, 0.0]
        end = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end:
            first = done[0] % max(len(shuffled) - 512, 1)
            for number, search in enumerate((to_completion, stepwise)):  # alternating: both share the machine's noise
                begin = time.process_time()
                search(shuffled[first : first + 512])
                taken[number] += time.process_time() - begin
                done[number] += len(shuffled[first : first + 512])
        pipe.send((done[0] / taken[0], done[1] / taken[1]))


def _cpu_clock(pid: int) -> int:
    """Return the clock id of a process's CPU time (Linux's MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


def _pin(core: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {core})


def _first(target: Callable[..., None], *args: Any) -> None:
    raise_priority()
    target(*args)


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run a child process. It is ended by any message in its pipe (None for loops that take orders), and joined."""
    here, there = _context.Pipe()
    child = _context.Process(target=_first, args=(target, *args, there), daemon=True)
    child.start()
    there.close()  # only the child holds this end: after its death `recv` raises EOFError
    try:
        yield here
        with suppress(BrokenPipeError):
            here.send(None)
        child.join(timeout=30)
    finally:
        child.kill()
        child.join()


class Bench:
    """The pool, clients and the bare engine, all started once.

    `cpu`: the pool's share of its core in the last `run_load`; `counted`: its counters' increase. `retries`: repeated
    runs; `lost`: largest share of time that a counted run lost to other processes.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        collection: Path,
        queries: Vectors,
        stack: ExitStack,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.cpu, self.counted = 0.0, dict[Counter, float]()
        self.retries, self.lost = 0, 0.0
        pool_core, client_core = cores[0], cores[-1]
        self.usual = (1.0, 10, options.top_m, options.search_width)
        settings = {"slots": options.slots} if options.slots else {}
        docs = {"name": "docs", "path": str(collection), "verify": "start"}
        plan = lay_out(parse_config({"pool": settings, "collections": [docs]}))
        self._endpoint = plan.endpoint("pool-0")
        self._table = WorkerTable.create("pool", "pool-0", plan.config.slo)
        stack.callback(self._table.close)
        self._pool = stack.enter_context(process(_pool_main, plan, self._table.reference, pool_core))
        self._pids = {"pool": self._pool.recv()}
        self._clients = stack.enter_context(process(clients_main, queries, client_core))
        self._pids["clients"] = self._clients.recv()
        self._engine = stack.enter_context(
            process(_engine_main, collection, queries, self.usual, options.seed, pool_core)
        )
        self._pids["engine"] = self._engine.recv()
        self._wake = stack.enter_context(process(wake_up_main, IDLE_PER_S, options.seconds, pool_core, client_core))
        self._wake.recv()

    def wake_up_us(self) -> float:
        """Measure the wake-up of a process on these cores without Trinity (`benchmarks/pool/wake_up.py`)."""
        self._wake.send("go")
        return float(self._wake.recv())

    def engine(self, seconds: float) -> tuple[float, float]:
        """Return queries per CPU second of the engine alone: run to completion, and stepwise."""

        def run() -> tuple[float, float]:
            self._engine.send(seconds)
            to_completion, stepwise = self._engine.recv()
            return to_completion, stepwise

        return self._undisturbed(run, "engine")

    def _undisturbed(self, run: Callable[[], T], *processes: str) -> T:
        """Return the result of the run in which the processes lost least of their time to others."""
        tried = run_undisturbed(run, [self._pids[name] for name in processes], most=_MAX_LOST, tries=_TRIES)
        self.retries, self.lost = self.retries + tried.tries - 1, max(self.lost, tried.stolen_share)
        return tried.result

    def counters(self) -> dict[Counter, float]:
        """Return the pool's counters."""
        table = self._table
        return {metric: table.value(metric) for metric in table.metrics if isinstance(metric, Counter)}

    def run_load(self, *loads: Load) -> list[Outcome]:
        """Run loads against the pool, one client each, at the same time."""
        outcomes, self.cpu, self.counted = self._undisturbed(lambda: self._run_load(loads), "pool", "clients")
        return outcomes

    def _run_load(self, loads: Sequence[Load]) -> tuple[list[Outcome], float, dict[Counter, float]]:
        counted = self.counters()
        self._pool.send("serve")
        begin = time.monotonic_ns() + 200_000_000
        end = begin + int(loads[0].seconds * 1e9)
        self._clients.send((self._endpoint, loads, begin))
        clock, times = _cpu_clock(self._pids["pool"]), []
        for until in (begin, end):
            time.sleep(max(0, until - time.monotonic_ns()) / 1e9)
            times.append((time.monotonic_ns(), time.clock_gettime_ns(clock)))
        cpu = (times[1][1] - times[0][1]) / (times[1][0] - times[0][0])
        outcomes: list[Outcome] = self._clients.recv()
        self._pool.send("rest")
        self._pool.recv()
        return outcomes, cpu, {counter: after - counted[counter] for counter, after in self.counters().items()}
