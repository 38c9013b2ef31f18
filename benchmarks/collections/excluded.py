"""Filters that exclude a query's neighbourhood: `python -m benchmarks.collections --excluded`.

Each query has a filter of its own. Rows are labelled by the nearest of 64 cluster centres; a filter excludes the
query's nearest clusters and then random others, until a third of the rows is left. Others keep the half-space that the
query is not in, or exclude the rows nearest to the query. Without a filter, and with filters without correlation, the
same queries are measured beside them. As in a pool, queries run one at a time through the engine's compiled functions.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collections.switch import K, answer
from benchmarks.common.data import Array, nearest
from benchmarks.common.report import table
from gpu import CpuEngine, GraphIndex
from gpu.index.data import bitmap
from runtime.node.worker_config import PoolSection

CLUSTERS = 64
LEFT = 1 / 3
NEAR = (1, 4, 16, 64)
"""Nearest clusters that are excluded first."""
RECALL, LIMIT_MS = 0.99, 3.0
TOP_M, WIDTH = PoolSection().top_m, PoolSection().search_width
_SAMPLE, _ROUNDS = 8192, 8
Passing = Callable[[Array], Array]
"""Which rows pass the filter of a query, float32 [d]: bool [N]."""


def labels(base: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Return centres [CLUSTERS, d] (k-means of a sample), and each row's nearest, int64 [N]."""
    sample = base[random.permutation(len(base))[:_SAMPLE]]
    centres = sample[:CLUSTERS].copy()
    for _ in range(_ROUNDS):
        of = nearest(centres, sample, 1)[:, 0]
        for cluster in np.unique(of):
            centres[cluster] = sample[of == cluster].mean(axis=0)
    return centres, nearest(centres, base, 1)[:, 0]


def filters(base: Array, random: np.random.Generator) -> dict[str, Passing]:
    """Return the filters by name."""
    centres, label = labels(base, random)
    norms = np.einsum("ij,ij->i", base, base)

    def clusters(near: int) -> Passing:
        def passing(query: Array) -> Array:
            order = nearest(centres, query[None], CLUSTERS)[0]
            order = np.concatenate([order[:near], random.permutation(order[near:])])
            before = np.cumsum(np.bincount(label, minlength=CLUSTERS)[order])
            excluded = order[: int(np.searchsorted(before, (1 - LEFT) * len(base), side="right"))]
            return np.asarray(~np.isin(label, excluded))

        return passing

    def half_space(query: Array) -> Array:
        direction = random.standard_normal(base.shape[1], np.float32)
        along = base @ direction
        along *= np.sign(query @ direction - np.median(along))
        return np.asarray(along < np.quantile(along, LEFT))

    def beyond(share: float) -> Passing:
        def passing(query: Array) -> Array:
            distances = norms - 2 * (base @ query)
            return np.asarray(distances > np.quantile(distances, share))

        return passing

    return {
        "no filter": lambda query: np.ones(len(base), bool),
        "random rows": lambda query: random.random(len(base)) < LEFT,
        **{f"nearest clusters: {near}": clusters(near) for near in NEAR},
        "the other half-space": half_space,
        "nearest third of the rows": beyond(1 / 3),
        "nearest two thirds of the rows": beyond(2 / 3),
    }


def built(base: Array, metric: str, seed: int, home: Path | None) -> GraphIndex:
    """Return an index as a collection has it, with codes; one that an earlier call has left in `home`, if given."""
    if home is not None and home.exists() and (index := GraphIndex.load(home)).size == len(base):
        return index
    index = GraphIndex.build(base, metric=metric, neighbor_codes=True, seed=seed)  # type: ignore[arg-type]
    if home is not None:
        index.save(home)
    return index


def excluded(base: Array, queries: Array, metric: str, seed: int, home: Path | None = None) -> list[dict[str, Any]]:
    """Measure recall@10, the worst query's, and milliseconds a query, of each of `filters`."""
    index, random = built(base, metric, seed, home), np.random.default_rng(seed)
    engine = CpuEngine({"all": index}, slots=8, max_k=K)
    backend = engine.backend()
    words = np.array([*backend[:4], backend.set_filter, backend.handle], np.int64)
    report, ids, distances = np.zeros(18, np.int64), np.zeros(K, np.int64), np.zeros(K, np.float32)
    queries, found = np.ascontiguousarray(queries, np.float32), []
    norms = np.einsum("ij,ij->i", base, base)
    for name, passing in filters(base, random).items():
        recalls, took_ms = [], []
        for number, query in enumerate(queries):
            shown = passing(query)
            bits, own = bitmap(shown, len(base))[None], np.flatnonzero(shown)
            if number == 0:
                answer(words, query[None], bits, len(own), TOP_M, WIDTH, 1, report, ids, distances)  # compiles
            begin = time.perf_counter()
            answer(words, query[None], bits, len(own), TOP_M, WIDTH, 1, report, ids, distances)
            took_ms.append((time.perf_counter() - begin) * 1e3)
            truth = own[np.argpartition((norms - 2 * (base @ query))[own], K)[:K]]
            recalls.append(len(set(ids.tolist()) & set(truth.tolist())) / K)
        p50, p99 = (float(one) for one in np.percentile(took_ms, (50, 99)))
        found.append(
            {"filter": name, "recall": float(np.mean(recalls)), "worst": min(recalls), "p50 ms": p50, "p99 ms": p99}
        )
        print(found[-1], flush=True)
    return found


def report_excluded(sets: dict[str, Any]) -> str:
    """Format the results of some data sets as Markdown."""
    rows = []
    for name, one in sets.items():
        for found in one["found"]:
            reached = found["recall"] >= RECALL and found["p50 ms"] <= LIMIT_MS
            figures = [f"{found[key]:.3f}" for key in ("recall", "worst", "p50 ms", "p99 ms")]
            rows.append([f"{name}, {one['rows']:,} rows", found["filter"], *figures, "yes" if reached else "no"])
    machines = "; ".join(dict.fromkeys(f"{one['processor']}, {one['load']}" for one in sets.values()))
    head = ["", "excluded first", "recall@10", "worst query", "p50 ms", "p99 ms", f"≥ {RECALL}, ≤ {LIMIT_MS:.0f} ms"]
    shipped = f"top_m {TOP_M}, search_width {WIDTH}, one query at a time"
    first = f"A third of the rows passes unless the name says otherwise; {shipped}; {machines}"
    return "\n".join([first, "", *table(head, rows)])
