"""What the scheduler is for, on a virtual clock with a CPU's costs: bars of `benchmarks.pool`, without its noise.

Every comparison is paired: the same queries at the same times.
"""

from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np
import pytest

from benchmarks.pool_schedulers import FifoScheduler, StaticScheduler
from ipc import Stage
from runtime.pool.estimate import Kind
from runtime.pool.policy import Policy
from tests.pool.virtual_pool import LARGE, SMALL, USUAL, Answer, Asked, Costs, arrivals, serve

CPU, SLOWER_CALLS = Costs(), Costs(fixed=2_500)
MIXED = {SMALL: 0.9, LARGE: 0.1}
SEEDS = range(3)


def policy(target_ns: int = 0) -> Policy:
    return Policy(slots=32, spare=32, prefill_target_ns=target_ns, aging_ns=10_000_000, max_pauses=64)


def p99(answers: list[Answer], kind: Kind = USUAL, stage: Stage = "decode") -> float:
    return float(np.percentile([one.latency_ns for one in answers if (one.kind, one.stage) == (kind, stage)], 99))


def full(queries: list[Asked]) -> list[Asked]:
    """The same, all there from the start."""
    return [Asked(0, query.stage, query.kind, query.extends) for query in queries]


@cache
def static_per_s(costs: Costs) -> float:
    answers = serve(full(arrivals(2500, 1.0, "decode", MIXED, 9)), costs, policy(), StaticScheduler, batches=True)
    return len(answers) / answers[-1].end_ns * 1e9


@pytest.mark.parametrize(("costs", "times"), [(CPU, 3.0), (SLOWER_CALLS, 2.5)], ids=["cpu", "slower-calls"])
@pytest.mark.parametrize("load", [0.65, 0.8])
def test_small_queries_among_large_ones_are_three_times_faster_than_in_static_batches(
    costs: Costs, times: float, load: float
) -> None:
    ours, static = [], []
    for seed in SEEDS:
        queries = arrivals(load * static_per_s(costs), 2.0, "decode", MIXED, seed)
        ours.append(p99(serve(queries, costs, policy()), SMALL))
        static.append(p99(serve(queries, costs, policy(), StaticScheduler, batches=True), SMALL))
    assert fmean(static) >= times * fmean(ours)


def test_large_queries_pay_for_it_less_than_a_quarter_over_a_pool_that_all_share_alike() -> None:
    found: dict[str, list[float]] = {"ours": [], "fifo": []}
    for seed in SEEDS:
        queries = arrivals(0.65 * static_per_s(CPU), 2.0, "decode", MIXED, seed)
        found["ours"].append(p99(serve(queries, CPU, policy()), LARGE))
        found["fifo"].append(p99(serve(queries, CPU, policy(), FifoScheduler), LARGE))
    assert fmean(found["ours"]) <= 1.25 * fmean(found["fifo"])


@pytest.mark.parametrize(("costs", "least"), [(CPU, 0.94), (SLOWER_CALLS, 0.92)], ids=["cpu", "slower-calls"])
def test_under_a_flood_prefill_stays_fast_and_decode_keeps_its_share(costs: Costs, least: float) -> None:
    seconds, end = 1.5, 1_500_000_000
    kinds = {USUAL: 1.0}
    crowd = serve(full(arrivals(4000, 0.5, "decode", kinds, 9)), costs, policy())
    capacity = len(crowd) / crowd[-1].end_ns * 1e9
    slower, share = [], []
    for seed in SEEDS:
        prefill = arrivals(0.15 * capacity, seconds, "prefill", kinds, seed)
        flood = arrivals(2.0 * capacity, seconds, "decode", kinds, 100 + seed)
        alone = serve(prefill, costs, policy())
        only = [one for one in serve(flood, costs, policy(), places=256) if one.end_ns <= end]
        both = sorted([*prefill, *flood], key=lambda query: query.at_ns)
        answers = [one for one in serve(both, costs, policy(), places=256) if one.end_ns <= end]
        served = {stage: sum(one.stage == stage for one in answers) for stage in ("prefill", "decode")}
        slower.append(p99(answers, USUAL, "prefill") / p99(alone, USUAL, "prefill"))
        share.append(served["decode"] / (len(only) - served["prefill"]))
    assert fmean(slower) <= 1.6
    assert fmean(share) >= least


def test_in_a_crowd_with_deadlines_nearly_all_answers_are_in_time_for_what_cannot_be_is_refused() -> None:
    limit_ns = 20_000_000
    crowd = serve(full(arrivals(4000, 0.5, "decode", {USUAL: 1.0}, 9)), CPU, policy())
    capacity = len(crowd) / crowd[-1].end_ns * 1e9
    flood = [replace(query, limit_ns=limit_ns) for query in arrivals(1.5 * capacity, 1.0, "decode", {USUAL: 1.0}, 1)]
    answers = serve(flood, CPU, policy())
    in_time = sum(answer.latency_ns <= limit_ns for answer in answers)
    assert in_time >= 0.95 * len(answers)
    assert in_time >= 0.9 * capacity
