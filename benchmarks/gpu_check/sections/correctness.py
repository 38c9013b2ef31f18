"""Correctness of search results: against exact search and the CPU engine, with poisoned result memory."""

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.data import DataSet
from benchmarks.gpu_check.load_driver import run_load
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.synthetic import random_set
from gpu import Engine, GraphIndex, SearchParams, open_engine

_POISON_NODE, _POISON_DISTANCE = -77, np.float32(-1e30)
_LEAST_RECALL = 0.85
_TOLERANCE = {"float32": 1e-4, "float16": 5e-3}  # relative error of distances against exact ones


def check(setup: Setup, outcome: Outcome) -> None:
    """Check random vectors in several dtypes and metrics, then the run's data. Raises AssertionError."""
    rows, queries = (1000, 60) if setup.small else (5000, 300)
    for number, (metric, dtype, dim) in enumerate(
        (("l2", "float32", 24), ("ip", "float16", 96), ("cosine", "float16", 200), ("l2", "float32", 40))
    ):
        made = random_set(rows, dim, queries, seed=1000 + number)
        index = GraphIndex.build(
            made.base,
            metric=metric,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            degree=16,
            neighbor_codes=False,
            threads=1 if setup.small else 16,
        )
        exact = DataSet(made.name, metric, made.base, made.queries, _exact(made.base, made.queries, metric))
        engine = open_engine(setup.device, {"docs": index}, slots=min(64, setup.slots), max_top_m=128)
        checked = _checked(engine, index, exact, SearchParams(10, 128, 4))
        engine.close()
        outcome.add(f"random, {dim} dimensions, {metric}, {dtype}: recall@10", f"{checked['recall']:.4f}")
        outcome.add("… same ids as the CPU engine", f"{checked['same_as_cpu']:.2%}")
        outcome.data[f"random-{metric}-{dtype}"] = checked
    engine = setup.engine(min(256, setup.slots))
    sample = setup.data.queries[: 50 if setup.small else 2000]
    real = DataSet(setup.data.name, setup.data.metric, setup.data.base, sample, setup.data.truth[: len(sample)])
    checked = _checked(engine, setup.index, real, setup.params)
    engine.close()
    outcome.add(f"{setup.data.name}: recall@10", f"{checked['recall']:.4f}")
    outcome.add("… same ids as the CPU engine", f"{checked['same_as_cpu']:.2%}")
    outcome.data[setup.data.name] = checked


def _checked(engine: Engine, index: GraphIndex, data: DataSet, params: SearchParams) -> dict[str, Any]:
    poisoned = poison(engine)
    load = run_load(engine, data.queries, params)
    again = run_load(engine, data.queries[::-1].copy(), params)
    assert load.finished == len(data.queries), f"{load.finished} of {len(data.queries)} queries finished"
    ids, distances = load.ids, load.distances
    assert ids.min() >= 0, "an id is missing or a poison value"
    assert ids.max() < index.size, f"id {ids.max()} of {index.size}"
    assert np.isfinite(distances).all(), "a distance is not finite"
    assert (np.diff(distances, axis=1) >= 0).all(), "distances are not in order"
    assert all(len(set(row)) == len(row) for row in ids.tolist()), "an id is duplicated"
    true = _distances(data.base, data.queries, ids, data.metric)
    scale = max(float(np.abs(true).max()), 1e-9)
    error = float(np.abs(true - distances).max()) / scale
    assert error < _TOLERANCE[index.dtype], f"distances are off by {error:.2e} of the largest"
    recall = data.recall(ids)
    assert recall > _LEAST_RECALL, f"recall@10 is {recall:.3f}"
    assert np.array_equal(again.ids[::-1], ids), "results depend on the order of queries"
    cpu = index.search(data.queries, params.k, params.top_m, params.search_width)[0]
    return {
        "recall": recall,
        "distance_error": error,
        "same_as_cpu": float(np.mean(ids == cpu)),
        "poisoned": poisoned,
        "queries": len(ids),
    }


def poison(engine: Engine) -> bool:
    """Fill the memory of results with impossible values. Returns False if it is not accessible."""
    memory = getattr(engine, "_memory", None)
    if memory is None:
        return False
    memory.nodes[:] = _POISON_NODE
    memory.raw[:] = _POISON_DISTANCE
    return True


def _exact(base: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], metric: str) -> npt.NDArray[np.int64]:
    left, right = queries.astype(np.float64), base.astype(np.float64)
    if metric == "cosine":
        right /= np.linalg.norm(right, axis=1, keepdims=True)
    distances = -(left @ right.T)
    if metric == "l2":
        distances = np.square(right).sum(axis=1) + 2 * distances
    return np.argsort(distances, axis=1, kind="stable")[:, :10]


def _distances(
    base: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], metric: str
) -> npt.NDArray[np.float64]:
    """Return the metric's distances of queries to found rows, in double precision."""
    rows, vectors = base[ids].astype(np.float64), queries[:, None].astype(np.float64)
    if metric == "l2":
        distances: npt.NDArray[np.float64] = np.square(rows - vectors).sum(axis=2)
        return distances
    dots = (rows * vectors).sum(axis=2)
    if metric == "ip":
        return np.asarray(-dots)
    return np.asarray(1 - dots / np.maximum(np.linalg.norm(rows, axis=2) * np.linalg.norm(vectors, axis=2), 1e-30))
