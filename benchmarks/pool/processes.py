"""The processes of the pool's benchmarks: pools without the rest of a node, and the bare engine.

Pools are real pool processes over one collection, each pinned to the first core; the clients' process (`clients.py`)
is pinned to the last. Those compared (ours, one FIFO queue, static batches) are the same loop and engine with another
`pool.policy`. What is not told otherwise is configured as it ships, but that checksums are compared before a pool is
ready. A pool stands still while another is asked: it would wake ten times a second for Python's turn on the same core.

They go before other processes, where that is allowed. What is measured nevertheless while others had their cores for
more than `_MOST_LOST` of the time is measured again, at most `_TRIES` times in all, and the try that lost least counts.
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
from benchmarks.pool.clients import Kind, Load, Outcome, Vectors, client_main
from benchmarks.pool.wake import wake_main
from gpu.cpu.engine import CpuEngine
from ipc import MemoryReference
from runtime.node.config import parse_config
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import Counter
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from runtime.pool.process import Pool
from runtime.pool.sizing import fewest_slots, measure
from runtime.retrieval.collections.collection import Collection
from runtime.testing.worker import make_worker

_context = multiprocessing.get_context("spawn")
POOLS = ("trinity", "fifo", "static")
IDLE_PER_S = 20.0  # queries, when the pool is to sleep before each
STATIC_SLOTS = 32  # of a static batch
_STEPWISE_SLOTS = 32  # at most, of the engine alone
_MOST_LOST, _TRIES = 0.005, 3
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


def _engine_main(collection: Path, queries: Vectors, usual: Kind, seed: int, core: int, pipe: Connection) -> None:
    """The engine by itself, on one thread: queries run to completion, and stepwise, slots filled as they come free.

    Queries in a random order, as the clients ask: neighbours in a file are often about the same, and find in the caches
    what the one before has read.
    """
    _pin(core)
    index = Collection.open(collection).index
    _, k, top_m, width = usual
    asked = np.random.default_rng(seed).permutation(queries)
    largest = CpuEngine({"docs": index}, slots=_STEPWISE_SLOTS, max_top_m=top_m, max_search_width=width)
    slots = fewest_slots(measure(largest.backend(), index.data, 0, top_m, width, _STEPWISE_SLOTS))
    engine = Stepwise(index, slots, top_m, width)

    def to_completion(part: Vectors) -> None:
        index.search(part, k, top_m=top_m, search_width=width)

    def stepwise(part: Vectors) -> None:
        engine.search(part, k, top_m, width)

    for way in (to_completion, stepwise):
        way(asked[:8])  # compiles
    gc.freeze()
    pipe.send(os.getpid())
    while (seconds := pipe.recv()) is not None:
        done, taken = [0, 0], [0.0, 0.0]
        end = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end:
            first = done[0] % max(len(asked) - 512, 1)
            for number, way in enumerate((to_completion, stepwise)):  # in turns: a neighbour's noise is shared
                begin = time.process_time()
                way(asked[first : first + 512])
                taken[number] += time.process_time() - begin
                done[number] += len(asked[first : first + 512])
        pipe.send((done[0] / taken[0], done[1] / taken[1]))


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, for `clock_gettime` (Linux's MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


def _pin(core: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {core})


def _first(target: Callable[..., None], *args: Any) -> None:
    raise_priority()
    target(*args)


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """A child that is told to end (by anything in its pipe, None for loops that take orders), and joined."""
    here, there = _context.Pipe()
    child = _context.Process(target=_first, args=(target, *args, there), daemon=True)
    child.start()
    there.close()  # the child has it: once that has died, `recv` raises EOFError and nobody waits
    try:
        yield here
        with suppress(BrokenPipeError):
            here.send(None)
        child.join(timeout=30)
    finally:
        child.kill()
        child.join()


class Bench:
    """Pools by name, clients and the bare engine, all started once.

    `cpu` is the share of its core that the pool had in the last `ask`, `counted` what it counted meanwhile. `again`:
    what was measured again; `lost`: the largest share of its time that anything that counts had lost to others.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        collection: Path,
        queries: Vectors,
        stack: ExitStack,
        pools: tuple[str, ...] = POOLS,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.cpu, self.counted = 0.0, dict[Counter, float]()
        self.again, self.lost = 0, 0.0
        pool_core, client_core = cores[0], cores[-1]
        self.usual = (1.0, 10, options.top_m, options.search_width)
        self._endpoints: dict[str, str] = {}
        self._pools: dict[str, Connection] = {}
        self._pids: dict[str, int] = {}
        self._tables: dict[str, WorkerTable] = {}
        for name in pools:
            slots = STATIC_SLOTS if name == "static" else options.slots
            settings = {"policy": name} | ({"slots": slots} if slots else {})
            docs = {"name": "docs", "path": str(collection), "verify": "start"}
            plan = lay_out(parse_config({"pool": settings, "collections": [docs]}))
            self._tables[name] = WorkerTable.create("pool", "pool-0", plan.config.slo)
            stack.callback(self._tables[name].close)
            pipe = stack.enter_context(process(_pool_main, plan, self._tables[name].reference, pool_core))
            self._pools[name], self._pids[name] = pipe, pipe.recv()
            self._endpoints[name] = plan.endpoint("pool-0")
        self._clients = stack.enter_context(process(client_main, queries, client_core))
        self._pids["clients"] = self._clients.recv()
        self._engine = stack.enter_context(
            process(_engine_main, collection, queries, self.usual, options.seed, pool_core)
        )
        self._pids["engine"] = self._engine.recv()
        self._wake = stack.enter_context(process(wake_main, IDLE_PER_S, options.seconds, pool_core, client_core))
        self._wake.recv()

    def wake_us(self) -> float:
        """What waking a process takes on these cores, without anything of ours (`benchmarks/pool/wake.py`)."""
        self._wake.send("go")
        return float(self._wake.recv())

    def engine(self, seconds: float) -> tuple[float, float]:
        """Queries a CPU second of the engine alone, for so long: run to completion, and stepwise."""

        def run() -> tuple[float, float]:
            self._engine.send(seconds)
            to_completion, stepwise = self._engine.recv()
            return to_completion, stepwise

        return self._undisturbed(run, "engine")

    def _undisturbed(self, run: Callable[[], T], *processes: str, most: float = _MOST_LOST, tries: int = _TRIES) -> T:
        """What `run` finds in the try in which the processes lost least of their time to others."""
        tried = run_undisturbed(run, [self._pids[name] for name in processes], most=most, tries=tries)
        self.again, self.lost = self.again + tried.tries - 1, max(self.lost, tried.stolen_share)
        return tried.result

    def counters(self, pool: str) -> dict[Counter, float]:
        """What the pool has counted so far."""
        table = self._tables[pool]
        return {metric: table.value(metric) for metric in table.metrics if isinstance(metric, Counter)}

    def ask(self, pool: str, *loads: Load, most: float = _MOST_LOST, tries: int = _TRIES) -> list[Outcome]:
        """Clients ask a pool at the same time, one for each load."""
        outcomes, self.cpu, self.counted = self._undisturbed(
            lambda: self._ask(pool, loads), pool, "clients", most=most, tries=tries
        )
        return outcomes

    def _ask(self, pool: str, loads: Sequence[Load]) -> tuple[list[Outcome], float, dict[Counter, float]]:
        counted = self.counters(pool)
        self._pools[pool].send("serve")
        begin = time.monotonic_ns() + 200_000_000
        end = begin + int(loads[0].seconds * 1e9)
        self._clients.send((self._endpoints[pool], loads, begin))
        clock, times = _cpu_clock(self._pids[pool]), []
        for until in (begin, end):
            time.sleep(max(0, until - time.monotonic_ns()) / 1e9)
            times.append((time.monotonic_ns(), time.clock_gettime_ns(clock)))
        cpu = (times[1][1] - times[0][1]) / (times[1][0] - times[0][0])
        outcomes: list[Outcome] = self._clients.recv()
        self._pools[pool].send("rest")
        self._pools[pool].recv()
        return outcomes, cpu, {counter: after - counted[counter] for counter, after in self.counters(pool).items()}
