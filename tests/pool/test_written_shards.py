"""Tests of collections of one shard and of two: each pool holds a shard, and answers are merged over all."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.testing.waiting import until
from tests.gpu.datasets import clustered
from tests.pool.conftest import MakeServed
from tests.pool.written_collection import DIM, SEALED, WrittenCollection, tenant_filter


@pytest.fixture(params=[1, 2])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def split(tmp_path: Path, shards: int) -> Iterator[WrittenCollection]:
    made = WrittenCollection(tmp_path / "split", shards=shards)
    yield made
    made.writer.close()


def test_answers_are_exact_over_all_shards_while_segments_are_sealed_and_merged(
    split: WrittenCollection, shards: int, serve: MakeServed
) -> None:
    split.upsert(*(f"first-{n}" for n in range(2 * SEALED)), tenant="acme")
    split.writer.flush()
    served = serve(split.path, shards=shards, workers=shards)
    queries = clustered(np.random.default_rng(9), 5, DIM)
    for change in range(4):
        split.upsert(*(f"{change}-{n}" for n in range(2 * SEALED)), tenant="blue")
        split.upsert("first-1", tenant="blue")  # a new text for the same id, in the same shard
        split.delete(*(f"first-{n}" for n in range(2 + change, 2 * SEALED, 7)))
        if change == 2:
            split.writer.compact()
        elif change != 3:
            split.writer.flush()
        for query in queries:
            served.until_found(query, split.nearest(query, 10))
            served.until_found(query, split.nearest(query, 10, {"tenant": "acme"}), filter=tenant_filter("acme"))
    until(lambda: len(served.pool.engine.dims) == 2)  # a merged segment and the growing rows; others were unloaded


def test_an_acknowledged_delete_holds_in_all_shards_and_replicas(
    split: WrittenCollection, shards: int, serve: MakeServed
) -> None:
    served = serve(split.path, shards=shards, workers=2 * shards)
    for change in range(5):
        names = [f"{change}-{n}" for n in range(20)]
        split.upsert(*names)
        query = split.held[names[0]][0]
        until(lambda query=query: served.find(query, 10) == split.nearest(query, 10))  # type: ignore[misc]
        gone = split.nearest(query, 6)
        split.delete(*gone)
        for _ in range(4):
            assert not set(gone) & set(served.find(query, 10))
        if change == 2:
            split.writer.flush()
