"""Tests of a pool worker's loop: answers equal the index's, every query ends once, departed clients leave nothing."""

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex
from ipc import Result, RingClient, SearchSpec
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import process
from runtime.pool.settings import policy_of
from runtime.testing.pool import InProcessPool
from runtime.testing.waiting import until
from tests.pool.client_helpers import Vectors
from tests.pool.conftest import MakePool


def collect(pool: InProcessPool, client: RingClient, count: int) -> dict[int, Result]:
    """Return the next `count` results by request id. Each arrives once."""
    found: list[Result] = []

    def poll() -> None:
        pool.step()
        found.extend(client.poll())

    until(lambda: len(found) >= count, poll)
    by_id = {result.request_id: result for result in found}
    assert len(by_id) == len(found) == count
    return by_id


def ask(client: RingClient, vector: Vectors, stage: str = "prefill", **wanted: Any) -> int:
    choice: dict[str, Any] = {"collection": "docs", "stage": stage, "k": 5, "top_m": 32}
    return client.submit(vector, SearchSpec(**(choice | wanted)))


def test_waiting_and_running_queries_can_be_cancelled_and_release_their_slot(
    make_pool: MakePool, queries: Vectors
) -> None:
    pool = make_pool(slots=1)
    with pool.attach() as client:
        running, waiting = ask(client, queries[0], "decode"), ask(client, queries[1], "decode")
        pool.step()
        assert pool.metric(PoolMetrics.ACTIVE_SLOTS) == pool.metric(PoolMetrics.QUEUE_DEPTH["decode"]) == 1
        for request_id in (waiting, running):
            client.cancel(request_id)
        last = ask(client, queries[2])
        found = collect(pool, client, 3)
    assert [found[request_id].status for request_id in (running, waiting, last)] == ["cancelled", "cancelled", "ok"]
    assert not pool.pool.busy


def test_a_query_that_waits_past_its_deadline_is_reported_late(make_pool: MakePool, queries: Vectors) -> None:
    pool = make_pool()
    with pool.attach() as client:
        late = [ask(client, queries[0], stage, deadline_ns=time.monotonic_ns()) for stage in ("prefill", "decode")]
        in_time = ask(client, queries[0], deadline_ns=time.monotonic_ns() + 3600 * 10**9)
        found = collect(pool, client, 3)
    assert [found[request_id].status for request_id in late] == ["deadline_exceeded"] * 2
    assert found[in_time].status == "ok"
    assert pool.metric(PoolMetrics.QUERIES_REFUSED) == 2


def test_queries_beyond_the_queue_are_rejected_and_the_rest_answered(
    make_pool: MakePool, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "policy_of", lambda *given: replace(policy_of(*given), queue=2))
    pool = make_pool(slots=1)
    with pool.attach() as client:
        request_ids = [ask(client, query) for query in queries[:5]]
        found = collect(pool, client, 5)
    assert [found[request_id].status for request_id in request_ids] == ["ok", "ok", *["overloaded"] * 3]


BAD: dict[str, dict[str, Any]] = {"a NaN": {}, "k over top_m": {"k": 40}, "a width over the limit": {"search_width": 9}}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_query_is_rejected_and_the_next_one_answered(
    case: str, make_pool: MakePool, queries: Vectors
) -> None:
    pool = make_pool(slots=1)
    vector = np.full_like(queries[0], np.nan) if case == "a NaN" else queries[0]
    with pool.attach() as client:
        bad, good = ask(client, vector, **BAD[case]), ask(client, queries[1])
        found = collect(pool, client, 2)
    assert (found[bad].status, found[good].status) == ("invalid_request", "ok")
    assert pool.engine.free_slots == 2


def test_a_client_that_disappears_leaves_no_slot_occupied_and_others_are_served(
    make_pool: MakePool, queries: Vectors, index: GraphIndex
) -> None:
    pool = make_pool(slots=4)
    gone, stays = pool.attach("gone"), pool.attach("stays")
    for query in queries[:20]:
        ask(gone, query, "decode")
    pool.step()
    assert pool.metric(PoolMetrics.CLIENTS) == 2
    gone.close()
    request_id = ask(stays, queries[0], k=3)
    assert collect(pool, stays, 1)[request_id].ids.tolist() == index.search(queries[:1], 3, top_m=32)[0][0].tolist()
    until(lambda: not pool.pool.busy and pool.metric(PoolMetrics.CLIENTS) == 1, pool.step)
    assert pool.engine.free_slots == 8
    assert pool.pool.loop.active == pool.pool.loop.paused == 0
    stays.close()


def test_metrics_count_queries_and_outcomes(make_pool: MakePool, queries: Vectors) -> None:
    pool = make_pool(slots=2)
    with pool.attach() as client:
        for number, query in enumerate(queries[:6]):
            ask(client, query, "prefill" if number < 4 else "decode")
        found = collect(pool, client, 6)
    assert pool.metric(PoolMetrics.QUERIES["prefill"]) == pool.metric(PoolMetrics.WAIT["prefill"]) == 4
    assert pool.metric(PoolMetrics.QUERIES["decode"]) == pool.metric(PoolMetrics.WAIT["decode"]) == 2
    assert pool.metric(PoolMetrics.LATENCY) == pool.metric(PoolMetrics.QUERY_EXTENDS) == 6
    assert pool.metric(PoolMetrics.SLOT_STEPS) == sum(result.extends for result in found.values())
    assert pool.metric(PoolMetrics.SLOTS) == 2
    assert pool.metric(PoolMetrics.ACTIVE_SLOTS) == 0


def test_the_process_stops_on_request_after_answering_its_queries(
    make_pool: MakePool, queries: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make_pool(slots=1)
    monkeypatch.setattr(process, "Pool", lambda worker: held.pool)
    with held.attach() as client:
        request_ids = [ask(client, query) for query in queries[:10]]
        held.worker.stop()
        loop = threading.Thread(target=process.run, args=(held.worker,))
        loop.start()
        loop.join(timeout=60)
        assert not loop.is_alive()
        found = {result.request_id: result.status for result in client.poll()}
    assert found == dict.fromkeys(request_ids, "ok")
