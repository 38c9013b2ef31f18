"""Tests of stalled pools, which keep their sessions without answering: a replica answers their queries, once."""

from pathlib import Path

import pytest

from gpu import GraphIndex
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.pool_session import ReplicaPolicy
from runtime.testing.pool import InProcessPool
from runtime.testing.waiting import until
from tests.pool.client_helpers import Vectors, attached, collect, exact
from tests.pool.conftest import MakeClient, MakeServed

SHIPPED = ReplicaPolicy()


def outstanding(client: SearchClient) -> int:
    return sum(pool.outstanding for pool in client.statistics().pools)


def ask_others(client: SearchClient, monkeypatch: pytest.MonkeyPatch, *stalled: int) -> None:
    """Mark these pools as stalled until the test ends."""
    monkeypatch.setattr(client.dispatcher.pools.replicas, "stalled", lambda pool, now_ns: pool in stalled)
    client.dispatcher.hedge(0)


def drained(client: SearchClient) -> None:
    """Wait until every answer has arrived. None may belong to an ended ticket."""

    def poll() -> None:
        assert client.poll() == []
        client.sleep((), 1)

    until(lambda: outstanding(client) == 0, poll)


def test_a_stalled_pools_queries_are_answered_by_the_other(
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


def test_a_query_is_resent_to_only_one_other_pool(
    pools: list[InProcessPool], client: SearchClient, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pools[0].held():
        ticket = client.submit(queries[0], 4, collection="docs")
        with pools[1].held():
            for _ in range(5):
                ask_others(client, monkeypatch, 0)
            assert outstanding(client) == 2
    assert list(collect(client, 1)) == [ticket]
    drained(client)


@pytest.mark.parametrize("dies", [0, 1, None])
def test_two_answers_to_a_resent_query_end_it_once_and_it_survives_the_death_of_one_of_its_pools(
    pools: list[InProcessPool],
    client: SearchClient,
    queries: Vectors,
    monkeypatch: pytest.MonkeyPatch,
    dies: int | None,
) -> None:
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:6]]
        ask_others(client, monkeypatch, 0)
        assert outstanding(client) == 9
        if dies is not None:
            pools[dies].die()
    found = collect(client, 6)
    assert sorted(found) == tickets
    assert all(len(result.checked().ids) == 4 for result in found.values())
    drained(client)


def test_a_stalled_shards_query_is_resent_to_its_replica_and_no_part_counts_twice(
    split: Path, serve: MakeServed, queries: Vectors, index: GraphIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(split, shards=2, workers=4)
    pools, client = served.pools, served.client
    with pools[0].held(), pools[1].held(), pools[2].held(), pools[3].held():
        tickets = [client.submit(query, 3, collection="docs", top_m=200) for query in queries[:12]]
        ask_others(client, monkeypatch, 0, 1)
        assert outstanding(client) == 36
    found = collect(client, 12)
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == exact(index, queries[:12], 3)
    drained(client)


def test_nothing_is_resent_if_every_pool_is_stalled(
    pools: list[InProcessPool], client: SearchClient, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:6]]
        ask_others(client, monkeypatch, 0, 1)
        assert outstanding(client) == 6
    assert sorted(collect(client, 6)) == tickets
