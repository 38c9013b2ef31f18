"""Sharded collections: each row is in one shard; ids and documents equal the unsharded collection's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import CollectionError
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.neighbors import merge_neighbors

VECTORS = np.random.default_rng(0).normal(size=(101, 8)).astype(np.float32)


def test_a_sharded_collection_equals_an_unsharded_one(tmp_path: Path) -> None:
    ids = np.arange(101) * 3 + 7
    bulk_load.build(VECTORS, tmp_path / "one", metric="l2", degree=8, ids=ids)
    bulk_load.build(VECTORS, tmp_path / "three", metric="l2", degree=8, ids=ids, shards=3)
    with CollectionReader(tmp_path / "one") as one, CollectionReader(tmp_path / "three") as three:
        assert [segment.size for segment in three.state.segments] == [34, 34, 33]
        expected, near = one.search(VECTORS[:20], 5, top_m=101)
        found, distances = three.search(VECTORS[:20], 5, top_m=101)
        assert found.tolist() == expected.tolist()
        assert distances == pytest.approx(near, abs=1e-5)
        assert three.description.shards == 3
    CollectionReader.verify(tmp_path / "three")


@pytest.mark.parametrize("shards", [0, 9])
def test_a_number_of_shards_out_of_bounds_is_refused(tmp_path: Path, shards: int) -> None:
    makes: list[Callable[[Path], object]] = [
        lambda out: bulk_load.build(VECTORS, out, shards=shards),
        partial(bulk_load.create, dim=8, shards=shards),
    ]
    for make in makes:
        with pytest.raises(CollectionError, match=rf"shards is {shards}, outside 1..8"):
            make(tmp_path / "x")
        assert not (tmp_path / "x").exists()


@given(
    distances=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=6), min_size=1, max_size=4),
    k=st.integers(1, 8),
)
def test_merging_returns_the_nearest_and_breaks_ties_by_id(distances: Any, k: int) -> None:
    parts, every, row = [], [], 0
    for values in distances:
        ids = np.arange(row, row + len(values))[::-1].copy()
        row += len(values)
        parts.append((ids, np.array(values, np.float32)))
        every += list(zip(values, ids.tolist(), strict=True))
    ids, near = merge_neighbors(parts, k)
    assert list(zip(near.tolist(), ids.tolist(), strict=True)) == sorted(every)[:k]
