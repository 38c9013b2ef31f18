"""A pool that holds its sessions and answers nothing: what it was asked is answered by its replica, once."""

from pathlib import Path

import pytest

from gpu import GraphIndex
from runtime.errors import DeadlineExceeded
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.pool_session import ReplicaPolicy, Replicas
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.conftest import MakeClient, MakePool
from tests.pool.pools import Vectors, attached, collect, exact

MS = 1_000_000
SHIPPED = ReplicaPolicy()


@pytest.fixture
def two(collection: Path, make_pool: MakePool) -> tuple[NodePlan, list[InProcessPool]]:
    """Two pools of one plan, at work."""
    plan = plan_of(collection, workers=2, ring_slots=64)
    return plan, [make_pool(plan, f"pool-{number}").start() for number in range(2)]


def outstanding(client: SearchClient) -> int:
    return sum(pool.outstanding for pool in client.statistics().pools)


def ask_others(client: SearchClient, monkeypatch: pytest.MonkeyPatch, *stalled: int) -> None:
    """Take these pools for stalled, now and until the test ends."""
    monkeypatch.setattr(client.dispatcher.replicas, "stalled", lambda pool, now_ns: pool in stalled)
    client.dispatcher.hedge(0)


def drained(client: SearchClient) -> None:
    """Every answer is in, of no ticket any more."""

    def poll() -> None:
        assert client.poll() == []
        client.sleep((), 1)

    until(lambda: outstanding(client) == 0, poll)


def test_what_a_silent_pool_was_asked_is_answered_by_the_other(
    two: tuple[NodePlan, list[InProcessPool]], make_client: MakeClient, queries: Vectors, index: GraphIndex
) -> None:
    plan, pools = two
    client = attached(make_client(plan, SHIPPED))
    with pools[0].held():
        tickets = [client.submit(query, 4, collection="docs", top_m=32, search_width=2) for query in queries[:20]]
        found = collect(client, 20)
        assert pools[0].metric(PoolMetrics.QUERIES["prefill"]) == 0
    expected = index.search(queries[:20], 4, top_m=32, search_width=2)[0].tolist()
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == expected
    drained(client)


def test_both_answers_of_a_question_asked_twice_end_it_once(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:20]]
        ask_others(client, monkeypatch, 0)
        assert outstanding(client) == 30
    assert sorted(collect(client, 20)) == tickets
    drained(client)


def test_a_question_is_asked_of_one_other_pool_and_no_more(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held():
        ticket = client.submit(queries[0], 4, collection="docs")
        with pools[1].held():
            for _ in range(5):
                ask_others(client, monkeypatch, 0)
            assert outstanding(client) == 2
    assert list(collect(client, 1)) == [ticket]
    drained(client)


@pytest.mark.parametrize("dies", [0, 1])
def test_the_death_of_one_of_two_pools_that_have_a_question_is_not_its_end(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
    dies: int,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:6]]
        ask_others(client, monkeypatch, 0)
        assert outstanding(client) == 9
        pools[dies].die()
    found = collect(client, 6)
    assert sorted(found) == tickets
    assert all(len(result.checked().ids) == 4 for result in found.values())
    drained(client)


def test_a_cancelled_question_is_asked_of_nobody_else(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        ticket = client.submit(queries[0], 4, collection="docs")
        client.cancel(ticket)
        ask_others(client, monkeypatch, 0)
        assert outstanding(client) == 1
    assert isinstance(collect(client, 1)[ticket].error, DeadlineExceeded)


def test_a_question_asked_twice_and_then_cancelled_ends_once(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        ticket = client.submit(queries[0], 4, collection="docs")
        ask_others(client, monkeypatch, 0)
        assert outstanding(client) == 2
        client.cancel(ticket)
    assert isinstance(collect(client, 1)[ticket].error, DeadlineExceeded)
    drained(client)


def test_a_shard_that_is_silent_is_asked_at_its_replica_and_no_part_counts_twice(
    split: Path,
    make_pool: MakePool,
    make_client: MakeClient,
    queries: Vectors,
    index: GraphIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(split, shards=2, workers=4)
    pools = [make_pool(plan, f"pool-{number}").start() for number in range(4)]
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held(), pools[2].held(), pools[3].held():
        tickets = [client.submit(query, 3, collection="docs", top_m=200) for query in queries[:12]]
        ask_others(client, monkeypatch, 0, 1)
        assert outstanding(client) == 36
    found = collect(client, 12)
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == exact(index, queries[:12], 3)
    drained(client)


def test_where_every_pool_is_silent_nothing_is_asked_twice(
    two: tuple[NodePlan, list[InProcessPool]],
    make_client: MakeClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, pools = two
    client = attached(make_client(plan))
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:6]]
        ask_others(client, monkeypatch, 0, 1)
        assert outstanding(client) == 6
    assert sorted(collect(client, 6)) == tickets


def test_a_pool_is_stalled_when_it_owes_answers_and_gives_none() -> None:
    replicas = Replicas(2)
    assert not replicas.stalled(0, 10_000 * MS), "it was asked nothing"
    replicas.sent(0, 0, 3)
    assert not replicas.stalled(0, 499 * MS)
    assert replicas.stalled(0, 500 * MS)
    replicas.answered(0, 500 * MS, 500 * MS)
    assert not replicas.stalled(0, 999 * MS), "slow, but it answers"
    assert replicas.stalled(0, 1000 * MS)
    replicas.lost(0)
    assert not replicas.stalled(0, 5000 * MS)
