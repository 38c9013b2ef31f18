"""Tests of prepared queries: their derived values equal those computed by numpy, every time."""

import numpy as np
import pytest

from gpu.cpu.queries import QUERY_SKETCH, SKETCH_STEP, QueryEncoding, prepare, prepared_bytes
from gpu.index.rows import Metric, aligned_empty, checked_vectors, encode
from tests.gpu.datasets import METRICS


@pytest.mark.parametrize("metric", METRICS)
def test_a_querys_sketch_is_its_projection_every_time_it_is_prepared(metric: Metric) -> None:
    random = np.random.default_rng(3)
    vectors = checked_vectors(random.normal(size=(4100, 384)).astype(np.float32), metric)
    rows = encode(vectors, metric, "float32", pairs=random.integers(4100, size=(4096, 2)))
    assert rows.sketch is not None
    queries = random.normal(size=(64, 384)).astype(np.float32)
    shifted = queries.astype(np.float64)
    if metric == "cosine":
        shifted /= np.linalg.norm(shifted, axis=1, keepdims=True)
    if metric == "l2":
        shifted = shifted * rows.scale - rows.centre
    expected = shifted @ rows.sketch.projection[:, :384].T.astype(np.float64)
    encoding = QueryEncoding(rows)
    half = expected.shape[1] // 2
    places = np.arange(half)
    lower = (places // 32) * 64 + places % 32
    for _ in range(20):
        prepared = aligned_empty((len(queries), prepared_bytes(rows)), np.uint8)
        prepare(queries, encoding, prepared)
        steps = prepared[:, SKETCH_STEP : SKETCH_STEP + 4].copy().view(np.float32)
        lanes = (
            prepared[:, QUERY_SKETCH : QUERY_SKETCH + 2 * encoding.record.sketch_lanes].copy().view(np.int16) * steps
        )
        found = np.hstack([lanes[:, lower], lanes[:, lower + 32]])
        assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
