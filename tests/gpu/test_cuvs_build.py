"""Tests of graphs built by cuVS: its parameters, validation of its result, and that it is imported only when used.

The fake has the documented signatures of cuVS 26 (keyword-only parameters, positional `build`), so a call that the real
library would reject fails here too.
"""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gpu import DeviceError, DeviceUnavailable, GraphIndex, InvalidParams
from gpu.build.graph import neighbor_space
from gpu.build.knn import nearest_neighbors
from gpu.build.optimize import optimize
from gpu.index.rows import checked_vectors
from tests.gpu.datasets import clustered, exact_neighbors, recall

DEGREE = 12


class FakeTensor:
    """`DeviceTensorView`: not a numpy array until it is copied."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def copy_to_host(self, resources: Any = None) -> np.ndarray:
        return self._array


class FakeIndex:
    def __init__(self, graph: np.ndarray) -> None:
        self.graph = FakeTensor(graph)


class FakeCagra(ModuleType):
    """`cuvs.neighbors.cagra`, which builds with this project's own builder."""

    def __init__(self, alter: Callable[[np.ndarray], np.ndarray] = lambda graph: graph) -> None:
        super().__init__("cuvs.neighbors.cagra")
        self.calls: list[dict[str, Any]] = []
        self.datasets: list[np.ndarray] = []
        outer = self

        class IndexParams:
            def __init__(
                self,
                *,
                metric: str = "sqeuclidean",
                intermediate_graph_degree: int = 128,
                graph_degree: int = 64,
                build_algo: str = "ivf_pq",
                nn_descent_niter: int = 20,
                compression: Any = None,
                ivf_pq_build_params: Any = None,
                ivf_pq_search_params: Any = None,
                refinement_rate: float = 1.0,
            ) -> None:
                assert metric in ("sqeuclidean", "inner_product")
                assert build_algo in ("ivf_pq", "nn_descent", "iterative_cagra_search")
                self.degrees = (intermediate_graph_degree, graph_degree)
                outer.calls.append({"metric": metric, "build_algo": build_algo, "degrees": self.degrees})

        def build(index_params: IndexParams, dataset: np.ndarray, resources: Any = None) -> FakeIndex:
            assert dataset.dtype in (np.float32, np.float16, np.int8, np.uint8)
            assert dataset.flags.c_contiguous
            outer.datasets.append(dataset)
            wide, degree = index_params.degrees
            return FakeIndex(alter(optimize(nearest_neighbors(dataset, wide, 0, 1, lambda done: None), degree, 0)))

        self.IndexParams, self.build = IndexParams, build


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCagra]:
    def put(**options: Any) -> FakeCagra:
        fake = FakeCagra(**options)
        monkeypatch.setitem(sys.modules, "cuvs", ModuleType("cuvs"))
        monkeypatch.setitem(sys.modules, "cuvs.neighbors", ModuleType("cuvs.neighbors"))
        monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", fake)
        return fake

    return put


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_cuvs_builds_a_graph_for_the_metric_and_its_index_is_searched(
    install: Callable[..., FakeCagra], metric: Any
) -> None:
    fake = install()
    random = np.random.default_rng(0)
    vectors, queries = clustered(random, 700, 16), clustered(random, 40, 16)
    index = GraphIndex.build(vectors, metric=metric, degree=DEGREE, device="cuda")
    assert fake.calls == [{"metric": "sqeuclidean", "build_algo": "nn_descent", "degrees": (2 * DEGREE, DEGREE)}]
    expected = neighbor_space(checked_vectors(vectors, metric), metric)
    assert np.array_equal(fake.datasets[0], expected)
    ids, _ = index.search(queries, k=10)
    assert recall(ids, exact_neighbors(vectors, queries, metric, 10)) > 0.8


def test_cuvs_is_not_used_for_fewer_vectors_than_a_list_has_entries(install: Callable[..., FakeCagra]) -> None:
    fake = install()
    index = GraphIndex.build(np.eye(DEGREE, dtype=np.float32), degree=DEGREE, device="cuda")
    assert (index.size, fake.calls) == (DEGREE, [])


@pytest.mark.parametrize(
    "alter", [lambda graph: graph[:-1], lambda graph: graph[:, :-1], lambda graph: graph + np.uint32(100)]
)
def test_an_invalid_graph_is_rejected(
    install: Callable[..., FakeCagra], alter: Callable[[np.ndarray], np.ndarray]
) -> None:
    install(alter=alter)
    with pytest.raises(DeviceError, match=r"expected \(100, 12\)"):
        GraphIndex.build(clustered(np.random.default_rng(0), 100, 8), degree=DEGREE, device="cuda")


def test_an_exception_of_cuvs_is_reported(install: Callable[..., FakeCagra]) -> None:
    def fail(graph: np.ndarray) -> np.ndarray:
        raise RuntimeError("cudaErrorNoDevice")

    install(alter=fail)
    with pytest.raises(DeviceError, match="cuVS cannot build the graph: cudaErrorNoDevice"):
        GraphIndex.build(clustered(np.random.default_rng(0), 100, 8), degree=DEGREE, device="cuda")


def test_without_cuvs_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", None)
    with pytest.raises(DeviceUnavailable, match=r"cuVS is not installed .*\[cuvs\]"):
        GraphIndex.build(clustered(np.random.default_rng(0), 100, 8), degree=DEGREE, device="cuda")


def test_an_unknown_device_is_rejected() -> None:
    with pytest.raises(InvalidParams, match="device 'tpu' is none of cpu, cuda"):
        GraphIndex.build(np.eye(4), device="tpu")  # type: ignore[arg-type]


def test_the_cpu_path_imports_neither_cuvs_nor_the_cuda_packages() -> None:
    script = (
        "import sys, numpy as np\n"
        "from gpu import GraphIndex, open_engine\n"
        "open_engine('cpu', {'docs': GraphIndex.build(np.eye(4))})\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuvs', 'cuda', 'cupy', 'torch')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
