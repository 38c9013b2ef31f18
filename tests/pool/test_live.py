"""Live collections in a pool: what was written is found, what was deleted is not, while segments come and go."""

import threading
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import InvalidFilter, InvalidRequest
from runtime.pool.process import Timing
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.gpu.datasets import clustered
from tests.pool.conftest import MakeClient, MakePool, MakeServed
from tests.pool.live_stand import DIM, SEALED, Stand, of
from tests.pool.pools import attached, collect


def test_what_is_written_is_found_and_what_is_deleted_is_not(stand: Stand, serve: MakeServed) -> None:
    served = serve(stand.path)
    query = np.zeros(DIM, np.float32)
    assert served.find(query) == []
    stand.upsert("a", "b", "c")
    served.until_found(query, stand.nearest(query, 3))
    stand.delete("b")
    assert "b" not in served.find(query)  # at once: no answer has a document that was deleted before it was asked
    served.until_found(query, stand.nearest(query, 2))
    stand.upsert("a")
    served.until_found(stand.held["a"][0], stand.nearest(stand.held["a"][0], 2))


def test_no_search_of_any_client_finds_a_row_whose_delete_was_acknowledged_before(
    stand: Stand, serve: MakeServed
) -> None:
    served = serve(stand.path)
    for change in range(5):
        stand.upsert("a", "b", *(f"{change}-{n}" for n in range(20)))
        row, query = stand.writer.state.rows_of(["a"])["a"], stand.held["a"][0]
        until(lambda row=row, query=query: served.client.search(query, 1).ids.tolist() == [row])  # type: ignore[misc]
        stand.delete("a")
        assert row not in served.client.search(query, 10).ids
        if change == 2:
            stand.writer.flush()


def test_a_delete_waits_for_a_pool_that_has_not_taken_it_in(stand: Stand, serve: MakeServed) -> None:
    stand.upsert("a", "b")
    served = serve(stand.path)
    served.until_found(np.zeros(DIM, np.float32), stand.nearest(np.zeros(DIM, np.float32), 2))
    deletion = threading.Thread(target=lambda: stand.delete("a"))
    with served.pool.held():
        deletion.start()
        until(lambda: stand.writer.state.sequence == 2)  # it is in the log
        assert deletion.is_alive()
    deletion.join(60)
    assert not deletion.is_alive()


def test_what_is_written_is_taken_in_however_seldom_the_pool_does_all_that_only_python_can(
    stand: Stand, make_pool: MakePool, make_client: MakeClient
) -> None:
    plan = plan_of(stand.path)
    pool = make_pool(plan, timing=Timing(control_ns=3600 * 10**9)).start()
    client = attached(make_client(plan))
    turns = pool.pool.control_runs
    stand.upsert("a")
    until(lambda: len(client.search(np.zeros(DIM, np.float32), 1).ids) == 1)
    assert pool.pool.control_runs <= turns + 3  # not one for each look at the files


def test_segments_are_sealed_and_merged_under_searches_and_every_answer_is_the_nearest(
    stand: Stand, serve: MakeServed
) -> None:
    stand.upsert(*(f"first-{n}" for n in range(SEALED)))
    stand.writer.flush()
    served = serve(stand.path)
    queries = clustered(np.random.default_rng(9), 5, DIM)
    for change in range(4):
        stand.upsert(*(f"{change}-{n}" for n in range(SEALED)))
        stand.delete(*(f"first-{n}" for n in range(change, SEALED, 7)))
        if change == 2:
            stand.writer.compact()
        elif change != 3:
            stand.writer.flush()
        for query in queries:
            served.until_found(query, stand.nearest(query, 10))
    loaded = served.pool.engine.dims
    until(lambda: len(served.pool.engine.dims) == 2)  # one merged segment and the growing rows; the others have left
    assert loaded


def test_filters_see_what_was_written_since_they_were_evaluated(stand: Stand, serve: MakeServed) -> None:
    stand.upsert(*(f"acme-{n}" for n in range(SEALED)), tenant="acme")
    stand.writer.flush()
    stand.upsert("blue-0", tenant="blue")
    served, query = serve(stand.path), np.zeros(DIM, np.float32)
    for tenant in ("acme", "blue"):
        assert served.find(query, filter=of(tenant)) == stand.nearest(query, 10, {"tenant": tenant})
    stand.upsert("blue-1", tenant="blue")
    stand.delete(*stand.nearest(query, 3, {"tenant": "acme"}))
    for tenant in ("acme", "blue"):
        served.until_found(query, stand.nearest(query, 10, {"tenant": tenant}), filter=of(tenant))


def test_an_attribute_that_is_met_for_the_first_time_can_be_asked_for_soon(stand: Stand, serve: MakeServed) -> None:
    stand.upsert("a")
    served, query = serve(stand.path), np.zeros(DIM, np.float32)
    wanted = {"type": "eq", "key": "year", "value": 2024}
    with pytest.raises(InvalidFilter, match="no attribute 'year'; the known ones: none"):
        served.find(query, filter=wanted)
    stand.upsert("b", year=2024)

    def found() -> bool:
        served.client.poll()
        try:
            return served.find(query, filter=wanted) == ["b"]
        except InvalidFilter:
            return False

    until(found)


def test_what_the_collection_demands_is_demanded_by_its_pool(tmp_path: Path, serve: MakeServed) -> None:
    stand = Stand(tmp_path / "demanding", demanded="tenant")
    stand.upsert("a", tenant="acme")
    stand.upsert("b", tenant="blue")
    served, query = serve(stand.path), np.zeros(DIM, np.float32)
    with pytest.raises(InvalidRequest, match="demands a filter that binds 'tenant'"):
        served.find(query)
    assert served.find(query, filter={"type": "eq", "key": "tenant", "value": "blue"}) == ["b"]
    stand.writer.close()


def test_queries_in_flight_end_on_the_segments_that_they_began_with(
    stand: Stand, make_pool: MakePool, make_client: MakeClient
) -> None:
    for part in range(3):
        stand.upsert(*(f"{part}-{n}" for n in range(SEALED)))
        stand.writer.flush()
    plan = plan_of(stand.path, slots=2)
    pool = make_pool(plan).start()
    client = attached(make_client(plan))
    queries = clustered(np.random.default_rng(9), 40, DIM)
    with pool.held():
        tickets = [client.submit(query, 5, top_m=64) for query in queries]
        stand.writer.compact()
    found = collect(client, len(tickets))
    rows = stand.writer.state.rows_of([name for query in queries for name in stand.nearest(query, 5)])
    for ticket, query in zip(tickets, queries, strict=True):
        assert found[ticket].checked().ids.tolist() == [rows[name] for name in stand.nearest(query, 5)]
