"""Data of a run: vectors, exact neighbours and graph, generated on the device; and the top_m for the target recall."""

import time

from benchmarks.common.data import DataSet, load
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.synthetic import random_set, synthetic_set
from gpu import DeviceUnavailable, GraphIndex, SearchParams
from gpu.build.cuvs_graph import import_cagra
from gpu.build.graph import build_graph
from gpu.index.data import IndexData
from gpu.index.rows import encode

_DEGREE, _SEED = 32, 0
_TOP_MS = (32, 48, 64, 96, 128, 192, 256)
_RECALL = 0.955  # slightly above the target
_SAMPLE = 500
_WITHOUT_TORCH = 100_000


def check(setup: Setup, outcome: Outcome) -> None:
    """Generate or load the data and build the graph. Raises AssertionError if no top_m reaches the recall."""
    begin = time.perf_counter()
    data = _data(setup)
    took = time.perf_counter() - begin
    outcome.add("vectors and exact neighbours", f"{len(data.base):,} × {data.base.shape[1]} in {took:.1f} s")
    setup.settings |= {"set": data.name, "vectors": len(data.base), "dtype": setup.dtype, "slots": setup.slots}
    threads = 1 if setup.small else 16
    if setup.source.index is not None:
        index = GraphIndex.load(setup.source.index)
    else:
        index, by = _built(setup, data, threads, outcome)
        setup.settings["graph"] = f"by {by}, degree {index.degree}"
    top_m, recall = _top_m(index, data, setup.top_m, threads)
    outcome.add("top_m for the recall", f"{top_m}, recall@10 {recall:.4f} on the CPU")
    outcome.data |= {"make_s": took, "top_m": top_m, "cpu_recall": recall}
    setup.settings["top_m"] = top_m
    setup.params = SearchParams(10, top_m, 4)
    setup.given = data, index


def _data(setup: Setup) -> DataSet:
    source = setup.source
    if source.directory is not None:
        return load(source.directory, source.name, source.rows)
    rows, queries = source.rows or 0, 100 if setup.small else 4000
    torch_device = _torch_device(setup)
    if torch_device is None:
        return random_set(min(rows, _WITHOUT_TORCH), source.dim, queries, _SEED)
    return synthetic_set(rows, source.dim, queries, _SEED, torch_device)


def _built(setup: Setup, data: DataSet, threads: int, outcome: Outcome) -> tuple[GraphIndex, str]:
    """Return the index and the builder of its graph."""
    rows, begin, device, by = encode(data.base, data.metric, setup.dtype), time.perf_counter(), "cpu", "the CPU"
    if setup.on_gpu:
        try:
            import_cagra()
            device, by = "cuda", "cuVS"
        except DeviceUnavailable as error:
            outcome.add("graph by cuVS", f"skipped: {error}")
    graph, seeds = build_graph(data.base, data.metric, _DEGREE, _SEED, threads, lambda stage, done: None, device)
    seconds = time.perf_counter() - begin
    index = GraphIndex(IndexData(rows, graph, seeds, None))
    recall = _recall(index, data, 64, threads)
    outcome.add(f"graph by {by}", f"{seconds:.1f} s, recall@10 {recall:.4f} at top_m 64 on the CPU")
    outcome.data["graph"] = {"seconds": seconds, "recall": recall}
    return index, by


def _torch_device(setup: Setup) -> str | None:
    """Return torch's name of the device; None without torch, or without CUDA for a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not setup.on_gpu:
        return "cpu"
    if not torch.cuda.is_available():
        return None
    return setup.device if setup.device.startswith("cuda") else "cuda"


def _recall(index: GraphIndex, data: DataSet, top_m: int, threads: int) -> float:
    sample = data.queries[:_SAMPLE]
    known = DataSet(data.name, data.metric, data.base, sample, data.truth[:_SAMPLE])
    return known.recall(index.search(sample, 10, top_m, 4, threads=threads)[0])


def _top_m(index: GraphIndex, data: DataSet, given: int, threads: int) -> tuple[int, float]:
    """Return top_m, as given or, for 0, the smallest that reaches the recall; and the recall on the CPU."""
    for top_m in (given,) if given else _TOP_MS:
        recall = _recall(index, data, top_m, threads)
        if given or recall >= _RECALL:
            return top_m, recall
    raise AssertionError(f"recall@10 is {recall:.4f} with a top_m of {top_m}: the graph or the set is not usable")
