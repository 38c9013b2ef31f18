"""Graph build on a GPU with cuVS's CAGRA. cuVS is imported only when a graph is built.

API of cuVS 26: `cagra.build(IndexParams(…), dataset)` takes a numpy matrix; `index.graph` is a view of device memory
whose `copy_to_host()` returns uint32 [N, graph_degree].
"""

import importlib
from typing import Any

import numpy as np

from gpu.build.optimize import Graph
from gpu.errors import DeviceError, DeviceUnavailable
from gpu.index.rows import FloatArray


def cuvs_graph(space: FloatArray, degree: int) -> Graph:
    """Build the CAGRA graph, uint32 [N, degree], of vectors under squared L2; N > 2 · degree.

    Raises DeviceUnavailable without cuVS, DeviceError if the build fails.
    """
    cagra = import_cagra()
    params = cagra.IndexParams(
        metric="sqeuclidean", intermediate_graph_degree=2 * degree, graph_degree=degree, build_algo="nn_descent"
    )
    try:
        on_host = cagra.build(params, np.ascontiguousarray(space)).graph.copy_to_host()
    except Exception as error:  # cuVS has no exception base class
        raise DeviceError(f"cuVS cannot build the graph: {error}") from error
    graph: Graph = np.ascontiguousarray(on_host, np.uint32)
    if graph.shape != (len(space), degree) or int(graph.max()) >= len(space):
        raise DeviceError(f"cuVS built a graph of shape {graph.shape}; expected {(len(space), degree)}")
    return graph


def import_cagra() -> Any:
    """Import cuVS's CAGRA module. Raises DeviceUnavailable if it cannot be imported."""
    try:
        return importlib.import_module("cuvs.neighbors.cagra")
    except ImportError as error:
        raise DeviceUnavailable(f"cuVS is not installed ({error})") from None
