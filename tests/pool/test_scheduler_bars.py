"""What the policy is for, on a virtual clock with a CPU's costs: bars of `benchmarks.pool`, without its noise.

Every comparison is paired: the same queries at the same times.
"""

from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from ipc import Stage
from runtime.node.config import NodeConfig
from runtime.pool.settings import Policy, policy_of
from runtime.pool.sizing import Measured, fewest_slots
from tests.pool.virtual_pool import LARGE, SMALL, USUAL, Answer, Asked, Costs, arrivals, serve

CPU, SLOWER_CALLS = Costs(), Costs(fixed=2_500)
MIXED = {SMALL: 0.9, LARGE: 0.1}
SEEDS = range(3)


def shipped(costs: Costs = CPU, **changes: Any) -> Policy:
    """The defaults, with the slots that "auto" finds at these costs."""
    slots = fewest_slots([Measured(active, costs.fixed + costs.each * active) for active in (1, 2, 4, 8, 16, 32)])
    return replace(policy_of(NodeConfig(), slots), **changes)


STATIC = replace(policy_of(NodeConfig(), 32), rules="static")


def p99(answers: list[Answer], top_m: int = USUAL, stage: Stage = "decode") -> float:
    return float(np.percentile([one.latency_ns for one in answers if (one.top_m, one.stage) == (top_m, stage)], 99))


def full(queries: list[Asked]) -> list[Asked]:
    """The same, all there from the start."""
    return [Asked(0, query.stage, query.top_m, query.extends) for query in queries]


@cache
def static_per_s(costs: Costs) -> float:
    answers = serve(full(arrivals(2500, 1.0, "decode", MIXED, 9)), costs, STATIC)
    return len(answers) / answers[-1].end_ns * 1e9


@pytest.mark.parametrize("costs", [CPU, SLOWER_CALLS], ids=["cpu", "slower-calls"])
@pytest.mark.parametrize("load", [0.65, 0.8])
def test_small_queries_among_large_ones_are_three_times_faster_than_in_static_batches(
    costs: Costs, load: float
) -> None:
    ours: dict[int, list[float]] = {SMALL: [], LARGE: []}
    static: dict[int, list[float]] = {SMALL: [], LARGE: []}
    for seed in SEEDS:
        queries = arrivals(load * static_per_s(costs), 2.0, "decode", MIXED, seed)
        found, batches = serve(queries, costs, shipped(costs)), serve(queries, costs, STATIC)
        for top_m in (SMALL, LARGE):
            ours[top_m].append(p99(found, top_m))
            static[top_m].append(p99(batches, top_m))
    assert fmean(static[SMALL]) >= 3.0 * fmean(ours[SMALL])
    assert fmean(ours[LARGE]) <= (1.5 if load < 0.8 else 1.6) * fmean(static[LARGE])


@pytest.mark.parametrize(
    ("costs", "most", "least"), [(CPU, 1.25, 0.95), (SLOWER_CALLS, 2.5, 0.98)], ids=["cpu", "slower-calls"]
)
def test_under_a_flood_prefill_is_little_slower_than_alone_and_decode_keeps_its_share(
    costs: Costs, most: float, least: float
) -> None:
    seconds, end = 1.5, 1_500_000_000
    kinds, policy = {USUAL: 1.0}, shipped(costs)
    backlog = serve(full(arrivals(4000, 0.5, "decode", kinds, 9)), costs, policy)
    capacity = len(backlog) / backlog[-1].end_ns * 1e9
    slower, share = [], []
    for seed in SEEDS:
        prefill = arrivals(0.15 * capacity, seconds, "prefill", kinds, seed)
        flood = arrivals(2.0 * capacity, seconds, "decode", kinds, 100 + seed)
        alone = serve(prefill, costs, policy)
        only = [one for one in serve(flood, costs, policy, places=256) if one.end_ns <= end]
        both = sorted([*prefill, *flood], key=lambda query: query.at_ns)
        answers = [one for one in serve(both, costs, policy, places=256) if one.end_ns <= end]
        served = {stage: sum(one.stage == stage for one in answers) for stage in ("prefill", "decode")}
        slower.append(p99(answers, USUAL, "prefill") / p99(alone, USUAL, "prefill"))
        share.append(served["decode"] / (len(only) - served["prefill"]))
    assert fmean(slower) <= most
    assert fmean(share) >= least


def test_with_shipped_defaults_a_reserve_of_a_tenth_and_one_of_nine_tenths_differ_under_load() -> None:
    """Prefill wants .3 of the pool and decode more than all of it."""
    waits = {}
    capacity = 1e9 / (_MEAN_EXTENDS * (CPU.each + CPU.fixed / 2))
    for reserve in (0.1, 0.9):
        both = [
            *arrivals(0.3 * capacity, 1.0, "prefill", {USUAL: 1.0}, 1),
            *arrivals(1.5 * capacity, 1.0, "decode", {USUAL: 1.0}, 2),
        ]
        both.sort(key=lambda query: query.at_ns)
        answers = serve(both, CPU, shipped(reserve=reserve), places=256)
        waits[reserve] = p99(answers, USUAL, "prefill")
    assert waits[0.1] > 1.5 * waits[0.9]


_MEAN_EXTENDS = 35.5


def test_in_a_backlog_with_deadlines_nearly_all_answers_are_in_time_for_what_cannot_be_is_refused() -> None:
    limit_ns = 20_000_000
    backlog = serve(full(arrivals(4000, 0.5, "decode", {USUAL: 1.0}, 9)), CPU, shipped())
    capacity = len(backlog) / backlog[-1].end_ns * 1e9
    flood = [replace(query, limit_ns=limit_ns) for query in arrivals(1.5 * capacity, 1.0, "decode", {USUAL: 1.0}, 1)]
    answers = serve(flood, CPU, shipped())
    in_time = sum(answer.latency_ns <= limit_ns for answer in answers)
    assert in_time >= 0.95 * len(answers)
    assert in_time >= 0.9 * capacity
