"""Tests of sharded collections: an answer is merged from all shards or an error, never partial."""

import time
from pathlib import Path

import numpy as np
import pytest

from gpu import GraphIndex
from runtime.errors import CollectionError, ConfigError, DeadlineExceeded, InvalidRequest, Unavailable
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import Vectors, attached, collect, exact
from tests.pool.conftest import MakeClient, MakePool, MakeServed


def test_results_of_all_shards_are_merged_in_order_with_global_ids(
    split: Path, serve: MakeServed, queries: Vectors, index: GraphIndex
) -> None:
    client = serve(split, shards=2, workers=2).client
    batch = client.search_batch(queries, 5, top_m=200).checked()
    assert batch.ids.tolist() == exact(index, queries, 5)
    assert (np.diff(batch.distances) >= 0).all()
    one = client.search(queries[0], 5, top_m=200)
    assert one.ids.tolist() == batch.ids[0].tolist()
    assert min(one.extends, one.search_ns) > 0


def test_a_query_goes_to_one_replica_of_each_shard(split: Path, serve: MakeServed, queries: Vectors) -> None:
    served = serve(split, shards=2, workers=4)
    pools, client = served.pools, served.client
    tickets = [client.submit(query, 3, collection="docs") for query in queries[:20]]
    assert sorted(collect(client, 20)) == tickets
    counts = [pool.metric(PoolMetrics.QUERIES["prefill"]) for pool in pools]
    assert [counts[0] + counts[2], counts[1] + counts[3]] == [20, 20]
    assert min(counts) > 0


def test_a_lost_shards_query_is_retried_at_its_replica(
    split: Path, serve: MakeServed, queries: Vectors, index: GraphIndex
) -> None:
    served = serve(split, shards=2, workers=4)
    pools, client = served.pools, served.client
    with pools[1].held():
        tickets = [client.submit(query, 3, collection="docs", top_m=200) for query in queries[:12]]
        pools[1].die()
    found = collect(client, 12)
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == exact(index, queries[:12], 3)


def test_a_shard_that_restarts_in_time_completes_waiting_answers(
    split: Path, make_pool: MakePool, serve: MakeServed, queries: Vectors, index: GraphIndex
) -> None:
    served = serve(split, shards=2, workers=2)
    pools, client = served.pools, served.client
    with pools[1].held():
        tickets = [client.submit(query, 3, collection="docs", top_m=200) for query in queries[:6]]
        pools[1].die()
    tickets += [client.submit(query, 3, collection="docs", top_m=200) for query in queries[6:12]]
    until(lambda: client.statistics().waiting == 12, client.dispatcher.collect)
    make_pool(served.plan, "pool-1", epoch=2).start()
    found = collect(client, 12)
    assert [found[ticket].checked().ids.tolist() for ticket in tickets] == exact(index, queries[:12], 3)


def test_without_one_shard_a_query_fails_instead_of_returning_a_partial_answer(
    split: Path, serve: MakeServed, queries: Vectors
) -> None:
    served = serve(split, shards=2, workers=2)
    pools, client = served.pools, served.client
    pools[1].die()
    deadline = time.monotonic_ns() + 200_000_000
    tickets = [client.submit(query, 3, collection="docs", deadline_ns=deadline) for query in queries[:5]]
    found = collect(client, 5)
    assert sorted(found) == tickets
    assert all(isinstance(result.error, DeadlineExceeded) and len(result.ids) == 0 for result in found.values())
    assert client.statistics().waiting == 0


def test_an_unserved_shard_is_named(
    split: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(split, shards=2, workers=2)
    pools = [make_pool(plan, worker.name).start() for worker in plan.of_role("pool")]
    client = attached(make_client(plan, wait_ns=1_000_000, parked=4))
    pools[1].die()
    until(lambda: client.statistics().pools[1].state == "lost", client.poll)
    with pytest.raises(Unavailable, match="no pool with shard 1 of 'docs' is up"):
        client.search(queries[0], 3)
    batch = client.search_batch(queries, 3)
    assert len(batch.errors) == len(queries)
    assert all("shard 1 of 'docs'" in str(error) for error in batch.errors.values())


def test_a_query_that_one_shard_rejects_ends_once(split: Path, serve: MakeServed, queries: Vectors) -> None:
    client = serve(split, shards=2, workers=2).client
    batch = client.search_batch([[float("nan")] * 16], 3)
    assert isinstance(batch.errors[0], InvalidRequest)
    assert len(client.search(queries[0], 3).ids) == 3
    assert client.poll() == []


def test_too_few_workers_for_the_shards_are_rejected(split: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool.workers = 3 is not a multiple of the 2 shards of collection 'docs'"):
        plan_of(split, shards=2, workers=3)


def test_a_pool_rejects_a_collection_built_with_another_number_of_shards(
    split: Path, collection: Path, make_pool: MakePool
) -> None:
    with pytest.raises(CollectionError, match="was built with 2 shards, not 1"):
        make_pool(plan_of(split))
    with pytest.raises(CollectionError, match="was built with 1 shards, not 2"):
        make_pool(plan_of(collection, shards=2, workers=2))
