"""cuVS CAGRA beside it, in the same run: over the same graph and vectors, at equal recall.

Three questions: queries a second in one full batch; latency when single queries arrive at 60% of that rate (cuVS gets
what came within a window of 1 ms as a batch); latency of one query alone.
"""

import importlib
import time
from typing import Any

import numpy as np

from benchmarks.common.data import nearest
from benchmarks.gpu_check.drive import Driven, drive, poisson
from benchmarks.gpu_check.report import Outcome, Skipped, micros, rate
from benchmarks.gpu_check.sections.load import figures, recall_of, repeated, summary
from benchmarks.gpu_check.setup import Setup

_TOP_MS = (16, 32, 48, 64, 96, 128, 192, 256)
_WINDOW_S = 1e-3
_SHARE = 0.6
_ALLOWED = 0.002  # recall that cuVS may be behind


class Peer:
    """A CAGRA index of cuVS over our graph, and searches that have ended when they return."""

    name = "cuVS"

    def __init__(self, setup: Setup) -> None:
        """Raises Skipped where cuVS or CuPy is missing."""
        try:
            self.cupy = importlib.import_module("cupy")
            self.cagra = importlib.import_module("cuvs.neighbors.cagra")
            self.version = str(importlib.import_module("cuvs").__version__)
        except ImportError as error:
            raise Skipped(f"{error.name} is not installed") from None
        dtype = np.float16 if setup.index.dtype == "float16" else np.float32
        self._dtype = dtype
        metric = "inner_product" if setup.data.metric == "ip" else "sqeuclidean"  # cosine: the set is normalised
        base = np.ascontiguousarray(setup.data.base.astype(dtype))
        graph = np.ascontiguousarray(setup.index.data.graph)
        self._held = (self.cupy.asarray(graph), self.cupy.asarray(base))  # the index may be no more than a view of them
        self._index = self.cagra.from_graph(*self._held, metric=metric)

    def search(self, queries: np.ndarray, k: int, top_m: int) -> np.ndarray:
        """Ids [q, k]; queries come from the host and ids go there, as with us."""
        asked = self.cupy.asarray(queries.astype(self._dtype, copy=False))
        params = self.cagra.SearchParams(itopk_size=top_m)
        _, neighbors = self.cagra.search(params, self._index, asked, k)
        found: np.ndarray = self.cupy.asnumpy(self.cupy.asarray(neighbors)).astype(np.int64)
        return found


class StandIn:
    """Exact search on the CPU in cuVS's place, so that a dry run takes every step of this."""

    name, version = "the stand-in", "none"

    def __init__(self, setup: Setup) -> None:
        self._base = setup.data.base

    def search(self, queries: np.ndarray, k: int, top_m: int) -> np.ndarray:
        """As `Peer.search`."""
        return nearest(self._base, queries, k)


def check(setup: Setup) -> Outcome:
    """Raises Skipped where cuVS cannot be asked."""
    peer: Peer | StandIn = Peer(setup) if setup.on_gpu else StandIn(setup)
    queries = setup.data.queries
    full, batches, most, singles = (100, 100, 40, 10) if setup.small else (20_000, 10_000, 200_000, 200)
    engine = setup.engine()
    ours = drive(engine, repeated(queries, full), setup.params)
    recall, our_rate = recall_of(setup, ours), ours.finished / ours.seconds
    top_m, their_recall = _equal(setup, peer, recall)
    batch = repeated(queries, batches)
    peer.search(batch, 10, top_m)
    times = [_timed(lambda: peer.search(batch, 10, top_m)) for _ in range(5)]
    capacity = len(batch) / min(times)
    offered = _SHARE * capacity
    count = min(int(offered * 2), most)
    stream = repeated(queries, count)
    arrivals = poisson(offered, count)
    ours_late = drive(engine, stream, setup.params, arrivals, 20.0)
    theirs_late = windowed(peer, stream, top_m, arrivals, 20.0)
    alone = [drive(engine, queries[i : i + 1], setup.params).latency_s[0] for i in range(singles)]
    their_alone = [_timed(lambda i=i: peer.search(queries[i : i + 1], 10, top_m)) for i in range(singles)]
    engine.close()
    lines = [
        ("recall@10, ours", f"{recall:.4f} (top_m {setup.params.top_m})"),
        (f"recall@10, {peer.name}", f"{their_recall:.4f} (itopk {top_m})"),
        ("full batch, ours, one query at a time admitted", rate(our_rate)),
        (f"full batch, {peer.name}, {batches:,} queries a call", rate(capacity)),
        (f"Poisson at {_SHARE:.0%} of {peer.name}'s batch ({rate(offered)}), ours", summary(ours_late)),
        (f"… {peer.name}, windows of 1 ms", summary(theirs_late)),
        ("one query alone, p50, ours", micros(float(np.median(alone)))),
        (f"one query alone, p50, {peer.name}", micros(float(np.median(their_alone)))),
    ]
    data: dict[str, Any] = {
        "cuvs": peer.version,
        "ours": {"recall": recall, "per_s": our_rate, "stream": figures(ours_late), "alone_s": alone},
        "theirs": {"recall": their_recall, "per_s": capacity, "stream": figures(theirs_late), "alone_s": their_alone},
        "itopk": top_m,
        "offered_per_s": offered,
    }
    return Outcome(lines, data)


def windowed(peer: Any, queries: np.ndarray, top_m: int, arrivals: np.ndarray, limit_s: float) -> Driven:
    """Batches of what arrived within a window since the first that waits; latency from each arrival."""
    count = len(queries)
    ids, latency = np.full((count, 10), -1, np.int64), np.full(count, np.nan)
    first = batches = 0
    begin = time.perf_counter()
    while first < count and (now := time.perf_counter() - begin) < limit_s:
        if now < arrivals[first] + _WINDOW_S:
            continue
        last = int(np.searchsorted(arrivals, now, side="right"))
        ids[first:last] = peer.search(queries[first:last], 10, top_m)
        latency[first:last] = time.perf_counter() - begin - arrivals[first:last]
        first, batches = last, batches + 1
    seconds = time.perf_counter() - begin
    return Driven(ids, np.zeros(ids.shape, np.float32), latency, seconds, batches, 0, 0.0)


def _equal(setup: Setup, peer: Peer | StandIn, recall: float) -> tuple[int, float]:
    """The least itopk with our recall, or the greatest that was tried; and its recall."""
    found = 0.0
    for top_m in _TOP_MS:
        found = setup.data.recall(peer.search(setup.data.queries, 10, top_m))
        if found >= recall - _ALLOWED:
            return top_m, found
    return _TOP_MS[-1], found


def _timed(act: Any) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
