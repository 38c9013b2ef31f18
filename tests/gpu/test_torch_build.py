"""Tests of graphs built by torch, here with tensors on the CPU."""

import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="building by torch needs torch")

from gpu import DeviceUnavailable, GraphIndex, OutOfDeviceMemory  # noqa: E402
from gpu.build import graph as building  # noqa: E402
from gpu.build import torch_graph as by_torch  # noqa: E402
from gpu.build import torch_knn  # noqa: E402
from gpu.build.graph import build_graph, neighbor_space  # noqa: E402
from gpu.build.knn import nearest_neighbors  # noqa: E402
from gpu.build.optimize import optimize  # noqa: E402
from gpu.build.optimize import prune as prune_compiled  # noqa: E402
from gpu.build.torch_knn import Lists, Space, exact_lists, list_recall, nearest_lists  # noqa: E402
from gpu.index.data import IndexData  # noqa: E402
from gpu.index.rows import Metric, checked_vectors, encode  # noqa: E402
from tests.gpu.datasets import METRICS, clustered, exact_neighbors, recall  # noqa: E402

DEGREE = 12


def quiet(stage: str, part: float) -> None:
    assert 0 <= part <= 1


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use cells so small that a few thousand rows fill many."""
    for name, value in {"_CELL": 128, "_LARGEST_CELL": 512, "_PROBES": 1, "_VISITORS": 1024}.items():
        monkeypatch.setattr(torch_knn, name, value)


@pytest.mark.parametrize("block", [1 << 9, 1 << 26])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_lists_of_a_small_set_are_exact_and_in_order(kind: Any, block: int) -> None:
    vectors = clustered(np.random.default_rng(0), 700, 16).astype(np.float16)
    space = Space(torch.as_tensor(vectors).to(kind), block)
    lists = nearest_lists(space, 20, seed=0).numpy()
    exact = vectors.astype(np.float64)
    distances = np.square(exact[:, None] - exact[None]).sum(axis=2)
    np.fill_diagonal(distances, np.inf)
    np.testing.assert_allclose(
        np.take_along_axis(distances, lists.astype(np.int64), axis=1), np.sort(distances, axis=1)[:, :20], rtol=1e-4
    )


def test_more_cells_are_visited_until_the_lists_are_accurate(
    small_cells: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(torch.as_tensor(clustered(np.random.default_rng(0), 5000, 24)))
    everybody = torch.arange(5000)
    truth = exact_lists(space, everybody, 25)

    def built() -> float:
        lists = nearest_lists(space, 24, seed=0)
        assert (lists.sort(dim=1).values.diff(dim=1) > 0).all(), "duplicate neighbour"
        assert (lists != everybody[:, None]).all(), "a row is its own neighbour"
        return list_recall(torch.cat([lists, everybody[:, None]], dim=1), truth)

    assert built() > 0.98
    monkeypatch.setattr(torch_knn, "_GOOD_LISTS", 0.0)
    assert built() < 0.9  # the first round of visits is not enough: the test above covers the doubling


def test_identical_rows_get_full_lists_in_linear_work(small_cells: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = Lists.compare

    def counted(lists: Lists, places: Any, visitors: Any, members: Any) -> None:
        compared.append(len(visitors) * len(members))
        compare(lists, places, visitors, members)

    monkeypatch.setattr(Lists, "compare", counted)
    lists = nearest_lists(Space(torch.zeros(4096, 8)), 24, seed=0)
    assert (lists != torch.arange(4096)[:, None]).all()
    assert (lists.sort(dim=1).values.diff(dim=1) > 0).all()
    assert sum(compared) < 4096 * 4096  # of all pairs


def test_pruning_keeps_the_same_edges_as_the_compiled_code() -> None:
    space = clustered(np.random.default_rng(1), 600, 8)
    lists = nearest_neighbors(space, 2 * DEGREE, 0, 1, lambda done: None)
    expected = prune_compiled(lists, DEGREE)
    for block in (1, 1 << 26):
        kept = by_torch.prune(torch.as_tensor(lists.view(np.int32)), DEGREE, block)
        assert np.array_equal(kept.numpy().view(np.uint32), expected)


def test_exact_lists_give_the_compiled_builders_graph() -> None:
    space = clustered(np.random.default_rng(2), 900, 16)
    built = by_torch.torch_graph(space, DEGREE, root=5, seed=0, progress=quiet, device="cpu")
    assert np.array_equal(built, optimize(nearest_neighbors(space, 3 * DEGREE, 0, 1, lambda done: None), DEGREE, 5))


@pytest.mark.parametrize("metric", METRICS)
def test_recall_equals_that_of_the_graph_built_on_the_cpu(small_cells: None, metric: Metric) -> None:
    random = np.random.default_rng(3)
    points = clustered(random, 3300, 24)
    vectors, queries = checked_vectors(points[:3000], metric), points[3000:]
    truth = exact_neighbors(vectors, queries, metric, 10)
    compiled, seeds = build_graph(vectors, metric, DEGREE, 0, 1, quiet)
    space = neighbor_space(vectors, metric)
    ours = by_torch.torch_graph(space, DEGREE, int(seeds[0]), 0, quiet, "cpu")
    found = {}
    for name, graph in {"compiled": compiled, "torch": ours}.items():
        index = GraphIndex(IndexData(encode(vectors, metric, "float32"), graph, seeds, None))
        found[name] = recall(index.search(queries, 10, top_m=32)[0], truth)
    assert found["torch"] >= found["compiled"] - 0.005, found
    assert found["torch"] > 0.9


def test_without_cuvs_a_build_for_cuda_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    calls = []

    def note(vectors: np.ndarray, degree: int, root: int, seed: int, progress: Any, device: str = "cuda") -> np.ndarray:
        calls.append((device, seed))
        return optimize(nearest_neighbors(vectors, 2 * degree, 0, 1, lambda done: None), degree, root)

    monkeypatch.setattr(by_torch, "torch_graph", note)
    GraphIndex.build(clustered(np.random.default_rng(0), 100, 8), degree=DEGREE, seed=3, device="cuda")
    assert calls == [("cuda", 3)]


def test_without_a_device_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"needs a CUDA device .* torch \S+ sees no CUDA device"):
        building.check_gpu_build()


def test_out_of_memory_raises_this_packages_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(by_torch, "nearest_lists", full)
    with pytest.raises(OutOfDeviceMemory, match=r"the graph of \(100, 8\) vectors does not fit: CUDA out of memory"):
        by_torch.torch_graph(np.zeros((100, 8), np.float32), DEGREE, 0, 0, quiet, "cpu")
