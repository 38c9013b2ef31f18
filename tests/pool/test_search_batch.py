"""Tests of batch searches: all queries are answered in order with rings of any size, and errors are per query."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex
from runtime.errors import InvalidRequest, Unavailable
from runtime.testing.pool import plan_of
from tests.pool.client_helpers import Vectors, attached, collect
from tests.pool.conftest import PATIENT, MakeClient, MakePool, MakeServed


@pytest.mark.parametrize("ring_slots", [2, 3, 256])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_of_any_size_is_answered_in_order(
    collection: Path, serve: MakeServed, queries: Vectors, index: GraphIndex, ring_slots: int, workers: int
) -> None:
    client = serve(collection, ring_slots=ring_slots, workers=workers).client
    batch = client.search_batch(queries, 4, top_m=32, search_width=2).checked()
    ids, distances = index.search(queries, 4, top_m=32, search_width=2)
    assert batch.ids.tolist() == ids.tolist()
    assert batch.distances.tolist() == distances.tolist()
    assert [result.ids.tolist() for result in batch] == ids.tolist()
    assert len(batch) == len(queries)
    assert client.poll() == []


def test_a_batch_leaves_other_queries_results_alone(collection: Path, serve: MakeServed, queries: Vectors) -> None:
    client = serve(collection, ring_slots=8).client
    tickets = [client.submit(query, 3, collection="docs") for query in queries[:6]]
    assert not client.search_batch(queries, 3).errors
    assert sorted(collect(client, 6)) == tickets


def test_errors_in_a_batch_are_reported_per_query(collection: Path, serve: MakeServed, queries: Vectors) -> None:
    client = serve(collection).client
    mixed = queries[:9].copy()
    mixed[[2, 7], 0] = np.nan
    batch = client.search_batch(mixed, 3)
    assert sorted(batch.errors) == [2, 7]
    assert all(isinstance(error, InvalidRequest) for error in batch.errors.values())
    assert batch.ids[2].tolist() == [-1] * 3
    assert np.isinf(batch.distances[7]).all()
    assert (batch.ids[[0, 1, 3, 4, 5, 6, 8]] >= 0).all()
    with pytest.raises(InvalidRequest, match=r"vector\[0\] is nan: not finite"):
        batch.checked()


def test_an_invalid_batch_is_rejected_as_a_whole(collection: Path, serve: MakeServed) -> None:
    invalid: list[tuple[Any, str]] = [
        ([0.5] * 16, "shape"), ([[0.5] * 7], "16"), ([[1.0], [1.0, 2.0]], "not an array"), (["a"], "not an array"),
    ]  # fmt: skip
    client = serve(collection).client
    for vectors, words in invalid:
        with pytest.raises(InvalidRequest, match=words):
            client.search_batch(vectors, 3)
    assert len(client.search([0.5] * 16, 3).ids) == 3


class Clock:
    """The real clock plus an offset set by the test."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


def test_a_batch_without_a_deadline_continues_while_answers_arrive(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(collection, ring_slots=4)
    make_pool(plan).start()
    clock = Clock()
    client = attached(make_client(plan, clock=clock))
    batch = client.batch(queries, 3, None, collection="docs")
    while not batch.done:
        batch.send()
        client.sleep((), 1)
        if any([batch.add(result) for result in client.poll()]):
            clock.ahead_ns += PATIENT.wait_ns // 2
    assert clock.ahead_ns > 2 * PATIENT.wait_ns
    assert not batch.result().errors


def test_a_batch_without_a_deadline_ends_when_answers_stop(
    collection: Path, make_pool: MakePool, make_client: MakeClient, queries: Vectors
) -> None:
    plan = plan_of(collection, ring_slots=4)
    pool = make_pool(plan).start()
    clock = Clock()
    client = attached(make_client(plan, clock=clock))
    with pool.held():
        batch = client.batch(queries, 3, None, collection="docs")
        batch.send()
        clock.ahead_ns += PATIENT.wait_ns
        batch.send()
    for result in collect(client, 4).values():
        batch.add(result)
    errors = batch.result().errors
    assert len(errors) == len(queries) - 4
    assert all(isinstance(error, Unavailable) and "had room" in str(error) for error in errors.values())
