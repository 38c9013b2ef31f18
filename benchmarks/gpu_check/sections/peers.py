"""Comparison with cuVS CAGRA in the same run, over the same graph and vectors, at equal recall.

Four measurements: throughput of one full batch; latency of single queries that arrive at 60% of that rate (cuVS gets
the arrivals of 1 ms windows as batches); latency of a single query, by a call of cuVS or by its persistent kernel,
whichever is faster; and single queries by eight threads through cuVS's C library. cuVS runs under its best conditions:
queries and results stay on the device, memory and resources are reused. Our queries and results are in host memory.
"""

import contextlib
import importlib
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from benchmarks.common.data import nearest
from benchmarks.gpu_check.cuvs_threads import Rate, ThreadedCuvs
from benchmarks.gpu_check.load_driver import LoadResult, poisson, run_load
from benchmarks.gpu_check.report import Outcome, micros, rate
from benchmarks.gpu_check.sections.load import figures, recall_of, repeated, summary
from benchmarks.gpu_check.sections.resident import SHARE
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.time_limit import Skipped

_TOP_MS = (16, 32, 48, 64, 96, 128, 192, 256)
_WINDOW_S = 1e-3
_ALLOWED = 0.002  # recall by which cuVS may be lower
_PERSISTENT_S = 0.5  # idle lifetime of its persistent kernel
_THREADS, _THREADS_S = 8, 1.0
_IDS_DTYPES = (np.uint32, np.int64)
_METHODS = {"a call": 0, "its persistent kernel, blocks of 64": 64, "its persistent kernel, blocks of 128": 128}


class Peer:
    """A CAGRA index of cuVS over our graph, with synchronous searches."""

    name = "cuVS"

    def __init__(self, setup: Setup) -> None:
        """Upload the graph. Raises Skipped if cuVS or CuPy is missing."""
        try:
            self._cupy = importlib.import_module("cupy")
            self._cagra = importlib.import_module("cuvs.neighbors.cagra")
            self._resources = importlib.import_module("cuvs.common").Resources()
            self.version = str(importlib.import_module("cuvs").__version__)
        except ImportError as error:
            raise Skipped(f"{error.name} is not installed") from None
        with contextlib.suppress(ImportError):  # as its documentation recommends for repeated searches
            importlib.import_module("rmm").reinitialize(pool_allocator=True, initial_pool_size=1 << 31)
        self._dtype = np.float16 if setup.index.dtype == "float16" else np.float32
        metric = "inner_product" if setup.data.metric == "ip" else "sqeuclidean"  # cosine: the set is normalised
        base = np.ascontiguousarray(setup.data.base.astype(self._dtype))
        graph = np.ascontiguousarray(setup.index.data.graph)
        # The index may only reference these arrays.
        self._held = (self._cupy.asarray(graph), self._cupy.asarray(base))
        self._index = self._cagra.from_graph(*self._held, metric=metric, resources=self._resources)
        self._resources.sync()
        self._results: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._params: dict[tuple[int, int], Any] = {}
        self._ids_dtype: Any = _IDS_DTYPES[0]
        self._metric = setup.data.metric
        self._threaded: ThreadedCuvs | None = None

    def put(self, queries: np.ndarray) -> Any:
        """Copy queries to the device."""
        return self._cupy.asarray(queries.astype(self._dtype, copy=False))

    def search(self, queries: Any, k: int, top_m: int, block: int = 0) -> Any:
        """Return ids [q, k] on the device; the next search of the same size overwrites them.

        block: threads of a block of the persistent kernel; 0: a call.
        """
        count = len(queries)
        if (top_m, block) not in self._params:
            options: dict[str, Any] = {}
            if block:
                options = {"algo": "single_cta", "persistent": True, "persistent_lifetime": _PERSISTENT_S}
                options["thread_block_size"] = block
            self._params[top_m, block] = self._cagra.SearchParams(itopk_size=top_m, **options)
        while True:
            if (count, k) not in self._results:
                shape = (count, k)
                self._results[shape] = self._cupy.empty(shape, self._ids_dtype), self._cupy.empty(shape, np.float32)
            nodes, distances = self._results[count, k]
            try:
                self._cagra.search(
                    self._params[top_m, block], self._index, queries, k, neighbors=nodes, distances=distances,
                    resources=self._resources,
                )  # fmt: skip
                break
            except (TypeError, ValueError) as error:  # 26.6 accepts uint32 only, other versions int64
                if "dtype" not in str(error) or self._ids_dtype is _IDS_DTYPES[-1]:
                    raise
                self._ids_dtype = _IDS_DTYPES[-1]
                self._results.clear()
        self._resources.sync()
        return nodes

    def threads(self, queries: Any, top_m: int, block: int, seconds: float) -> tuple[Rate, np.ndarray]:
        """Search single queries in 8 threads through the C library, by calls or with the persistent kernel."""
        if self._threaded is None:
            self._threaded = ThreadedCuvs(self._cupy, *self._held, self._metric)
        params = self._threaded.params(top_m, block, _PERSISTENT_S if block else 0.0)
        return self._threaded.single_queries(queries, 10, params, threads=_THREADS, seconds=seconds)

    def ids(self, on_device: Any) -> np.ndarray:
        """Copy ids to the host."""
        known: np.ndarray = self._cupy.asnumpy(on_device)
        return known


class StandIn:
    """Exact search on the CPU in place of cuVS, for dry runs."""

    name, version = "the stand-in", "none"

    def __init__(self, setup: Setup) -> None:
        self._base = setup.data.base

    def put(self, queries: np.ndarray) -> np.ndarray:
        """See `Peer.put`."""
        return queries

    def search(self, queries: np.ndarray, k: int, top_m: int, block: int = 0) -> np.ndarray:
        """See `Peer.search`."""
        if block:
            raise Skipped("no persistent kernel")
        return nearest(self._base, queries, k)

    def threads(self, queries: np.ndarray, top_m: int, block: int, seconds: float) -> tuple[Rate, np.ndarray]:
        """See `Peer.threads`: calls only, one thread, every query once."""
        begin = time.perf_counter()
        ids = np.concatenate([self.search(queries[i : i + 1], 10, top_m, block) for i in range(len(queries))])
        taken = time.perf_counter() - begin
        return Rate(len(queries) / taken, taken / len(queries)), ids

    def ids(self, on_device: np.ndarray) -> np.ndarray:
        """See `Peer.ids`."""
        return on_device


def check(setup: Setup, outcome: Outcome) -> None:
    """Measure ours, then cuVS. Raises Skipped if cuVS is not available."""
    queries = setup.data.queries
    full, batches, most, singles = (100, 100, 40, 10) if setup.small else (100_000, 10_000, 1_000_000, 200)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    outcome.data |= {"ours": ours, "theirs": theirs}
    with closing(setup.engine()) as engine:
        stream = repeated(queries, full)
        run_load(engine, stream[: full // 10], setup.params)
        load = run_load(engine, stream, setup.params)
        recall, ours["per_s"] = recall_of(setup, load), load.finished / load.seconds
        ours["recall"] = recall
        outcome.add("recall@10, ours", f"{recall:.4f} (top_m {setup.params.top_m})")
        outcome.add("full batch, ours, one query at a time admitted", rate(ours["per_s"]))
        alone = [run_load(engine, queries[i : i + 1], setup.params).latency_s[0] for i in range(singles)]
        ours["alone_s"] = float(np.median(alone))
        outcome.add("one query alone, p50, ours", micros(ours["alone_s"]))
        peer: Peer | StandIn = Peer(setup) if setup.on_gpu else StandIn(setup)
        top_m, theirs["recall"] = _equal(setup, peer, recall)
        outcome.data |= {"cuvs": peer.version, "itopk": top_m}
        outcome.add(f"recall@10, {peer.name}", f"{theirs['recall']:.4f} (itopk {top_m})")
        batch = peer.put(repeated(queries, batches))
        peer.search(batch, 10, top_m)
        theirs["per_s"] = len(batch) / min(_timed(lambda: peer.search(batch, 10, top_m)) for _ in range(5))
        outcome.add(f"full batch, {peer.name}, {batches:,} queries a call", rate(theirs["per_s"]))
        offered = setup.offered_per_s = SHARE * theirs["per_s"]
        count = min(int(offered * 2), most)
        arrivals = poisson(offered, count)
        outcome.data["offered_per_s"] = offered
        stream = repeated(queries, count)
        late = run_load(engine, stream, setup.params, arrivals, 8.0)
        ours["stream"] = figures(late)
        outcome.add(f"Poisson at {SHARE:.0%} of {peer.name}'s batch ({rate(offered)}), ours", summary(late))
        late = windowed(peer, stream, top_m, arrivals, 8.0)
        theirs["stream"] = figures(late)
        outcome.add(f"… {peer.name}, windows of 1 ms", summary(late))
    # Last: the persistent kernel occupies the device during its lifetime.
    theirs["alone_s"] = min(one_query(peer, queries[:singles], top_m, outcome).values())
    theirs["threads"] = by_threads(setup, peer, top_m, outcome)


def one_query(peer: Any, queries: np.ndarray, top_m: int, outcome: Outcome) -> dict[str, float]:
    """Return the median seconds of one query, by each available method."""
    on_device, medians = peer.put(queries), {}
    for name, block in _METHODS.items():
        what = f"one query alone, p50, {peer.name}, {name}"
        with _reported(what, outcome):
            peer.search(on_device[:1], 10, top_m, block)
            times = [
                _timed(lambda i=i, block=block: peer.search(on_device[i : i + 1], 10, top_m, block))
                for i in range(len(on_device))
            ]
            medians[name] = float(np.median(times))
            outcome.add(what, micros(medians[name]))
    return medians


def by_threads(setup: Setup, peer: Any, top_m: int, outcome: Outcome, seconds: float = _THREADS_S) -> dict[str, Any]:
    """Return the rate, median seconds and recall of single queries in 8 threads, by each available method.

    seconds: of each method; every query is searched at least once.
    """
    queries, measurements = setup.data.queries, {}
    on_device = peer.put(queries)
    for name, block in _METHODS.items():
        what = f"single queries by {_THREADS} threads, {peer.name}'s C library, {name}"
        with _reported(what, outcome):
            measured, ids = peer.threads(on_device, top_m, block, seconds)
            recall = setup.data.recall(ids)
            measurements[name] = {**measured._asdict(), "recall": recall}
            outcome.add(what, f"{rate(measured.per_s)}, p50 {micros(measured.p50_s)}, recall@10 {recall:.4f}")
    return measurements


@contextlib.contextmanager
def _reported(what: str, outcome: Outcome) -> Iterator[None]:
    """Report a method that is not available as a line."""
    try:
        yield
    except Skipped as reason:
        outcome.add(what, f"skipped: {reason}")
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # cuVS has no exception base class
        outcome.add(what, f"not possible: {error}")


def windowed(peer: Any, queries: np.ndarray, top_m: int, arrivals: np.ndarray, limit_s: float) -> LoadResult:
    """Search windows of arrivals as batches. Returns latencies from each arrival, without ids."""
    count = len(queries)
    on_device = peer.put(queries)
    latency = np.full(count, np.nan)
    first = batches = 0
    begin = time.perf_counter()
    while first < count and (now := time.perf_counter() - begin) < limit_s:
        if now < arrivals[first] + _WINDOW_S:
            continue
        last = int(np.searchsorted(arrivals, now, side="right"))
        peer.search(on_device[first:last], 10, top_m)
        latency[first:last] = time.perf_counter() - begin - arrivals[first:last]
        first, batches = last, batches + 1
    seconds = time.perf_counter() - begin
    return LoadResult(
        np.empty((count, 0), np.int64), np.empty((count, 0), np.float32), latency, seconds, batches, 0, 0.0
    )


def _equal(setup: Setup, peer: Peer | StandIn, recall: float) -> tuple[int, float]:
    """Return the smallest itopk with our recall, or the largest tried; and its recall."""
    on_device, reached = peer.put(setup.data.queries), 0.0
    for top_m in _TOP_MS:
        reached = setup.data.recall(peer.ids(peer.search(on_device, 10, top_m)))
        if reached >= recall - _ALLOWED:
            return top_m, reached
    return _TOP_MS[-1], reached


def _timed(act: Any) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
