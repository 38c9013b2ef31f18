"""Performance bars of the policy on a virtual clock with a CPU's costs: those of `benchmarks.pool` without noise.

Every comparison is paired: the same queries arrive at the same times.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.simulator.times.service import ServiceTimes
from tests.pool.standalone_pool import Query, run_pool

CPU = ServiceTimes(extend_s=0.3e-6, extend_slot_s=4.5e-6, round_s=0.5e-6, query_s=2e-6)
SLOWER_CALLS = msgspec.structs.replace(CPU, extend_s=2.5e-6)
SMALL, USUAL, LARGE = 64, 128, 512  # top_m
EXTENDS = {SMALL: 19, USUAL: 35, LARGE: 130}  # as for MiniLM's 70,639 vectors
ONLY_USUAL, MIXED = {USUAL: 1.0}, {SMALL: 0.9, LARGE: 0.1}
SEEDS = range(2)
STATIC_SLOTS = 32
PLACES: dict[str, Any] = {"queue": 341}  # of which decode may use 256, as many as its clients' rings hold


class Answer(NamedTuple):
    end_ns: int
    latency_ns: int
    stage: Stage
    top_m: int


def arrivals(rate: float, seconds: float, stage: Stage, kinds: dict[int, float], seed: int) -> list[Query]:
    """Return queries at random times, `rate` per second, with values of top_m in these proportions."""
    random, at_s, found = Random(seed), 0.0, []
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        found.append(Query(int(at_s * 1e9), stage, EXTENDS[kind] + random.randint(-2, 3), kind))
    return found


def serve(queries: Sequence[Query], times: ServiceTimes, **policy: Any) -> list[Answer]:
    """Return answers by time."""
    fates = run_pool(queries, times, NodeConfig(), **policy)
    return sorted(
        Answer(query.at_ns + fate.latency_ns, fate.latency_ns, query.stage, query.top_m)
        for query, fate in zip(queries, fates, strict=True)
        if fate.status == "ok"
    )


def serve_in_batches(queries: Sequence[Query], times: ServiceTimes) -> list[Answer]:
    """Return the answers of static batches: all that wait start together, and are answered together."""
    answers: list[Answer] = []
    end_ns, waiting = 0, deque(queries)
    while waiting:
        begin_ns = max(end_ns, waiting[0].at_ns)
        batch: list[Query] = []
        while waiting and len(batch) < STATIC_SLOTS and waiting[0].at_ns <= begin_ns:
            batch.append(waiting.popleft())
        left = [sum(query.extends > done for query in batch) for done in range(max(query.extends for query in batch))]
        took_s = sum(times.extend_time_s(active) + times.round_s for active in left) + len(batch) * times.query_s
        end_ns = begin_ns + round(took_s * 1e9)
        answers += [Answer(end_ns, end_ns - query.at_ns, query.stage, query.top_m) for query in batch]
    return answers


def p99(answers: list[Answer], top_m: int = USUAL, stage: Stage = "decode") -> float:
    return float(np.percentile([one.latency_ns for one in answers if (one.top_m, one.stage) == (top_m, stage)], 99))


@cache
def capacity(times: ServiceTimes, *, in_batches: bool = False) -> float:
    """Return answers per second if all queries arrive at the start."""
    kinds = MIXED if in_batches else ONLY_USUAL
    together = [replace(query, at_ns=0) for query in arrivals(3000, 0.5, "decode", kinds, 9)]
    answers = serve_in_batches(together, times) if in_batches else serve(together, times)
    return len(answers) / answers[-1].end_ns * 1e9


@pytest.mark.parametrize(("times", "load"), [(CPU, 0.8), (SLOWER_CALLS, 0.65)], ids=["cpu", "slower-calls"])
def test_small_queries_among_large_ones_are_three_times_faster_than_with_static_batches(
    times: ServiceTimes, load: float
) -> None:
    ours: dict[int, list[float]] = {SMALL: [], LARGE: []}
    static: dict[int, list[float]] = {SMALL: [], LARGE: []}
    for seed in SEEDS:
        queries = arrivals(load * capacity(times, in_batches=True), 2.0, "decode", MIXED, seed)
        found, batches = serve(queries, times), serve_in_batches(queries, times)
        for top_m in (SMALL, LARGE):
            ours[top_m].append(p99(found, top_m))
            static[top_m].append(p99(batches, top_m))
    assert fmean(static[SMALL]) >= 3.0 * fmean(ours[SMALL])
    assert fmean(ours[LARGE]) <= (1.5 if load < 0.8 else 1.6) * fmean(static[LARGE])


@pytest.mark.parametrize(
    ("times", "most", "least"), [(CPU, 1.25, 0.95), (SLOWER_CALLS, 2.5, 0.98)], ids=["cpu", "slower-calls"]
)
def test_under_a_decode_flood_prefill_latency_and_decode_throughput_stay_within_bounds(
    times: ServiceTimes, most: float, least: float
) -> None:
    seconds, end = 1.5, 1_500_000_000
    usual = capacity(times)
    slower, share = [], []
    for seed in SEEDS:
        prefill = arrivals(0.15 * usual, seconds, "prefill", ONLY_USUAL, seed)
        flood = arrivals(2.0 * usual, seconds, "decode", ONLY_USUAL, 100 + seed)
        alone = serve(prefill, times)
        only = [one for one in serve(flood, times, **PLACES) if one.end_ns <= end]
        both = sorted([*prefill, *flood], key=lambda query: query.at_ns)
        answers = [one for one in serve(both, times, **PLACES) if one.end_ns <= end]
        served = {stage: sum(one.stage == stage for one in answers) for stage in ("prefill", "decode")}
        slower.append(p99(answers, USUAL, "prefill") / p99(alone, USUAL, "prefill"))
        share.append(served["decode"] / (len(only) - served["prefill"]))
    assert fmean(slower) <= most
    assert fmean(share) >= least
