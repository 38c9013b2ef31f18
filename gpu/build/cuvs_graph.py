"""Building a graph on a GPU, by cuVS's CAGRA. cuVS is imported when a graph is built, and nowhere else.

Read from cuVS 26's Python sources: `cagra.build(IndexParams(…), dataset)` takes a numpy matrix; `index.graph` is a view
of device memory whose `copy_to_host()` gives uint32 [N, graph_degree].
"""

import importlib
from typing import Any

import numpy as np

from gpu.build.optimize import Graph
from gpu.errors import DeviceError, DeviceUnavailable
from gpu.index.rows import FloatArray


def cuvs_graph(space: FloatArray, degree: int) -> Graph:
    """The CAGRA graph, uint32 [N, degree], of vectors whose squared L2 distances say who is near; N > 2 · degree.

    Raises DeviceUnavailable without cuVS, DeviceError where it fails.
    """
    cagra = import_cagra()
    params = cagra.IndexParams(
        metric="sqeuclidean", intermediate_graph_degree=2 * degree, graph_degree=degree, build_algo="nn_descent"
    )
    try:
        found = cagra.build(params, np.ascontiguousarray(space)).graph.copy_to_host()
    except Exception as error:  # cuVS has no error family of its own
        raise DeviceError(f"cuVS cannot build the graph: {error}") from error
    graph: Graph = np.ascontiguousarray(found, np.uint32)
    if graph.shape != (len(space), degree) or int(graph.max()) >= len(space):
        raise DeviceError(f"cuVS built a graph of shape {graph.shape}; {(len(space), degree)} was asked for")
    return graph


def import_cagra() -> Any:
    """cuVS's module. Raises DeviceUnavailable where it cannot be imported."""
    try:
        return importlib.import_module("cuvs.neighbors.cagra")
    except ImportError as error:
        raise DeviceUnavailable(f"cuVS is not installed ({error})") from None
