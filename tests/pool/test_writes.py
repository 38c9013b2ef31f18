"""Tests of writes to collections in a pool: written rows are found, deleted ones not, while segments are replaced."""

import threading

import numpy as np
import pytest

from runtime.pool.collections.served import POLL_NS
from runtime.retrieval.collections.reader import CollectionReader
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.gpu.datasets import clustered
from tests.pool.client_helpers import collect
from tests.pool.conftest import MakePool, MakeServed
from tests.pool.written_collection import DIM, SEALED, WrittenCollection, tenant_filter


def test_written_rows_are_found_and_deleted_ones_are_not(harness: WrittenCollection, serve: MakeServed) -> None:
    served = serve(harness.path)
    query = np.zeros(DIM, np.float32)
    assert served.find(query) == []
    harness.upsert("a", "b", "c")
    served.until_found(query, harness.nearest(query, 3))
    harness.delete("b")
    assert "b" not in served.find(query)  # at once: no answer contains a document deleted before the query
    served.until_found(query, harness.nearest(query, 2))
    harness.upsert("a")
    served.until_found(harness.held["a"][0], harness.nearest(harness.held["a"][0], 2))


def test_every_search_finds_a_replaced_document_and_the_first_after_the_write_is_visible_its_new_version(
    harness: WrittenCollection, serve: MakeServed
) -> None:
    served = serve(harness.path, workers=2)  # replicas, which apply a write at different times
    harness.upsert("a", "b", "c")
    until(harness.writer.wait_visible)
    query = harness.held["a"][0]
    for change in range(100):
        row = harness.replace("a")
        assert served.find(query, 1) == ["a"]
        if change % 2:
            until(harness.writer.wait_visible)
            assert [served.client.search(query, 1).ids.tolist() for _ in served.pools] == [[row]] * 2
        if change % 20 == 10:
            harness.writer.flush()


def test_a_query_in_the_pool_finds_one_version_of_a_document_that_is_replaced_meanwhile(
    harness: WrittenCollection, serve: MakeServed
) -> None:
    harness.upsert(*(f"{n}" for n in range(SEALED)))
    harness.writer.flush()
    harness.delete("1")  # so that the pool has a bitmap of the segment's rows, but no growing ones
    served = serve(harness.path, slots=1)
    pool, client = served.pool, served.client
    query, old = harness.held["0"][0], harness.writer.state.rows_of(["0"])["0"]
    with pool.held():
        tickets = [client.submit(query, 1, top_m=64) for _ in range(40)]
        pool.step()  # the queries are in the pool, and most of them wait for the slot
        new = harness.replace("0")
    found = collect(client, len(tickets))
    assert {tuple(found[ticket].checked().ids.tolist()) for ticket in tickets} <= {(old,), (new,)}
    assert client.search(query, 1).ids.tolist() == [new]


def test_a_write_is_applied_when_it_is_made_and_updates_leave_time_for_queries(
    harness: WrittenCollection, make_pool: MakePool
) -> None:
    harness.upsert("first")  # before, the collection is polled rarely
    pool = make_pool(plan_of(harness.path)).pool
    now = 10**15  # later than any poll
    pool.server.housekeep(now)
    pool.live.step(now, pool.loop.parts_in_use, pool.loop.filters_changed)
    pool.live.look()
    assert pool.live.due_ns == now + POLL_NS
    assert not pool.server.has_events
    harness.upsert("a")
    assert pool.server.has_events  # a sleeping pool wakes up
    pool.live.look()
    assert now < pool.live.due_ns <= now + POLL_NS  # later where the last update took longer
    assert not pool.server.has_events

    def applied() -> bool:  # in one part, or in several where others have the core
        pool.live.step(pool.live.due_ns, pool.loop.parts_in_use, pool.loop.filters_changed)
        return harness.writer.wait_visible()

    until(applied)


def test_queries_are_answered_between_the_parts_of_a_large_write(
    harness: WrittenCollection, serve: MakeServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.upsert("a")
    served = serve(harness.path)
    query = harness.held["a"][0]
    assert served.find(query, 1) == ["a"]
    parts: list[int] = []
    real = CollectionReader.poll

    def poll(self: CollectionReader, budget_ns: int | None = None) -> bool:
        found = real(self, None if budget_ns is None else 1)
        if self.applying:  # the loop goes on with queries before it polls again
            parts.append(self.state.count)
        return found

    monkeypatch.setattr(CollectionReader, "poll", poll)
    harness.upsert(*(f"n{number}" for number in range(1000)))
    until(lambda: len(served.client.search(query, 10).ids) == 10)
    assert len(parts) > 10
    assert set(parts) == {1}


def test_a_delete_waits_for_a_pool_that_has_not_applied_it(harness: WrittenCollection, serve: MakeServed) -> None:
    harness.upsert("a", "b")
    served = serve(harness.path)
    served.until_found(np.zeros(DIM, np.float32), harness.nearest(np.zeros(DIM, np.float32), 2))
    deletion = threading.Thread(target=lambda: harness.delete("a"))
    with served.pool.held():
        deletion.start()
        until(lambda: harness.writer.state.sequence == 2)  # it is in the log
        assert deletion.is_alive()
    deletion.join(60)
    assert not deletion.is_alive()


def test_filters_include_rows_written_after_their_evaluation(harness: WrittenCollection, serve: MakeServed) -> None:
    harness.upsert(*(f"acme-{n}" for n in range(SEALED)), tenant="acme")
    harness.writer.flush()
    harness.upsert("blue-0", tenant="blue")
    served, query = serve(harness.path), np.zeros(DIM, np.float32)
    for tenant in ("acme", "blue"):
        assert served.find(query, filter=tenant_filter(tenant)) == harness.nearest(query, 10, {"tenant": tenant})
    harness.upsert("blue-1", tenant="blue")
    harness.delete(*harness.nearest(query, 3, {"tenant": "acme"}))
    for tenant in ("acme", "blue"):
        served.until_found(query, harness.nearest(query, 10, {"tenant": tenant}), filter=tenant_filter(tenant))


def test_queries_in_flight_finish_on_the_segments_they_started_with(
    harness: WrittenCollection, serve: MakeServed
) -> None:
    for part in range(3):
        harness.upsert(*(f"{part}-{n}" for n in range(SEALED)))
        harness.writer.flush()
    served = serve(harness.path, slots=2)
    pool, client = served.pool, served.client
    queries = clustered(np.random.default_rng(9), 40, DIM)
    with pool.held():
        tickets = [client.submit(query, 5, top_m=64) for query in queries]
        harness.writer.compact()
    found = collect(client, len(tickets))
    rows = harness.writer.state.rows_of([name for query in queries for name in harness.nearest(query, 5)])
    for ticket, query in zip(tickets, queries, strict=True):
        assert found[ticket].checked().ids.tolist() == [rows[name] for name in harness.nearest(query, 5)]
