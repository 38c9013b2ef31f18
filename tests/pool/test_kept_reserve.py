"""Tests of the reserve of a pool on a GPU: while prefill is present, decode leaves its slots free, used or not."""

import math
from functools import cache
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ipc import Stage
from runtime.node.config import NodeConfig, parse_config
from runtime.node.worker_config import PoolSection
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.times.service import ServiceTimes
from tests.pool.scheduler import Entry, Scheduler
from tests.pool.scheduler_factories import LONG, entry, filled, measured, names, scheduler
from tests.pool.standalone_pool import Query, QueryOutcome, run_pool


def kept(slots: int, reserve: float, **policy: Any) -> Scheduler[int]:
    return scheduler(slots, reserve, keep_reserve=True, **policy)


@given(st.integers(1, 64), st.floats(0.01, 1.0), st.integers(1, 8))
def test_decode_fills_no_more_than_its_share_while_prefill_is_present(slots: int, reserve: float, present: int) -> None:
    made = kept(slots, reserve)
    filled(made, *(entry("prefill", -1 - name) for name in range(present)))
    filled(made, *(entry("decode", name) for name in range(2 * slots)))
    share = max(slots - math.ceil(reserve * slots), 1)
    active: list[Entry[int]] = []
    for now in range(present):
        active += [one for one in made.next(now).admitted if one.stage == "prefill"]
        assert made.running["decode"] == min(share, slots - len(active))
        assert active, "at least one is served"
        made.finished(active.pop(), 10)
    made.next(present)
    assert made.running == {"prefill": 0, "decode": slots}, "decode gets every slot once prefill is gone"


def test_decode_is_not_paused_for_its_share_but_leaves_slots_as_its_queries_finish() -> None:
    decode = [entry("decode", name) for name in range(20)]
    made = filled(kept(8, 0.5), *decode)
    made.next(0)
    made.finished(decode[0], 10)
    filled(made, entry("prefill", 100, arrival=1), now=1)
    changes = made.next(1)
    assert (names(changes.admitted), changes.paused) == ([100], [])
    for number in range(1, 4):
        made.finished(decode[number], 10)
        assert made.next(2).admitted == []
    made.finished(decode[4], 10)
    assert names(made.next(3).admitted) == [8]
    assert made.running == {"prefill": 1, "decode": 4}


def test_a_prefill_query_finds_a_free_slot_and_pauses_no_decode_query_while_another_is_present() -> None:
    made = filled(kept(8, 0.25), entry("prefill", -1), *(entry("decode", name) for name in range(20)))
    made.next(0)
    filled(made, entry("prefill", -2, arrival=1), now=1)
    changes = made.next(1)
    assert (names(changes.admitted), changes.paused) == ([-2], [])


def test_a_change_of_r_takes_effect_at_the_next_schedule() -> None:
    made = filled(kept(10, 0.8), entry("prefill", -1), *(entry("decode", name) for name in range(20)))
    made.next(0)
    assert made.running["decode"] == 2
    made.reserve = 0.3
    made.next(1)
    assert made.running["decode"] == 7


def test_a_paused_query_counts_against_decodes_share_when_it_resumes() -> None:
    made = filled(kept(4, 0.5, prefill_target_ns=0), *(entry("decode", name) for name in range(4)))
    made.next(0)
    urgent = [entry("prefill", 10 + name, arrival=1) for name in range(2)]
    filled(made, *urgent, now=1)
    assert len(made.next(1).paused) == 2
    made.finished(urgent[0], 10)
    assert made.next(2).resumed == []  # two decode queries are active, the share
    made.finished(urgent[1], 10)
    assert len(made.next(3).resumed) == 2


def test_a_short_decode_query_still_preempts_a_long_one_within_the_share() -> None:
    made = measured(kept(4, 0.5), 10, 10)
    filled(made, entry("prefill", -1), *(entry("decode", name, top_m=LONG) for name in range(4)))
    made.next(0)
    filled(made, entry("decode", 10, arrival=1), now=1)
    changes = made.next(1)
    assert (len(changes.paused), names(changes.admitted)) == (1, [10])
    assert made.running == {"prefill": 1, "decode": 2}


def test_prefill_that_yields_keeps_no_slots_free() -> None:
    made = kept(4, 0.5, flush_prefill_ns=100)
    filled(made, *(entry("decode", name) for name in range(8)), entry("prefill", -1, arrival=10), now=10)
    made.next(20)
    assert made.running == {"prefill": 0, "decode": 4}


def test_only_a_pool_on_a_gpu_keeps_the_reserve_free() -> None:
    def keeps(**pool: Any) -> bool:
        config = parse_config({"pool": pool, "collections": [{"name": "docs", "path": "/nowhere"}]})
        return PolicyChoice("configured").rules(config, 8).keep_reserve

    assert not keeps()
    assert keeps(devices=["cuda:0"])


# ---- a flood, with what an H200 was measured to take

EXTENDS = 14  # of a query at recall@10 .95
LAUNCHES = ServiceTimes(extend_s=20e-6, extend_slot_s=0.035e-6, query_s=0.9e-6, round_s=1e-6, ring_s=1e-6)


def arrivals(rate: float, seconds: float, stage: Stage, seed: int) -> list[Query]:
    random, at_s, found = Random(seed), 0.0, []
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        found.append(Query(int(at_s * 1e9), stage, EXTENDS + random.randint(-2, 3)))
    return found


def p99(outcomes: list[QueryOutcome]) -> float:
    """Return prefill's p99."""
    answered = [one.latency_ns for one in outcomes if (one.stage, one.status) == ("prefill", "ok")]
    return float(np.quantile(answered, 0.99))


def served(queries: list[Query], outcomes: list[QueryOutcome], until_ns: float) -> int:
    return sum(
        (one.stage, one.status) == ("decode", "ok") and query.at_ns + one.latency_ns < until_ns
        for query, one in zip(queries, outcomes, strict=True)
    )


@cache
def flood_of_launches(device: str, reserve: float) -> tuple[float, float]:
    """Return prefill's p99 under decode's flood against alone, and decode's share of the capacity that prefill leaves,
    for a pool of 512 slots that takes 490,000 queries/s."""
    capacity, seconds = 490_000.0, 0.1

    def run(queries: list[Query]) -> list[QueryOutcome]:
        pool = PoolSection(devices=(device,), slots=512, queue=2730, reserve=reserve)
        return run_pool(queries, LAUNCHES, NodeConfig(pool=pool))

    prefill = arrivals(0.15 * capacity, seconds, "prefill", 1)
    both = sorted([*prefill, *arrivals(1.5 * capacity, seconds, "decode", 2)], key=lambda query: query.at_ns)
    outcomes = run(both)
    ratio = p99(outcomes) / p99(run(prefill))
    return ratio, served(both, outcomes, seconds * 1e9) / (0.85 * capacity * seconds)


def test_of_launches_a_kept_reserve_trades_decodes_rate_for_prefills_latency() -> None:
    shared, decode = flood_of_launches("cpu", 0.3)
    assert shared > 2.9
    assert decode > 0.98
    usual, decode = flood_of_launches("cuda:0", 0.3)
    assert usual < 0.9 * shared
    assert decode > 0.9
    large, decode = flood_of_launches("cuda:0", 0.6)
    assert large < 2.0
    assert decode > 0.7
