"""Calibration of the pool loop's overhead per extend and per query, with a real pool worker queried through its ring.

The extends between loop iterations evict the loop's code and data from the caches, as in production; the loop timed
alone would be faster.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ipc import RingClient, SearchSpec
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import RING_SLOTS, NodePlan
from runtime.node.supervisor.supervised_worker import COMMAND, kill_group, spawn
from runtime.node.worker import WorkerSpec

_ALONE, _FEW, _MANY = 200, 1000, 4000  # queries: sent one, three and many at a time
_WINDOW = 256  # queries in flight of the many
_START_S = 120.0
_SILENT_S = 30.0


class Totals(NamedTuple):
    """Extends of a pool, its queries, and the seconds that its loop took between extends."""

    extends: float
    queries: float
    seconds: float


class LoopTimes(NamedTuple):
    """Seconds of the pool's loop per extend and per query, and the wake-up time of a sleeping loop."""

    round_s: float
    query_s: float
    wake_s: float


def loop_times(config: NodeConfig, queries: NDArray[np.float32]) -> LoopTimes:
    """Measure the pool loop on this machine.

    Sends `queries` [n, dim] for the first collection to the first pool worker of `config`: one at a time, between which
    the loop sleeps; three at a time; and many at once, which share extends. Raises `ConfigError` if the worker fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = replace(config.node, run_dir=folder), replace(config.log, level="warning")
        plan = lay_out(replace(config, model=None, node=quiet[0], log=quiet[1]))
        with _worker(plan) as table, RingClient(plan.endpoint(plan.of_role("pool")[0].name), "calibration") as client:
            waits_ns = _send_queries(client, config, queries, 1, _ALONE)
            begin = _totals(table)
            _send_queries(client, config, queries, 3, _FEW)
            middle = _totals(table)
            _send_queries(client, config, queries, _WINDOW, _MANY)
            end = _totals(table)
    round_s, query_s = solve(_between(begin, middle), _between(middle, end))
    return LoopTimes(round_s, query_s, statistics.median(waits_ns) / 1e9)


def solve(few: Totals, many: Totals) -> tuple[float, float]:
    """Solve seconds = extends · round_s + queries · query_s for two measurements; neither result is negative."""
    determinant = few.extends * many.queries - many.extends * few.queries
    if determinant:
        a_round = (few.seconds * many.queries - many.seconds * few.queries) / determinant
        a_query = (few.extends * many.seconds - many.extends * few.seconds) / determinant
        if a_round >= 0.0 and a_query >= 0.0:
            return a_round, a_query
    return many.seconds / many.extends, 0.0  # the measurements are too similar to separate the costs


def _between(before: Totals, after: Totals) -> Totals:
    return Totals(*(now - then for then, now in zip(before, after, strict=True)))


def _send_queries(
    client: RingClient, config: NodeConfig, queries: NDArray[np.float32], window: int, count: int
) -> list[int]:
    """Send `count` queries, at most `window` in flight. Return their waits from enqueue to slot in ns.

    Raises `ConfigError` if a query fails.
    """
    pool, sent = config.pool, 0
    window = min(window, RING_SLOTS, pool.queue - pool.queue // 4)
    spec = SearchSpec(config.collections[0].name, 1, "decode", pool.top_m, pool.search_width)
    waits: list[int] = []
    until = time.monotonic() + _SILENT_S
    while len(waits) < count:
        while sent < count and sent - len(waits) < window:
            client.submit(queries[sent % len(queries)], spec)
            sent += 1
        results = client.poll()
        for result in results:
            if result.status != "ok":
                raise ConfigError(
                    f"the pool's loop cannot be measured: a query of {window} ended with {result.status!r}"
                )
            waits.append(result.begin_ns - result.enqueue_ns)
        if results:
            until = time.monotonic() + _SILENT_S
        elif not client.wait(100.0) and time.monotonic() > until:
            raise ConfigError(f"the pool's loop cannot be measured: no answer for {_SILENT_S:.0f} s")
    return waits


def _totals(table: WorkerTable) -> Totals:
    """Return the totals so far, after a delay: a query is counted just after its answer."""
    time.sleep(0.01)
    extends, seconds = table.value(PoolMetrics.EXTENDS), table.value(PoolMetrics.LOOP_SECONDS)
    queries = sum(map(table.value, PoolMetrics.QUERIES.values()))
    return Totals(extends, queries, seconds)


@contextmanager
def _worker(plan: NodePlan) -> Iterator[WorkerTable]:
    """Run the first pool worker of a plan without the rest of its node. Yield its table once it is ready."""
    place = plan.of_role("pool")[0]
    table = WorkerTable.create("pool", place.name, plan.config.slo)
    process = spawn(COMMAND, WorkerSpec(plan, place.name, 1, table.reference, os.getpid()), place)
    try:
        until = time.monotonic() + _START_S
        while table.state is not State.READY:
            if process.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"the pool's worker {place.name} did not start, so its loop cannot be measured")
            time.sleep(0.01)
        yield table
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            process.wait()
        table.close()
