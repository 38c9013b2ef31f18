"""Tests of searches restricted to allowed rows, and of exact searches."""

import numpy as np
import pytest

from gpu import GraphIndex, InvalidParams, SearchParams
from gpu.cpu.search import search
from gpu.index.data import bitmap
from gpu.index.rows import Dtype, Metric
from tests.gpu.datasets import KINDS, clustered, exact_neighbors, recall
from tests.gpu.reference import search_reference


def test_engine_and_reference_agree_on_estimated_candidates() -> None:
    random = np.random.default_rng(4)
    vectors, queries = clustered(random, 800, 40), clustered(random, 20, 40)
    index = GraphIndex.build(vectors, neighbor_codes=True)
    for part in (0.0, 0.05, 0.5):
        allowed = random.random(800) < part
        for query in queries:
            wanted = SearchParams(10, 40, 2)
            expected, _, _ = search_reference(index.data, query, wanted, allowed)
            found, _ = search(index.data, query[None], wanted, 1, allowed=bitmap(allowed, 800))
            assert (found >= 0).sum() == (expected >= 0).sum()
            # Another order of summation may break near ties differently.
            assert len(set(found[0].tolist()) - set(expected.tolist())) <= 1


@pytest.mark.parametrize(("metric", "dtype"), KINDS)
def test_exact_search_finds_the_nearest_of_all_rows_and_of_a_subset(metric: Metric, dtype: Dtype) -> None:
    random = np.random.default_rng(5)
    vectors, queries = clustered(random, 700, 24), clustered(random, 9, 24)
    index = GraphIndex.build(vectors, metric=metric, dtype=dtype)
    some = np.flatnonzero(random.random(700) < 0.2)

    # Not 1: float16 rounds.
    assert recall(index.exact(queries, 10)[0], exact_neighbors(vectors, queries, metric, 10)) > 0.95
    found, distances = index.exact(queries, 10, some)
    assert recall(found, some[exact_neighbors(vectors[some], queries, metric, 10)]) > 0.95
    assert (np.diff(distances, axis=1) >= 0).all()
    walked = dict(zip(*[part[0].tolist() for part in index.search(queries[:1], 64, 700)], strict=True))
    for node, distance in zip(found[0].tolist(), distances[0].tolist(), strict=True):
        assert walked.get(node, distance) == pytest.approx(distance, abs=1e-4, rel=1e-4)


def test_exact_search_of_fewer_than_k_rows_pads_its_result() -> None:
    index = GraphIndex.build(np.eye(4, dtype=np.float32))
    found, distances = index.exact(np.eye(4, dtype=np.float32)[:1], 3, np.array([2]))
    assert found.tolist() == [[2, -1, -1]]
    assert distances[0, 1:].tolist() == [np.inf, np.inf]
    assert index.exact(np.eye(4, dtype=np.float32)[:1], 2, np.zeros(0, np.int64))[0].tolist() == [[-1, -1]]


def test_rows_and_bitmaps_of_the_wrong_size_are_rejected() -> None:
    index, query = GraphIndex.build(np.eye(4, dtype=np.float32)), np.ones((1, 4), np.float32)
    for allowed in (np.ones(3, bool), np.ones(4, np.uint8)):
        with pytest.raises(InvalidParams, match=r"bool \[4\]"):
            index.search(query, 1, allowed=allowed)  # type: ignore[arg-type]
    for rows in ([4], [-1]):
        with pytest.raises(InvalidParams, match=r"0\.\.3"):
            index.exact(query, 1, np.array(rows))
    with pytest.raises(InvalidParams, match="k is 0"):
        index.exact(query, 0)
