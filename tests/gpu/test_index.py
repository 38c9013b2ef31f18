"""Tests of the index's public interface: building, searching and argument validation."""

import numpy as np
import pytest

from gpu import GraphIndex, InvalidParams, InvalidVector, SearchParams
from gpu.index.rows import Dtype, Metric
from tests.gpu.datasets import DTYPES, KINDS, METRICS, clustered, exact_neighbors, exact_vectors, recall


@pytest.fixture(scope="module")
def random() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize(("metric", "dtype"), KINDS)
def test_recall_is_high_on_clustered_data(random: np.random.Generator, metric: Metric, dtype: Dtype) -> None:
    vectors, queries = np.split(clustered(random, 4300, 128), [4200])
    index = GraphIndex.build(vectors, metric=metric, dtype=dtype)
    ids, distances = index.search(queries, k=10, top_m=64)
    assert recall(ids, exact_neighbors(vectors, queries, metric, 10)) > (0.95 if metric != "ip" else 0.9)
    assert (np.diff(distances, axis=1) >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_distances_are_the_metric_s(random: np.random.Generator, dtype: Dtype) -> None:
    vectors, queries = random.standard_normal((300, 40)), random.standard_normal((5, 40))
    tolerance = {"float32": 1e-5, "float16": 2e-2}[dtype]
    for metric in METRICS:
        ids, distances = GraphIndex.build(vectors, metric=metric, dtype=dtype).search(queries, k=3)
        near = vectors[ids]
        dots = np.einsum("qkd,qd->qk", near, queries)
        norms = np.linalg.norm(near, axis=2) * np.linalg.norm(queries, axis=1)[:, None]
        expected = {"cosine": 1 - dots / norms, "ip": -dots, "l2": np.square(near - queries[:, None]).sum(axis=2)}
        np.testing.assert_allclose(distances, expected[metric], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("metric", "dtype"), KINDS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_fewer_vectors_than_k_or_degree_leave_results_missing(
    random: np.random.Generator, metric: Metric, dtype: Dtype, count: int
) -> None:
    vectors = exact_vectors(random, count)
    ids, distances = GraphIndex.build(vectors, metric=metric, dtype=dtype).search(vectors, k=50)
    for row, far in zip(ids, distances, strict=True):
        assert sorted(row[:count].tolist()) == list(range(count))
        assert (row[count:] == -1).all()
        assert np.isinf(far[count:]).all()
        assert np.isfinite(far[:count]).all()


def test_equal_vectors_are_all_found_each_once() -> None:
    index = GraphIndex.build(np.ones((50, 8)), metric="l2")
    ids, distances = index.search(np.ones((1, 8)), k=50)
    assert sorted(ids[0].tolist()) == list(range(50))
    assert (distances == 0).all()


def test_a_zero_vector_has_cosine_distance_one_to_everything() -> None:
    index = GraphIndex.build([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], metric="cosine")
    assert index.search([[2.0, 0.0]], k=3)[0].tolist() == [[1, 0, 2]]
    assert index.search([[2.0, 0.0]], k=3)[1].tolist() == [[0.0, 1.0, 2.0]]
    assert index.search([[0.0, 0.0]], k=3)[1].tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.parametrize(("metric", "dtype"), KINDS)
def test_neighbors_do_not_depend_on_the_scale_of_the_vectors(size: float, dtype: Dtype, metric: Metric) -> None:
    random = np.random.default_rng(2)
    vectors, queries = random.standard_normal((500, 24)), random.standard_normal((20, 24))
    ids, distances = GraphIndex.build(vectors * size, metric=metric, dtype=dtype).search(queries * size, k=5, top_m=128)
    assert recall(ids, exact_neighbors(vectors, queries, metric, 5)) > 0.95
    assert np.isfinite(distances).all()


def test_ids_are_the_caller_s_up_to_the_largest() -> None:
    top = 2**63 - 1
    index = GraphIndex.build(np.eye(3), metric="l2", ids=np.array([top, 7, top - 1], np.uint64))
    assert index.search(np.eye(3), k=1)[0].tolist() == [[top], [7], [top - 1]]


def test_results_do_not_depend_on_the_number_of_threads(random: np.random.Generator) -> None:
    vectors, queries = clustered(random, 1500, 32), clustered(random, 70, 32)
    index = GraphIndex.build(vectors, threads=2)
    one, three = index.search(queries, threads=1), index.search(queries, threads=3)
    assert np.array_equal(one[0], three[0])
    assert np.array_equal(one[1], three[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_rejected_with_their_row(value: float) -> None:
    vectors = np.ones((5, 3))
    vectors[3, 1] = value
    for metric in METRICS:
        with pytest.raises(InvalidVector, match=r"row 3 holds .* at position 1"):
            GraphIndex.build(vectors, metric=metric)
    index = GraphIndex.build(np.ones((5, 3)))
    with pytest.raises(InvalidVector, match=r"query 3 holds .* at position 1"):
        index.search(vectors)


def test_norms_beyond_float32_are_rejected_except_under_cosine() -> None:
    vectors = np.full((2, 4), 1e30)
    with pytest.raises(InvalidVector, match="row 0 is too long"):
        GraphIndex.build(vectors, metric="l2")
    assert GraphIndex.build(vectors, metric="cosine").search(np.ones((1, 4)), k=1)[1] == pytest.approx(0, abs=1e-6)
    with pytest.raises(InvalidVector, match="query 0 is too long"):
        GraphIndex.build(np.ones((2, 4)), metric="ip").search(vectors)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_empty_or_misshapen_input_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidVector, match="shape"):
        GraphIndex.build(np.ones(shape))


def test_wrong_dims_and_types_are_rejected() -> None:
    index = GraphIndex.build(np.eye(4))
    with pytest.raises(InvalidVector, match=r"needs \[q, 4\]"):
        index.search(np.ones((2, 5)))
    with pytest.raises(InvalidVector, match=r"needs \[q, 4\]"):
        index.search(np.ones(4))
    with pytest.raises(InvalidVector, match="dtype"):
        GraphIndex.build(np.array([["a", "b"]]))
    with pytest.raises(InvalidVector, match="ids have"):
        GraphIndex.build(np.eye(4), ids=[1, 2, 3])
    with pytest.raises(InvalidVector, match="negative"):
        GraphIndex.build(np.eye(4), ids=[1, 2, 3, -4])
    with pytest.raises(InvalidVector, match="over int64"):
        GraphIndex.build(np.eye(2), ids=np.array([0, 2**63], np.uint64))


@pytest.mark.parametrize("degree", [-1, 0, 1, 513])
def test_a_degree_out_of_range_is_rejected(degree: int) -> None:
    with pytest.raises(InvalidParams, match=f"degree is {degree}, outside 2..512"):
        GraphIndex.build(np.eye(4), degree=degree)


def test_unknown_metrics_and_dtypes_are_rejected() -> None:
    with pytest.raises(InvalidParams, match="none of cosine, l2, ip"):
        GraphIndex.build(np.eye(4), metric="hamming")  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="none of float32, float16"):
        GraphIndex.build(np.eye(4), dtype="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"k": 65}, r"k is 65, outside 1..64 \(top_m\)"),
        ({"k": 0}, "k is 0"),
        ({"top_m": 4097}, "top_m is 4097, outside 1..4096"),
        ({"search_width": 33}, "search_width is 33, outside 1..32"),
        ({"patience": 0}, "patience is 0"),
        ({"k": 2.0}, "must be an integer"),
        ({"k": True}, "must be an integer"),
    ],
)
def test_parameters_out_of_range_are_rejected_with_their_limit(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        SearchParams(**wanted)
