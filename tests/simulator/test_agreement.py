"""Tests that the simulated pool agrees with the real loop: same queries and extend costs on a virtual clock."""

from contextlib import closing
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.pool.settings import policy_of
from runtime.simulator.stages.pool import slots_of
from runtime.simulator.times.service import ServiceTimes
from tests.pool.standalone_pool import Query, QueryOutcome, run_pool
from tests.pool.virtual_engine import VirtualPool

FIXED_NS, EACH_NS, QUERY_NS = 10_000, 60_000, 5_000
TIMES = ServiceTimes(extend_s=FIXED_NS / 1e9, extend_slot_s=EACH_NS / 1e9, query_s=QUERY_NS / 1e9)


def real_loop(queries: list[Query], config: NodeConfig) -> list[QueryOutcome]:
    policy = policy_of(config, slots_of(config.pool, TIMES))
    with closing(VirtualPool(queries, policy, fixed=FIXED_NS, each=EACH_NS, query=QUERY_NS)) as pool:
        return pool.run()


def arrivals(load: float, count: int = 2500) -> list[Query]:
    """Return arrivals, 30% of them prefill; at load 1 the pool is almost saturated."""
    random, at, found = Random(3), 0.0, []
    query_ns = 34 * (EACH_NS + FIXED_NS / 4) + QUERY_NS
    for _ in range(count):
        at += random.expovariate(load / query_ns)
        stage: Stage = "prefill" if random.random() < 0.3 else "decode"
        found.append(Query(int(at), stage, 32 + random.randint(1, 3)))
    return found


@pytest.mark.parametrize("load", [0.4, 0.6, 0.8])
def test_waits_and_latencies_of_both_stages_agree_with_the_real_loop(load: float) -> None:
    config = NodeConfig()
    queries = arrivals(load)
    simulated, real = run_pool(queries, TIMES, config), real_loop(queries, config)
    for stage in ("prefill", "decode"):
        for value in ("wait_ns", "latency_ns"):
            ours, theirs = (
                np.array([getattr(fate, value) for fate in fates if fate.stage == stage]) for fates in (simulated, real)
            )
            slack = 0.03 * fmean(fate.latency_ns for fate in real if fate.stage == stage)
            assert ours.mean() == pytest.approx(theirs.mean(), rel=0.1, abs=slack)
            for percent in (50, 95):
                assert quantile(ours, percent) == pytest.approx(quantile(theirs, percent), rel=0.1, abs=slack)


def quantile(values: Any, percent: float) -> float:
    return float(np.percentile(values, percent))
