"""Data of a run: vectors, exact neighbours and graph, generated on the device; and the top_m for the target recall.

If both cuVS and torch can build graphs, both do, and searches use cuVS's: engines are compared over one graph.
"""

import time
from typing import Any

import numpy as np

from benchmarks.common.data import DataSet, load
from benchmarks.gpu_check.report import Outcome
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.synthetic import random_set, synthetic_set
from gpu import DeviceError, DeviceUnavailable, GraphIndex, SearchParams
from gpu.build.cuvs_graph import cuvs_graph, import_cagra
from gpu.build.graph import build_graph, neighbor_space
from gpu.index.data import IndexData
from gpu.index.rows import FloatArray, encode

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
    rows = encode(data.base, data.metric, setup.dtype)
    seeds = np.random.default_rng(_SEED).permutation(len(data.base))[:128].astype(np.uint32)
    space = neighbor_space(data.base, data.metric)
    indexes: dict[str, GraphIndex] = {}
    for name, build in (("cuVS", _by_cuvs), ("torch", _by_torch)):
        begin = time.perf_counter()
        try:
            graph = build(setup, space, int(seeds[0]))
        except DeviceError as error:
            outcome.add(f"graph by {name}", f"skipped: {error}" if isinstance(error, DeviceUnavailable) else str(error))
            continue
        seconds = time.perf_counter() - begin
        indexes[name] = index = GraphIndex(IndexData(rows, graph, seeds, None))
        recall = _recall(index, data, 64, threads)
        outcome.add(f"graph by {name}", f"{seconds:.1f} s, recall@10 {recall:.4f} at top_m 64 on the CPU")
        outcome.data[f"{name}_graph"] = {"seconds": seconds, "recall": recall}
    for name, index in indexes.items():
        return index, name
    begin = time.perf_counter()
    graph, seeds = build_graph(data.base, data.metric, _DEGREE, _SEED, threads, lambda stage, done: None)
    outcome.add("graph by the CPU", f"{time.perf_counter() - begin:.1f} s")
    return GraphIndex(IndexData(rows, graph, seeds, None)), "the CPU"


def _by_cuvs(setup: Setup, space: FloatArray, root: int) -> Any:
    import_cagra()
    if not setup.on_gpu:
        raise DeviceUnavailable("no GPU")
    return cuvs_graph(space, _DEGREE)


def _by_torch(setup: Setup, space: FloatArray, root: int) -> Any:
    from gpu.build.torch_graph import torch_graph

    device = _torch_device(setup)
    if device is None:
        raise DeviceUnavailable("torch sees no CUDA device")
    return torch_graph(space, _DEGREE, root, _SEED, lambda stage, done: None, device)


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
