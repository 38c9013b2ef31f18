"""Tests of neighbour lists and of the graph built from them."""

import numpy as np
import pytest

from gpu import GraphIndex
from gpu.build.knn import EXACT_LIMIT, exact_sample, nearest_neighbors
from gpu.build.optimize import add_reverse_edges, connect, count_detours, find_sources, keep_fewest
from tests.gpu.datasets import clustered


def reachable(graph: np.ndarray, root: int) -> int:
    seen = np.zeros(len(graph), bool)
    front = np.array([root])
    seen[root] = True
    while len(front):
        front = np.unique(graph[front])
        front = front[~seen[front]]
        seen[front] = True
    return int(seen.sum())


def quiet(part: float) -> None:
    assert 0 <= part <= 1


@pytest.mark.parametrize("threads", [1, 2])
def test_lists_of_a_large_set_are_nearly_exact_full_and_without_duplicates(threads: int) -> None:
    space = clustered(np.random.default_rng(0), EXACT_LIMIT + 2000, 24)
    lists = nearest_neighbors(space, 32, seed=0, threads=threads, progress=quiet)
    assert (np.diff(np.sort(lists, axis=1), axis=1) > 0).all()
    assert not (lists == np.arange(len(space))[:, None]).any()
    rows = np.arange(0, len(space), 97)
    exact = exact_sample(space, rows, 32)
    assert np.mean([np.isin(exact[i], lists[row]).mean() for i, row in enumerate(rows)]) > 0.9


def test_many_equal_vectors_do_not_make_the_lists_quadratic() -> None:
    space = np.zeros((EXACT_LIMIT + 3000, 4), np.float32)
    lists = nearest_neighbors(space, 8, seed=0, threads=1, progress=quiet)
    assert (np.diff(np.sort(lists, axis=1), axis=1) > 0).all()
    index = GraphIndex.build(space, metric="l2", degree=8)
    assert reachable(index.data.graph, int(index.data.seeds[0])) == len(space)


def test_detours_are_counted_as_in_the_paper() -> None:
    lists = np.array([[1, 2, 3], [2, 0, 3], [1, 3, 0], [2, 1, 0]], np.uint32)
    detours = np.empty(lists.shape, np.int32)
    count_detours(lists, 0, 4, detours)
    # Of node 0: 1 lists 2 and 3, which 0 has at later ranks; 2 lists 3 (and 1, at an earlier rank); 3 comes last.
    assert detours[0].tolist() == [0, 1, 2]
    kept = np.empty((4, 2), np.uint32)
    keep_fewest(lists, detours, kept)
    assert kept[0].tolist() == [1, 2]


def test_rows_hold_forward_then_reverse_edges_without_duplicates() -> None:
    kept = np.array([[1, 2], [2, 0], [1, 0], [0, 1]], np.uint32)
    graph, reverse, filled = (np.empty(shape, np.uint32) for shape in ((4, 2), (4, 2), 4))
    find_sources(kept, reverse, filled)
    for begin in (0, 2):
        add_reverse_edges(kept, reverse, filled, begin, begin + 2, graph)
    assert graph[0].tolist() == [1, 3]  # its nearest, then node 3, which ranks it first
    assert graph[3].tolist() == [0, 1]  # no node's neighbour: its own edges only


def test_disconnected_components_are_connected_to_the_root() -> None:
    islands = np.array([[1, 1], [0, 0], [3, 3], [2, 2], [5, 5], [4, 4]], np.uint32)
    graph = islands.copy()
    assert reachable(graph, 0) == 2
    assert connect(islands, graph, 0) == 2
    assert reachable(graph, 0) == 6


@pytest.mark.parametrize("degree", [2, 3, 32])
def test_every_node_can_be_reached_from_the_first_seed(degree: int) -> None:
    random = np.random.default_rng(degree)
    far_apart = clustered(random, 1200, 6) + 1000 * random.integers(0, 40, size=(1200, 1))
    index = GraphIndex.build(far_apart, metric="l2", degree=degree)
    assert index.data.graph.shape == (1200, degree)
    assert reachable(index.data.graph, int(index.data.seeds[0])) == 1200


def test_a_graph_of_few_nodes_is_filled_with_the_node_itself() -> None:
    index = GraphIndex.build(np.eye(3), metric="l2", degree=8)
    for node, row in enumerate(index.data.graph):
        assert set(row.tolist()) == {0, 1, 2}
        assert (row == node).sum() == 6
