"""Graph optimisation: CAGRA's rank-based pruning and reverse edges on neighbour lists (arXiv 2308.15136, 3.2).

A row of the graph has exactly `degree` entries; it is padded with the node itself, which a search has always visited.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from gpu.compiled import counted

Graph = npt.NDArray[np.uint32]
_PARTS_A_THREAD = 4


@counted
def count_detours(neighbors: Graph, begin: int, end: int, out: npt.NDArray[np.int32]) -> None:
    """For rows begin..end: out[a, j] = two-step detours to neighbour j through neighbours of a rank below j."""
    count, width = neighbors.shape
    rank = np.full(count, -1, np.int32)
    for a in range(begin, end):
        for j in range(width):
            rank[neighbors[a, j]] = j
        for j in range(width):
            out[a, j] = 0
        for r in range(width):
            via = neighbors[a, r]
            for i in range(width):
                j = rank[neighbors[via, i]]
                if j > r:
                    out[a, j] += 1
        for j in range(width):
            rank[neighbors[a, j]] = -1


@counted
def keep_fewest(neighbors: Graph, detours: npt.NDArray[np.int32], kept: Graph) -> None:
    """Set kept[a] = the neighbours of `a` with the fewest detours, fewest first, ties by rank."""
    count, width = neighbors.shape
    degree = kept.shape[1]
    starts = np.zeros(width + 2, np.int32)
    for a in range(count):
        starts[:] = 0
        for j in range(width):
            starts[min(detours[a, j], width) + 1] += 1
        for c in range(width + 1):
            starts[c + 1] += starts[c]
        for j in range(width):
            c = min(detours[a, j], width)
            if starts[c] < degree:
                kept[a, starts[c]] = neighbors[a, j]
            starts[c] += 1


@counted
def find_sources(kept: Graph, reverse: Graph, filled: npt.NDArray[np.uint32]) -> None:
    """Set reverse[a, :filled[a]] = sources that keep `a`, best rank first."""
    count, width = kept.shape
    degree = reverse.shape[1]
    filled[:] = 0
    for rank in range(width):
        for source in range(count):
            target = kept[source, rank]
            if filled[target] < degree:
                reverse[target, filled[target]] = source
                filled[target] += 1


@counted
def add_reverse_edges(
    kept: Graph, reverse: Graph, filled: npt.NDArray[np.uint32], begin: int, end: int, graph: Graph
) -> None:
    """For rows begin..end, set graph[a] = the first half of kept[a], then its sources, then the rest of kept[a]."""
    width, degree = kept.shape[1], graph.shape[1]
    for a in range(begin, end):
        size = 0
        for part in range(3):
            begin = (width + 1) // 2 if part == 2 else 0
            end = (width + 1) // 2 if part == 0 else filled[a] if part == 1 else width
            for i in range(begin, end):
                node = reverse[a, i] if part == 1 else kept[a, i]
                known = node == a
                for j in range(size):
                    known |= graph[a, j] == node
                if not known and size < degree:
                    graph[a, size] = node
                    size += 1
        for i in range(size, degree):
            graph[a, i] = a


@counted
def connect(neighbors: Graph, graph: Graph, root: int) -> int:
    """Make every node reachable from `root`, in place. Returns the number of replaced edges.

    A breadth-first traversal records the edge that first reached each node as a tree edge. For an unreached node, the
    last non-tree edge of its nearest reached neighbour that has one (else of any reached node) is redirected to it;
    the traversal then continues from the node.
    """
    count, degree = graph.shape
    reached = np.zeros(count, np.bool_)
    tree = np.zeros((count, degree), np.bool_)
    queue = np.empty(count, np.uint32)
    queue[0] = root
    reached[root] = True
    head, tail, replaced, unreached, spare = 0, 1, 0, 0, 0
    while True:
        while head < tail:
            node = queue[head]
            head += 1
            for i in range(degree):
                following = graph[node, i]
                if not reached[following]:
                    reached[following] = True
                    tree[node, i] = True
                    queue[tail] = following
                    tail += 1
        while unreached < count and reached[unreached]:
            unreached += 1
        if unreached == count:
            return replaced
        source, edge = -1, -1
        for j in range(neighbors.shape[1]):
            candidate = neighbors[unreached, j]
            if reached[candidate]:
                for i in range(degree):
                    if not tree[candidate, i]:
                        source, edge = candidate, i
                if edge >= 0:
                    break
        while edge < 0:  # queue[:tail] are the reached nodes; the tree has fewer edges than their rows have entries
            for i in range(degree):
                if not tree[queue[spare], i]:
                    source, edge = queue[spare], i
            if edge < 0:
                spare += 1
        graph[source, edge] = unreached
        tree[source, edge] = True
        reached[unreached] = True
        queue[tail] = unreached
        tail += 1
        replaced += 1


def optimize(neighbors: Graph, degree: int, root: int, threads: int = 1) -> Graph:
    """Return the search graph, uint32 [N, degree], of lists uint32 [N, width ≥ 1]; every node is reachable from `root`.

    Keeps the `degree` neighbours (or all, if fewer) with the fewest detours, ties by rank, and adds reverse edges.
    """
    count, width = neighbors.shape
    detours, kept = np.empty((count, width), np.int32), np.empty((count, min(degree, width)), np.uint32)
    in_parts(count, threads, lambda begin, end: count_detours(neighbors, begin, end, detours))
    keep_fewest(neighbors, detours, kept)
    graph, reverse, filled = (np.empty(shape, np.uint32) for shape in ((count, degree), (count, degree), count))
    find_sources(kept, reverse, filled)
    in_parts(count, threads, lambda begin, end: add_reverse_edges(kept, reverse, filled, begin, end, graph))
    connect(neighbors, graph, root)
    return graph


def in_parts(count: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Call `work(begin, end)` for parts of 0..count on `threads` threads."""
    if threads == 1:
        work(0, count)
        return
    size = -(-count // (_PARTS_A_THREAD * threads))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda begin: work(begin, min(begin + size, count)), range(0, count, size)))
