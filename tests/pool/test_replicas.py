"""Tests of replica selection: round robin over live, fast and uncrowded replicas; recovered ones are used again."""

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.retrieval.search.pool_session import ReplicaPolicy, Replicas

MS = 1_000_000
POLICY = ReplicaPolicy(floor_ns=2 * MS)


def send_query(replicas: Replicas, live: list[int], now: int, took: dict[int, int]) -> int:
    """Send one query, answered at once. Return its pool."""
    pool = replicas.choose(live, now)[0]
    replicas.sent(pool, now)
    replicas.answered(pool, took[pool], now + took[pool])
    return pool


def test_the_coupled_pool_is_preferred_while_it_is_up() -> None:
    replicas = Replicas(3, near=[1])
    took = dict.fromkeys(range(3), MS)
    assert [send_query(replicas, [0, 1, 2], now * MS, took) for now in range(6)] == [1] * 6
    assert [send_query(replicas, [0, 2], now * MS, took) for now in range(6, 10)] == [0, 2] * 2
    replicas.lost(1)
    assert send_query(replicas, [0, 1, 2], 10 * MS, took) == 1, "it is up again"


def test_a_coupled_pool_that_is_slow_or_crowded_is_skipped() -> None:
    replicas = Replicas(2, ReplicaPolicy(crowded=4), near=[0])
    for _ in range(5):
        assert replicas.choose([0, 1], 0)[0] == 0
        replicas.sent(0, 0)
    assert replicas.choose([0, 1], 0)[0] == 1, "five queries wait there and none here"
    replicas = Replicas(2, POLICY, near=[0])
    for pool, took in ((0, 100 * MS), (1, MS)):
        replicas.sent(pool, 0)
        replicas.answered(pool, took, 0)
    assert replicas.choose([0, 1], MS)[0] == 1


def test_a_stages_own_pools_come_first_then_those_of_both_then_the_others() -> None:
    replicas = Replicas(4)
    for pool, stage in enumerate(("prefill", "decode", "", "decode")):
        replicas.serves(pool, stage)
    assert replicas.choose([0, 1, 2, 3], 0, "prefill") == [0, 2, 1, 3]
    assert replicas.choose([0, 1, 2, 3], 0, "decode") == [1, 3, 2, 0]
    replicas.sent(1, 0)
    assert replicas.choose([0, 1, 2, 3], 0, "decode") == [3, 1, 2, 0], "its own ones in turn"
    assert replicas.choose([1, 2, 3], 0, "prefill") == [2, 3, 1], "its own is down"
    replicas.lost(0)
    assert replicas.choose([0, 1, 2, 3], 0, "prefill")[0] == 0, "it is up again"


def test_a_stage_whose_own_pools_are_late_spills_over_and_comes_back() -> None:
    replicas = Replicas(2, ReplicaPolicy(crowded=4))
    replicas.serves(0, "prefill")
    replicas.serves(1, "decode")
    sent = []
    for _ in range(10):
        sent.append(replicas.choose([0, 1], 0, "prefill")[0])
        replicas.sent(sent[-1], 0)
    assert sent == [0, 0, 0, 0, 0, 1, 0, 1, 0, 1], "no further behind than `crowded`"
    for _ in range(5):
        replicas.answered(0, MS, MS)
    assert replicas.choose([0, 1], MS, "prefill")[0] == 0


def test_a_pool_without_answers_is_slow_before_its_first_answer() -> None:
    replicas = Replicas(2, POLICY)
    replicas.sent(1, 0)
    for now in range(1, 20):
        replicas.sent(0, now * MS)
        replicas.answered(0, MS, now * MS)
    assert replicas.choose([0, 1], 20 * MS)[0] == 0
    assert replicas.slow(1)
    assert replicas.choose([1], 20 * MS) == [1], "a slow one is better than none"


@settings(max_examples=30)
@given(
    service=st.lists(st.integers(1, 200), min_size=2, max_size=5),
    recovers=st.integers(0, 4),
    gap=st.integers(1, 10),
)
def test_most_queries_go_to_fast_pools_and_recovered_pools_are_used_again(
    service: list[int], recovers: int, gap: int
) -> None:
    """Pools answer after a fixed time (ms); one becomes as fast as the best and must be used within ten probes."""
    replicas = Replicas(len(service), POLICY)
    live = list(range(len(service)))
    took = [ms * MS for ms in service]
    pending: list[tuple[int, int, int]] = []
    counts = [0] * len(service)
    for step in range(2500):
        now = step * gap * MS
        if step == 1000:
            took[recovers % len(took)] = min(took)
        if step == 2000:
            counts = [0] * len(service)
        while pending and pending[0][0] <= now:
            done, sent, pool = heapq.heappop(pending)
            replicas.answered(pool, done - sent, done)
        order = replicas.choose(live, now)
        assert sorted(order) == live
        pool = order[0]
        replicas.sent(pool, now)
        counts[pool] += 1
        heapq.heappush(pending, (now + took[pool], now, pool))
    best = min(took)
    fast = [pool for pool in live if took[pool] <= 2 * best]
    probes = 500 * gap * MS // POLICY.probe_ns + 2
    for pool in live:
        if took[pool] > 4 * best + 3 * POLICY.floor_ns:
            assert counts[pool] <= probes
    share = 500 / len(live)
    assert all(counts[pool] >= share * 0.8 - probes * len(live) for pool in fast)
