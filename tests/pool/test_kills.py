"""Tests with SIGKILL of clients and pools at random moments: every query ends once, and no resources leak.

Pools, with their real engine, and killed clients run in their own processes.
"""

import gc
import multiprocessing.forkserver
import os
import random
import re
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from gpu import GraphIndex
from ipc import SearchSpec
from runtime.errors import TrinityError, WorkerLost
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.pool.process import Pool
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from runtime.testing.worker import make_worker
from tests.ipc.leaks import settled
from tests.ipc.processes import child
from tests.pool.client_helpers import Vectors, attached
from tests.pool.conftest import MakeClient, MakePool

CLIENT_ROUNDS = 5
POOL_ROUNDS = 4


@pytest.fixture(scope="module", autouse=True)
def _forkserver_is_running() -> None:
    """Start the fork server first: it keeps descriptors open, which leak checks must not count."""
    multiprocessing.forkserver.ensure_running()


def _flood(endpoint: str) -> None:
    """Run a client that submits, cancels and reads as fast as it can, forever."""
    rng = random.Random(os.getpid())
    vectors = np.random.default_rng(os.getpid()).normal(size=(16, 16)).astype(np.float32)
    with SearchClient([endpoint], "flood") as client:
        while True:
            try:
                ticket = client.submit(vectors[rng.randrange(16)], 3, collection="docs", stage="decode")
                if rng.random() < 0.2:
                    client.cancel(ticket)
                if rng.random() < 0.05:
                    client.search_batch(vectors, 3)
            except TrinityError:
                client.sleep((), 1)
            client.poll()


def taken_slots(pool: Pool, free_when_idle: int) -> int:
    """Return the number of engine slots not released, and of requests without an end."""
    outstanding = sum(client.outstanding for client in pool.server.client_table.clients if client is not None)
    return free_when_idle - pool.engine.free_slots + outstanding


def test_clients_killed_at_any_moment_leave_no_slot_occupied(make_pool: MakePool, queries: Vectors) -> None:
    rng = random.Random(3)
    made = make_pool(slots=4, ring_slots=16)
    steady = made.attach()
    free = made.engine.free_slots
    # The collection's files are open until then.
    until(lambda: made.metric(PoolMetrics.CHECKSUMS) == 1 and not made.table.note, made.step)
    before = descriptors()
    for _ in range(CLIENT_ROUNDS):
        received = made.metric(PoolMetrics.QUERIES["decode"]) + rng.randrange(40)
        with child(_flood, made.endpoint) as process:
            until(lambda: made.metric(PoolMetrics.QUERIES["decode"]) > received, made.step)  # noqa: B023
            process.kill()
            until(lambda: made.server.client_count == 1 and not made.pool.busy, made.step)
        assert taken_slots(made.pool, free) == 0
        steady.submit(queries[0], SearchSpec("docs", 1, "prefill"))
        until(lambda: bool(steady.attachment.results.ready(1)), made.step)
        assert [result.status for result in steady.poll()] == ["ok"]
    until(lambda: descriptors() == before, made.step)
    steady.close()


def _serve(plan: NodePlan, name: str, epoch: int) -> None:
    pool = Pool(make_worker(plan, name, epoch))
    while True:
        pool.step()


class Killable:
    """The pools of a plan, each in its own process; `kill` sends one SIGKILL."""

    def __init__(self, plan: NodePlan, undo: ExitStack) -> None:
        self.plan, self._epoch = plan, 0
        self.pids: list[int | None] = []
        self._lives = {worker.name: undo.enter_context(ExitStack()) for worker in plan.of_role("pool")}
        for name in self._lives:
            self.start(name)

    def start(self, name: str) -> None:
        self._epoch += 1
        process = self._lives[name].enter_context(child(_serve, self.plan, name, self._epoch))
        self.pids.append(process.pid)

    def kill(self, name: str) -> None:
        self._lives[name].close()  # `child` kills the process and waits for its end


@pytest.mark.parametrize(("shards", "workers"), [(1, 2), (2, 2)], ids=["replicas", "shards"])
def test_every_query_ends_exactly_once_when_pools_are_killed_at_any_moment(
    collection: Path,
    split: Path,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
    shards: int,
    workers: int,
) -> None:
    rng = random.Random(4)
    plan = plan_of(split if shards == 2 else collection, shards=shards, workers=workers, ring_slots=32)
    expected = index.search(queries, 3, top_m=200)[0].tolist()
    ends: Counter[int] = Counter()
    query_of: dict[int, int] = {}
    whole = 0
    with ExitStack() as undo:
        pools = Killable(plan, undo)
        client = attached(make_client(plan))
        before = descriptors()

        def read() -> None:
            nonlocal whole
            for result in client.poll():
                ends[result.ticket] += 1
                if result.error is None:
                    assert result.ids.tolist() == expected[query_of[result.ticket]]
                    whole += 1
                else:
                    assert isinstance(result.error, WorkerLost)
                    assert len(result.ids) == 0
            client.sleep((), 1)

        for _ in range(POOL_ROUNDS):
            more = rng.randrange(1, 30)
            while more:
                number = rng.randrange(len(queries))
                try:
                    query_of[client.submit(queries[number], 3, collection="docs", top_m=200)] = number
                    more -= 1
                except TrinityError:
                    read()
            for _ in range(rng.randrange(3)):
                read()
            victim = f"pool-{rng.randrange(workers)}"
            pools.kill(victim)
            pools.start(victim)
            batch = client.search_batch(queries[:8], 3, top_m=200, deadline_ms=60_000)
            assert batch.checked().ids.tolist() == expected[:8]
        until(lambda: len(ends) == len(query_of), read)
        assert ends == Counter(dict.fromkeys(query_of, 1))
        assert whole > len(query_of) / 2
        attached(client)
        assert all(pool.outstanding == 0 for pool in client.statistics().pools)
        until(lambda: descriptors() == before)
    assert not any(psutil.pid_exists(pid) for pid in pools.pids if pid)


def descriptors() -> Counter[str]:
    """Return this process's open descriptors by type. ZeroMQ's threads close theirs later: compare with a timeout."""
    gc.collect()
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return found


def test_nothing_stays_mapped_after_close(collection: Path, queries: Vectors) -> None:
    plan = plan_of(collection)

    def session() -> None:
        with ExitStack() as undo:
            Killable(plan, undo)
            with SearchClient.of_plan(plan, "test") as client:
                attached(client)
                assert len(client.search(queries[0], 3).ids) == 3

    session()
    before = settled()
    session()
    assert settled() == before
