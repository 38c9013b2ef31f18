"""Graph build: neighbour lists, a graph, refined lists by searching it, the final graph; or all of it on a GPU."""

import numpy as np
import numpy.typing as npt

from gpu.build.cuvs_graph import cuvs_graph, import_cagra
from gpu.build.knn import EXACT_LIMIT, exact_sample, nearest_neighbors
from gpu.build.optimize import Graph, optimize
from gpu.build.params import Progress
from gpu.cpu.search import search
from gpu.errors import DeviceUnavailable
from gpu.index.data import IndexData
from gpu.index.rows import FloatArray, encode
from gpu.params import SearchParams

_SEEDS = 128
_WIDER = 3  # width of refined lists, as a multiple of the degree
_GOOD_LISTS = 0.97  # recall of the lists above which refining them does not pay off
_SAMPLE = 200


def build_graph(
    vectors: FloatArray,
    metric: str,
    degree: int,
    seed: int,
    threads: int,
    progress: Progress,
    device: str = "cpu",
) -> tuple[Graph, npt.NDArray[np.uint32]]:
    """Build the search graph, uint32 [N, degree], of validated vectors float32 [N, d]. Returns it and the seed rows.

    device "cuda": build on the GPU, unless there are fewer vectors than a list holds. Raises DeviceUnavailable without
    cuVS, DeviceError if its build fails.
    """
    count = len(vectors)
    seeds = np.random.default_rng(seed).permutation(count)[:_SEEDS].astype(np.uint32)
    if count == 1:
        return np.zeros((1, degree), np.uint32), seeds
    space = neighbor_space(vectors, metric)
    if device != "cpu" and count > 2 * degree:
        check_gpu_build()
        progress("graph", 0.0)
        graph = cuvs_graph(space, degree)
        progress("graph", 1.0)
        return graph, seeds
    width = min(2 * degree, count - 1)
    neighbors = nearest_neighbors(space, width, seed, threads, lambda done: progress("neighbors", done))
    progress("graph", 0.0)
    graph = optimize(neighbors, degree, int(seeds[0]), threads)
    progress("graph", 1.0)
    if count > EXACT_LIMIT and list_recall(space, neighbors, seed) < _GOOD_LISTS:
        wider = min(_WIDER * degree, count - 1)
        neighbors = searched_neighbors(space, graph, seeds, wider, threads, progress)
        graph = optimize(neighbors, degree, int(seeds[0]), threads)
    return graph, seeds


def check_gpu_build() -> None:
    """Raise DeviceUnavailable, with instructions, if graphs cannot be built on a GPU."""
    try:
        import_cagra()
    except DeviceUnavailable as error:
        raise DeviceUnavailable(
            f"building on a GPU needs cuVS, but {error}: pip install 'trinity-runtime[cuvs]', or build on the CPU"
        ) from None


def neighbor_space(vectors: FloatArray, metric: str) -> FloatArray:
    """Return vectors whose squared L2 distances order neighbours like the metric.

    For ip, adds a dimension that gives all vectors one norm (Bachrach et al., RecSys 2014, section 3.1); cosine vectors
    are normalised already.
    """
    if metric != "ip":
        return vectors
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)
    return np.hstack([vectors, np.sqrt(squares.max() - squares)[:, None].astype(np.float32)])


def list_recall(space: FloatArray, neighbors: Graph, seed: int) -> float:
    """Return the recall of neighbour lists against exact ones, measured on a sample of rows."""
    rows = np.random.default_rng(seed).permutation(len(space))[:_SAMPLE]
    exact = exact_sample(space, rows, neighbors.shape[1])
    return float(np.mean([np.isin(truth, neighbors[row]).mean() for row, truth in zip(rows, exact, strict=True)]))


def searched_neighbors(
    space: FloatArray,
    graph: Graph,
    seeds: npt.NDArray[np.uint32],
    width: int,
    threads: int,
    progress: Progress,
) -> Graph:
    """Return neighbour lists, uint32 [N, width], by searching the graph for every vector, starting at its own node."""
    rows = encode(space, "l2", "float32")
    own = np.arange(len(space))
    params = SearchParams(k=width + 1, top_m=width + 1, search_width=1)
    data = IndexData(rows, graph, seeds, None)

    nodes, _ = search(data, space, params, threads, own, lambda done: progress("better neighbors", done))
    # Drop the node itself from its list, or the last entry if more than `width` equal vectors precede the node.
    others = nodes != own[:, None]
    others[others.all(axis=1), -1] = False
    lists = nodes[others].reshape(len(space), width)
    missing = lists < 0
    lists[missing] = np.broadcast_to(own[:, None], lists.shape)[missing]
    better: Graph = lists.astype(np.uint32)
    return better
