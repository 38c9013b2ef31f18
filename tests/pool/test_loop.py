"""Tests of the compiled loop on a virtual clock: which queries join which extend, and its metrics."""

import contextlib
import itertools
import select
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq
from numba import njit

from ipc.endpoints import connect
from ipc.native.records import array_from
from runtime.node.config import NodeConfig
from runtime.node.metrics.kinds import Histogram, Metric
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool.loop import run_loop
from runtime.pool.loop_driver import SERVER_EVENT
from runtime.pool.settings import Policy, policy_of
from tests.pool.standalone_pool import Query
from tests.pool.virtual_engine import VirtualPool

FIXED, EACH = 500, 4_500
MakeVirtual = Callable[..., VirtualPool]


@pytest.fixture
def virtual() -> Iterator[MakeVirtual]:
    made: list[VirtualPool] = []

    def make(queries: Sequence[Query], policy: Policy | None = None) -> VirtualPool:
        made.append(VirtualPool(queries, policy or policy_of(NodeConfig(), 2), fixed=FIXED, each=EACH))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def counted(pool: VirtualPool, metric: Metric) -> float:
    *counts, last = pool.table.read(metric)
    return sum(counts) if isinstance(metric, Histogram) else last


def test_an_arrival_joins_the_next_extend_if_a_slot_is_free(virtual: MakeVirtual) -> None:
    pool = virtual([Query(0, "decode", 40), Query(12_000, "decode", 10)])
    pool.run()
    assert pool.engine.batches[:4] == [
        [0],
        [0],
        [0],
        [0, 1],
    ]  # it arrived in the third extend, which ended at 15,000


def test_with_defaults_a_prefill_query_joins_the_next_extend_even_in_a_backlog(virtual: MakeVirtual) -> None:
    backlog = [Query(0, "decode", 40) for _ in range(30)]
    pool = virtual([*backlog, Query(1_000_000, "prefill", 10), Query(1_200_000, "prefill", 10)])
    pool.run()
    batches = pool.engine.batches
    took = 2 * EACH + FIXED
    assert all(len(batch) == 2 for batch in batches[: 1_000_000 // took])
    first = next(number for number, batch in enumerate(batches) if 30 in batch)
    assert first == -(-1_000_000 // took)
    assert all(30 in batch and len(batch) == 2 for batch in batches[first : first + 10])
    assert sorted(batches[first + 10]) == sorted(batches[first - 1]), "the paused query resumes"


def test_every_query_ends_once_under_preemption(virtual: MakeVirtual) -> None:
    queries = [Query(100_000 * n, "decode" if n % 6 else "prefill", 5 + 7 * (n % 11)) for n in range(200)]
    pool = virtual(queries)
    fates = pool.run()
    assert all(fate.latency_ns >= query.extends * (FIXED + EACH) for fate, query in zip(fates, queries, strict=True))
    assert sum(map(len, pool.engine.batches)) == sum(query.extends for query in queries)
    assert counted(pool, PoolMetrics.PREEMPTIONS) > 0
    assert not pool.loop.busy


def test_the_loop_counts_extends_and_their_time(virtual: MakeVirtual) -> None:
    queries = [Query(20_000 * n, "decode", 3 + n % 4) for n in range(50)]
    pool = virtual(queries)
    pool.run()
    extends, steps = counted(pool, PoolMetrics.EXTENDS), counted(pool, PoolMetrics.SLOT_STEPS)
    assert extends == len(pool.engine.batches)
    assert steps == sum(query.extends for query in queries)
    assert counted(pool, PoolMetrics.EXTEND_SECONDS) == pytest.approx((extends * FIXED + steps * EACH) / 1e9)
    assert counted(pool, PoolMetrics.QUERIES["decode"]) == counted(pool, PoolMetrics.LATENCY) == 50


def test_a_busy_pool_still_accepts_sessions(virtual: MakeVirtual) -> None:
    pool = virtual([Query(0, "decode", 1 << 40)])
    pool.loop.memory.clock = array_from(int, 0)  # the machine's clock, which paces its polls
    pool.engine.arrive()
    extends = itertools.count()

    def starved() -> None:
        assert next(extends) < 500_000, "sessions were not polled"

    pool.engine.arrive = starved
    with contextlib.closing(connect(zmq.DEALER, pool.server.endpoint, max_message_bytes=1 << 20)) as stranger:
        stranger.send(b"nonsense")
        assert select.select([pool.server.fileno()], [], [], 60)[0]
        assert pool.loop.serve(time.monotonic_ns() + 3600 * 10**9) == SERVER_EVENT
    assert pool.loop.busy


def test_the_compiled_loop_does_no_reference_counting_of_its_arrays() -> None:
    options = {name: value for name, value in run_loop.targetoptions.items() if name != "nopython"}
    loop = njit(**options)(run_loop.py_func)  # not from the cache, which stores no assembly
    loop.compile("int64(int64, int64, int64)")
    (assembly,) = loop.inspect_asm().values()
    assert "policy" in assembly
    assert "NRT_" not in assembly
