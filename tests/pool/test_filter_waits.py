"""Queries that wait for their filters in a pool: others go on, and each ends exactly once."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc import RingClient, SearchSpec
from runtime.node.placement.plan import NodePlan
from runtime.pool import filtered_requests
from runtime.pool.collections.scopes import FilterableCollection, Finish
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import Vectors, attached, collect
from tests.pool.conftest import NUMBERED, MakeClient, MakePool, MakeServed
from tests.pool.written_collection import DIM, WrittenCollection, tenant_filter


def number_is(number: int) -> dict[str, Any]:
    return {"type": "eq", "key": "number", "value": number}


class Evaluations:
    """Holds up the evaluations of filters of a pool's first collection, until `release`."""

    def __init__(self, pool: InProcessPool, number: int) -> None:
        self.begun, self.order = 0, list[Any]()
        self._released = threading.Event()
        with pool.held():
            scopes = pool.pool.scopes
            real = scopes.collection(number)
            assert real is not None
            self._real = real
            scopes.register(number, FilterableCollection(real.schema, self._passing, real.demanded))

    def _passing(self, condition: Any, work: Any) -> Finish:
        self.begun += 1
        self.order.append(condition.values[0])
        assert self._released.wait(60)
        work.check()
        return self._real.passing(condition, work)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def vectors() -> Vectors:
    return NUMBERED


@pytest.fixture
def plan(numbered: Path) -> NodePlan:
    return plan_of(numbered)


@pytest.fixture
def pool(plan: NodePlan, make_pool: MakePool) -> InProcessPool:
    return make_pool(plan).start()


@pytest.fixture
def slow(pool: InProcessPool) -> Iterator[Evaluations]:
    found = Evaluations(pool, 0)
    yield found
    found.release()


@pytest.fixture
def client(plan: NodePlan, pool: InProcessPool, make_client: MakeClient) -> SearchClient:
    return attached(make_client(plan))


def waiting(pool: InProcessPool) -> Callable[[], int]:
    return lambda: len(pool.pool.loop.filtered)


def test_queries_go_on_and_the_heart_beats_while_filters_are_resolved(
    pool: InProcessPool, slow: Evaluations, client: SearchClient, vectors: Vectors
) -> None:
    filtered = [client.submit(vectors[n], 1, filter=number_is(n)) for n in range(3)]
    until(lambda: waiting(pool)() == 3)
    turns = pool.pool.control_runs
    for row in range(20):
        assert client.search(vectors[row], 1).ids.tolist() == [row]
    until(lambda: pool.pool.control_runs > turns + 2)
    assert slow.begun == 1
    slow.release()
    found = collect(client, 3)
    assert [found[ticket].checked().ids.tolist() for ticket in filtered] == [[0], [1], [2]]
    assert client.search(vectors[1], 1, filter=number_is(1)).ids.tolist() == [1]
    assert slow.begun == 3  # the fourth query found the scope of the second


def test_an_idle_pool_is_woken_by_a_resolved_filter(
    plan: NodePlan, make_pool: MakePool, make_client: MakeClient, vectors: Vectors
) -> None:
    from runtime.pool.process import Timing

    make_pool(plan, timing=Timing(control_ns=3600 * 10**9)).start()
    client = attached(make_client(plan))
    assert client.search(vectors[5], 1, filter=number_is(5)).ids.tolist() == [5]


def test_a_cancelled_query_ends_once_and_its_filter_is_not_evaluated(
    pool: InProcessPool, slow: Evaluations, vectors: Vectors
) -> None:
    with RingClient(pool.endpoint, "impatient", timeout_ms=60_000.0) as ring:
        first, second, third = (
            ring.submit(vectors[n], SearchSpec("docs", 1, filter=filter_bytes(number_is(n)))) for n in range(3)
        )
        until(lambda: waiting(pool)() == 3)
        assert ring.cancel(second)
        found: list[Any] = []
        until(lambda: bool(found), lambda: found.extend(ring.poll()))
        assert [(one.request_id, one.status) for one in found] == [(second, "cancelled")]
        slow.release()
        until(lambda: len(found) == 3, lambda: found.extend(ring.poll()))
        assert {one.request_id: one.status for one in found[1:]} == {first: "ok", third: "ok"}
    assert slow.begun == 2


def test_the_queries_of_a_client_that_is_gone_are_dropped(
    pool: InProcessPool, slow: Evaluations, client: SearchClient, vectors: Vectors
) -> None:
    with RingClient(pool.endpoint, "gone", timeout_ms=60_000.0) as ring:
        for number in range(4):
            ring.submit(vectors[0], SearchSpec("docs", 1, filter=filter_bytes(number_is(number))))
        until(lambda: waiting(pool)() == 4)
    until(lambda: waiting(pool)() == 0)
    slow.release()
    assert client.search(vectors[3], 1, filter=number_is(3)).ids.tolist() == [3]


def test_a_client_cannot_take_all_places_of_waiting_queries(
    pool: InProcessPool, slow: Evaluations, client: SearchClient, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtered_requests, "MOST_WAITING", 8)
    with RingClient(pool.endpoint, "storm", timeout_ms=60_000.0) as ring:
        for number in range(8):
            ring.submit(vectors[0], SearchSpec("docs", 1, filter=filter_bytes(number_is(number))))
        found: list[Any] = []
        until(lambda: len(found) == 4, lambda: found.extend(ring.poll()))
        assert [one.status for one in found] == ["overloaded"] * 4
        ticket = client.submit(vectors[9], 1, filter=number_is(9))
        until(lambda: waiting(pool)() == 5)
        slow.release()
        assert collect(client, 1)[ticket].checked().ids.tolist() == [9]
        until(lambda: len(found) == 8, lambda: found.extend(ring.poll()))
        assert [one.status for one in found[4:]] == ["ok"] * 4


def test_a_pool_that_drains_answers_the_queries_that_wait(
    pool: InProcessPool, slow: Evaluations, client: SearchClient, vectors: Vectors
) -> None:
    ticket = client.submit(vectors[2], 1, filter=number_is(2))
    until(lambda: waiting(pool)() == 1)
    with pool.held():
        pool.pool.drain()
        assert pool.pool.busy
    slow.release()
    assert collect(client, 1)[ticket].checked().ids.tolist() == [2]
    until(lambda: not pool.pool.busy)


# ---- collections


class Searches:
    """Searches of one filter that are in progress, each on a thread."""

    def __init__(self, client: SearchClient) -> None:
        self._client = client
        self.tickets: list[int] = []

    def start(self, query: Vectors, k: int, wanted: dict[str, Any]) -> None:
        self.tickets.append(self._client.submit(query, k, filter=wanted))

    def results(self) -> list[Sequence[int]]:
        found = collect(self._client, len(self.tickets))
        return [found[ticket].checked().ids.tolist() for ticket in self.tickets]


def test_a_write_during_an_evaluation_is_seen_by_later_queries_and_no_query_misses_a_replaced_document(
    harness: WrittenCollection, serve: MakeServed
) -> None:
    harness.upsert("a", "b", tenant="acme")
    harness.writer.flush()
    harness.upsert("c", tenant="acme")
    served = serve(harness.path)
    slow = Evaluations(served.pool, 0)
    old = harness.writer.state.rows_of(["a", "b", "c"])
    searches, query = Searches(served.client), np.zeros(DIM, np.float32)
    searches.start(query, 10, tenant_filter("acme"))
    until(lambda: slow.begun == 1)
    harness.upsert("a", tenant="acme")  # replaces a sealed row
    harness.upsert("d", tenant="acme")
    served.until_found(query, harness.nearest(query, 4))
    searches.start(query, 10, tenant_filter("acme"))
    until(lambda: waiting(served.pool)() == 2)
    slow.release()
    new = harness.writer.state.rows_of(["a", "b", "c", "d"])
    before, after = map(sorted, searches.results())
    assert before in (sorted(old.values()), sorted(new.values()))
    assert after == sorted(new.values())


@pytest.mark.parametrize("change", ["seal", "merge", "delete"])
def test_a_filter_in_evaluation_survives_changes_of_the_segments(
    harness: WrittenCollection, serve: MakeServed, change: str
) -> None:
    harness.upsert(*(f"a-{n}" for n in range(40)), tenant="acme")
    harness.writer.flush()
    harness.upsert(*(f"b-{n}" for n in range(40)), tenant="acme")
    served = serve(harness.path)
    slow = Evaluations(served.pool, 0)
    searches, query = Searches(served.client), np.zeros(DIM, np.float32)
    searches.start(query, 5, tenant_filter("acme"))
    until(lambda: slow.begun == 1)
    if change == "delete":
        harness.delete("a-1", "b-1")
    else:
        harness.writer.flush()
        if change == "merge":
            harness.writer.compact()
        segments = 1 if change == "merge" else 2
        until(lambda: len(served.pool.pool.live.indexes) == segments)
    slow.release()
    rows = harness.writer.state.rows_of(harness.nearest(query, 100))
    if change == "delete":
        assert len(searches.results()[0]) == 5  # a state from before the delete or after it
    else:
        assert searches.results() == [[rows[name] for name in harness.nearest(query, 5)]]
    served.until_found(query, harness.nearest(query, 5), filter=tenant_filter("acme"))
