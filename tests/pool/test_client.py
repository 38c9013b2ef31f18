"""Tests of the search client: round robin over pools, retries after a pool's death, exactly one result per ticket."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpu import GraphIndex
from ipc import AttachTimeout
from ipc.endpoints import new_token, private_endpoint
from runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WorkerLost
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.retrieval.fair_threads import start_thread
from runtime.retrieval.search import pool_session
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import Vectors, attached, collect
from tests.pool.conftest import MakeClient, MakePool, MakeServed


def test_queries_are_distributed_round_robin_and_answers_equal_the_index(
    pools: list[InProcessPool], client: SearchClient, queries: Vectors, index: GraphIndex
) -> None:
    tickets = [client.submit(query, 4, collection="docs", top_m=32, search_width=2) for query in queries]
    found = collect(client, len(queries))
    ids, distances = index.search(queries, 4, top_m=32, search_width=2)
    for ticket, expected, near in zip(tickets, ids, distances, strict=True):
        result = found[ticket].checked()
        assert result.ids.tolist() == expected.tolist()
        assert result.distances.tolist() == near.tolist()
        assert min(result.extends, result.search_ns) > 0
        assert result.wait_ns >= 0
    assert [pool.metric(PoolMetrics.QUERIES["prefill"]) for pool in pools] == [len(queries) / 2] * 2


def test_a_client_prefers_its_coupled_pool_and_uses_another_when_it_is_down(
    two: tuple[NodePlan, list[InProcessPool]], make_client: MakeClient, queries: Vectors
) -> None:
    plan, pools = two
    first, second, *rest = plan.workers
    client = attached(make_client(replace(plan, workers=(first, replace(second, paired_with="test"), *rest))))
    for query in queries[:10]:
        client.search(query, 4)
    query_count = PoolMetrics.QUERIES["prefill"]
    assert [pool.metric(query_count) for pool in pools] == [0, 10]
    with pools[1].held():
        ticket = client.submit(queries[10], 4)
        pools[1].die()  # has not read the query
    assert collect(client, 1)[ticket].error is None
    client.search(queries[11], 4)
    assert pools[0].metric(query_count) == 2


def test_search_waits_for_its_own_result_and_keeps_others(
    client: SearchClient, queries: Vectors, index: GraphIndex
) -> None:
    tickets = [client.submit(query, 3, collection="docs") for query in queries[:5]]
    result = client.search(queries[5], 3, stage="decode")
    assert result.ids.tolist() == index.search(queries[5:6], 3, top_m=64, search_width=4)[0][0].tolist()
    assert sorted(collect(client, 5)) == tickets


def test_a_dead_pools_queries_are_retried_elsewhere(
    pools: list[InProcessPool], client: SearchClient, queries: Vectors
) -> None:
    with pools[0].held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:20]]
        answered = collect(client, 10)
        pools[0].die()  # with ten unread queries
    lost = collect(client, 10)
    assert sorted([*answered, *lost]) == tickets
    assert all(result.error is None and len(result.ids) == 4 for result in lost.values())
    assert pools[1].metric(PoolMetrics.QUERIES["prefill"]) == 20


def test_a_restarted_pool_answers_queries_that_waited_for_it(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(collection)
    first = make_pool(plan).start()
    client = attached(make_client(plan))
    with first.held():
        tickets = [client.submit(query, 4, collection="docs") for query in queries[:5]]
        first.die()
    assert client.poll() == []
    tickets += [client.submit(query, 4, collection="docs") for query in queries[5:10]]
    assert not client.live
    make_pool(plan, epoch=2).start()
    found = collect(client, 10)
    assert sorted(found) == tickets
    assert all(result.error is None for result in found.values())


def test_a_client_never_blocks_on_a_dead_pool(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(collection, workers=2)
    pools = [make_pool(plan, f"pool-{number}").start() for number in range(2)]
    client = attached(make_client(plan))
    attempted, answer = threading.Event(), threading.Event()

    class Unanswered:
        """An attempt to attach that blocks until the test ends it."""

        def __init__(self, *_: object, **__: object) -> None:
            attempted.set()
            answer.wait(60)
            raise AttachTimeout("nobody answered")

    with monkeypatch.context() as patch:
        patch.setattr(pool_session, "RingClient", Unanswered)
        pools[0].die()
        until(attempted.is_set, client.poll)
        assert [len(client.search(query, 3).ids) for query in queries[:5]] == [3] * 5
        assert client.statistics().pools[0].state == "lost"
    answer.set()
    make_pool(plan, "pool-0", epoch=2).start()
    assert attached(client).statistics().pools[0].epoch == 2


def test_a_client_attaches_once_the_system_permits_another_thread(
    collection: Path, make_pool: MakePool, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(collection)
    make_pool(plan).start()
    attempts: list[int] = []

    def start_third(*arguments: Any) -> threading.Thread:
        attempts.append(1)
        if len(attempts) < 3:
            raise Overloaded("connect: can't start new thread")
        return start_thread(*arguments)

    monkeypatch.setattr(pool_session, "start_thread", start_third)
    assert attached(make_client(plan)).live
    assert len(attempts) == 3


def test_a_query_that_no_pool_accepts_ends_at_its_deadline(
    collection: Path, make_client: MakeClient, queries: Vectors
) -> None:
    client = make_client(plan_of(collection))
    early = client.submit(queries[0], 3, collection="docs", deadline_ns=time.monotonic_ns() + 1_000_000)
    late = client.submit(queries[0], 3, collection="docs", deadline_ns=time.monotonic_ns() + 3600 * 10**9)
    found = collect(client, 1)
    assert isinstance(found[early].error, DeadlineExceeded)
    assert len(found[early].ids) == len(found[early].distances) == 0
    with pytest.raises(DeadlineExceeded, match="no pool accepted the query before its deadline"):
        client.search(queries[0], 3, deadline_ms=1)
    client.cancel(late)
    assert client.poll() == []


def test_the_number_of_queries_that_wait_for_a_pool_is_limited(
    collection: Path, make_client: MakeClient, queries: Vectors
) -> None:
    client = make_client(plan_of(collection), parked=3)
    for query in queries[:3]:
        client.submit(query, 3, collection="docs")
    with pytest.raises(Overloaded, match="3 queries wait for a pool to take them, the limit is 3"):
        client.submit(queries[3], 3, collection="docs")


def test_queries_beyond_the_rings_capacity_are_rejected_and_accepted_ones_answered(
    collection: Path, serve: MakeServed, queries: Vectors
) -> None:
    served = serve(collection, ring_slots=2)
    pool, client = served.pool, served.client
    with pool.held():
        tickets = [client.submit(query, 3, collection="docs") for query in queries[:2]]
        with pytest.raises(Overloaded, match="2 requests are outstanding"):
            client.submit(queries[2], 3, collection="docs")
    assert sorted(collect(client, 2)) == tickets


REFUSED: dict[str, dict[str, Any]] = {
    "of another length": {"vector": [0.5] * 7},
    "with k over the limit": {"k": 129},
    "with top_m over the limit": {"top_m": 513},
    "of an unknown collection": {"collection": "nope"},
}


def test_an_invalid_query_is_rejected_at_once(serve: MakeServed, collection: Path) -> None:
    client = serve(collection).client
    for change in REFUSED.values():
        wanted: dict[str, Any] = {"vector": [0.5] * 16, "k": 3, "collection": "docs"} | change
        with pytest.raises(InvalidRequest):
            client.submit(wanted.pop("vector"), wanted.pop("k"), **wanted)
    assert len(client.search([0.5] * 16, 3).ids) == 3
    assert client.poll() == []


def test_a_vector_that_is_too_long_is_refused_with_its_norm_and_the_limit(serve: MakeServed, collection: Path) -> None:
    client = serve(collection).client
    with pytest.raises(InvalidRequest, match=r"its squared norm is 1.44e\+78, the limit is 4.25e\+37") as refused:
        client.search([3e38] * 16, 3)
    assert refused.value.param == "vector"


def test_a_cancelled_query_is_not_retried_when_its_pool_dies(
    pools: list[InProcessPool], client: SearchClient, queries: Vectors
) -> None:
    with pools[0].held(), pools[1].held():
        tickets = [client.submit(query, 3, collection="docs") for query in queries[:4]]
        for ticket in tickets:
            client.cancel(ticket)
        pools[0].die()
    found = collect(client, 4)
    assert sorted(found) == tickets
    assert all(result.error is not None for result in found.values())
    assert sum(isinstance(result.error, WorkerLost) for result in found.values()) == 2


def test_a_draining_pool_is_skipped(pools: list[InProcessPool], client: SearchClient, queries: Vectors) -> None:
    with pools[0].held():
        pools[0].pool.drain()
    tickets = [client.submit(query, 3, collection="docs") for query in queries[:6]]
    assert sorted(collect(client, 6)) == tickets
    assert [pool.metric(PoolMetrics.QUERIES["prefill"]) for pool in pools] == [0, 6]


def test_connecting_to_a_node_whose_pools_do_not_answer_is_unavailable(tmp_path: Path) -> None:
    held = RunDir.acquire(tmp_path / "run")
    held.write(NodeInfo("n", os.getpid(), "", "", (private_endpoint(new_token(), "pool-0"),), ("docs",)))
    with pytest.raises(Unavailable, match="no pool of node"):
        SearchClient.connect(tmp_path / "run", timeout_s=0.01)
    held.release()
    with pytest.raises(Unavailable, match="no node runs in"):
        SearchClient.connect(tmp_path / "run")


def test_a_query_without_a_deadline_that_no_pool_accepts_is_unavailable(
    collection: Path, make_client: MakeClient, queries: Vectors
) -> None:
    client = make_client(plan_of(collection), wait_ns=1_000_000)
    with pytest.raises(Unavailable, match="no pool with 'docs' is up"):
        client.search(queries[0], 3)


def test_a_closed_client_rejects_calls_and_does_not_attach(client: SearchClient, queries: Vectors) -> None:
    client.close()
    calls = (
        lambda: client.search(queries[0], 3),
        lambda: client.submit(queries[0], 3, collection="docs"),
        lambda: client.search_batch(queries, 3),
        lambda: client.search_batch(queries[:0], 3),
        client.poll,
    )
    for call in calls:
        with pytest.raises(Unavailable, match="the search client was closed"):
            call()
    assert not client.live
    client.close()


def test_a_client_finds_a_restarted_node(
    collection: Path, make_pool: MakePool, queries: Vectors, tmp_path: Path
) -> None:
    def start(workers: int) -> tuple[RunDir, list[InProcessPool]]:
        """One run of a node: its pools have their own endpoints."""
        plan = plan_of(collection, workers=workers)
        pools = [make_pool(plan, f"pool-{number}").start() for number in range(workers)]
        held = RunDir.acquire(tmp_path / "run")
        held.write(NodeInfo("n", os.getpid(), "", "", tuple(pool.endpoint for pool in pools), ("docs",)))
        return held, pools

    held, pools = start(1)
    with SearchClient.connect(tmp_path / "run", timeout_s=60) as client:
        for workers in (2, 1):
            for pool in pools:
                pool.die()
            held.release()
            until(lambda: not client.live, client.poll)
            held, pools = start(workers)
            assert len(client.search(queries[0], 5, deadline_ms=60_000).ids) == 5
            assert [pool.endpoint for pool in client.statistics().pools] == [pool.endpoint for pool in pools]
    held.release()


def test_the_only_collection_need_not_be_named(collection: Path, serve: MakeServed, queries: Vectors) -> None:
    client = serve(collection).client
    named = client.search(queries[0], 5, collection="docs")
    assert client.search(queries[0], 5).ids.tolist() == named.ids.tolist()
    assert client.search_batch(queries[:2], 5).ids[0].tolist() == named.ids.tolist()
    ticket = client.submit(queries[0], 5)
    assert collect(client, 1)[ticket].checked().ids.tolist() == named.ids.tolist()


def test_with_several_collections_one_must_be_named_even_if_only_one_is_up(
    collection: Path, make_pool: MakePool, queries: Vectors
) -> None:
    served = plan_of(collection)
    make_pool(served, "pool-0").start()
    configured = ("docs", "news")  # the node's configuration has both; the pool has only one of them now
    with SearchClient([served.endpoint("pool-0")], "c", collections=configured) as client:
        attached(client)
        with pytest.raises(InvalidRequest, match=r"collection is missing; there are \['docs', 'news'\]"):
            client.search(queries[0], 5)


def test_the_default_collection_is_unknown_until_a_pool_is_up(queries: Vectors) -> None:
    client = SearchClient([private_endpoint(new_token(), "pool-0")], "c")
    with client, pytest.raises(Unavailable, match="no pool is up that could report"):
        client.search(queries[0], 5)
