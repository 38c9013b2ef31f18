"""The search in plain numpy, one query and one step at a time: what every backend is measured against.

Nothing here is fast. A backend gives the same ids and the same number of extends wherever arithmetic is exact; where it
rounds, sums in another order may break near ties differently.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.index_data import IndexData
from gpu.params import SearchParams
from gpu.rows import Rows, true_distances
from gpu.sketch import TAIL, decoded

SEEDS_KEPT = 16
RESCORED_AT_LEAST = 8
FloatArray = npt.NDArray[np.float32]
Entry = tuple[float, int]


class ReferenceSearch:
    """One query's search: `extend` until it returns True, then `result`.

    top_m: (distance, node) of the best so far, ascending. expanded, visited: nodes.
    """

    def __init__(self, data: IndexData, query: npt.ArrayLike, params: SearchParams) -> None:
        self._data, self._params = data, params
        self._query = fitted_query(np.asarray(query, np.float32), data.rows)
        self.top_m: list[Entry] = []
        self.expanded: set[int] = set()
        self.visited: set[int] = set()
        self.extends = 0
        self._unchanged = 0

    def extend(self) -> bool:
        """The five stages. Returns whether the search is done."""
        parents = self.select_parents()
        tasks = self.mark_visited(self.expand_neighbors(parents))
        changed = self.merge_top_m(self.compute_distances(tasks))
        self.extends += 1
        self._unchanged = 0 if changed else self._unchanged + 1
        patience = self._params.patience
        return not self._unexpanded() or (patience is not None and self._unchanged >= patience)

    def select_parents(self) -> list[int]:
        parents = self._unexpanded()[: self._params.search_width]
        self.expanded.update(parents)
        return parents

    def expand_neighbors(self, parents: list[int]) -> Iterator[int]:
        if self.extends == 0:
            yield from self._data.seeds.tolist()
        for parent in parents:
            yield from self._data.graph[parent].tolist()

    def mark_visited(self, nodes: Iterator[int]) -> list[int]:
        fresh = []
        for node in nodes:
            if node not in self.visited and node < len(self._data.graph):
                self.visited.add(node)
                fresh.append(node)
        return fresh

    def compute_distances(self, tasks: list[int]) -> list[Entry]:
        """Distances of the tasks that sketches, if there are any, do not rule out."""
        nodes = np.array(tasks, np.int64)
        rows = self._data.rows
        if rows.sketch is not None and len(nodes):
            estimates, slack = sketch_estimates(rows, self._query, nodes)
            if self.extends == 0:
                nodes = nodes[np.argsort(estimates, kind="stable")[:SEEDS_KEPT]]
            elif len(self.top_m) == self._params.top_m:
                nodes = nodes[estimates - slack < self.top_m[-1][0]]
        return list(zip(stored_distances(rows, self._query, nodes).tolist(), nodes.tolist(), strict=True))

    def merge_top_m(self, scored: list[Entry]) -> bool:
        before = self.top_m
        self.top_m = sorted(before + scored)[: self._params.top_m]
        return self.top_m != before

    def result(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Ids and distances of the k nearest, rescored where the rows are codes; -1 and +inf where there are fewer."""
        k, rows = self._params.k, self._data.rows
        entries = self.top_m
        if rows.full is not None:
            entries = self._rescored(rows.full)
        found = np.full(k, -1, np.int64)
        distances = np.full(k, np.inf, np.float32)
        best = entries[:k]
        found[: len(best)] = [node for _, node in best]
        distances[: len(best)] = [distance for distance, _ in best]
        return self._data.ids_of(found), true_distances(distances, rows)

    def _rescored(self, full: FloatArray) -> list[Entry]:
        """The nearest entries by full precision: max(k, 8), and those behind that could be nearer than the k-th."""
        k, rows = self._params.k, self._data.rows
        entries = self.top_m[: 2 * k + 16]
        nodes = np.array([node for _, node in entries], np.int64)
        codes = np.array([distance for distance, _ in entries], np.float32)
        exact = raw_distances(full[nodes, : rows.dim], self._query, rows.metric)
        first = max(k, RESCORED_AT_LEAST)
        if len(entries) > first:
            off = exact[:first] - codes[:first]
            nearest = codes + off.min() - (off.max() - off.min())
            wanted = nearest < np.sort(exact[:first])[k - 1]
            wanted[:first] = True
            exact, nodes = exact[wanted], nodes[wanted]
        return sorted(zip(exact.tolist(), nodes.tolist(), strict=True))

    def _unexpanded(self) -> list[int]:
        return [node for _, node in self.top_m if node not in self.expanded]


def search_reference(
    data: IndexData, query: npt.ArrayLike, params: SearchParams
) -> tuple[npt.NDArray[np.int64], FloatArray, int]:
    """Ids [k], distances [k] and the number of extends of one query."""
    search = ReferenceSearch(data, query, params)
    while not search.extend():
        pass
    return (*search.result(), search.extends)


def fitted_query(query: FloatArray, rows: Rows) -> FloatArray:
    """The query as the rows are: normalised for cosine, scaled for float16 rows under L2."""
    if rows.metric == "cosine":
        norm = np.sqrt(np.square(query, dtype=np.float64).sum())
        return (query / (norm if norm > 0 else 1)).astype(np.float32)
    return query * np.float32(rows.scale if rows.metric == "l2" else 1)


def raw_distances(vectors: FloatArray, query: FloatArray, metric: str) -> FloatArray:
    """Squared L2 distances, or minus dot products."""
    terms = np.square(vectors - query) if metric == "l2" else -(vectors * query)
    sums: FloatArray = terms.sum(axis=1, dtype=np.float32)
    return sums


def stored_distances(rows: Rows, query: FloatArray, nodes: npt.NDArray[np.int64]) -> FloatArray:
    """Distances of the stored rows; for int8 codes without the constant |q - c|², or c · q."""
    if rows.dtype != "int8":
        return raw_distances(rows.codes[nodes, : rows.dim].astype(np.float32), query, rows.metric)
    codes, step, square = _codes_and_tail(rows.codes[nodes].view(np.uint8))
    shifted = query - rows.centre if rows.metric == "l2" else query
    largest = min(32767, (2**31 - 1) // (127 * rows.lanes))
    query_step = np.abs(shifted).max() / np.float32(largest)
    lanes = np.rint(shifted / query_step).astype(np.int64) if query_step > 0 else np.zeros(rows.dim, np.int64)
    dots = (codes[:, : rows.dim].view(np.int8).astype(np.int64) @ lanes).astype(np.float32) * query_step * step
    distances: FloatArray = square - 2 * dots if rows.metric == "l2" else -dots
    return distances


def sketch_estimates(rows: Rows, query: FloatArray, nodes: npt.NDArray[np.int64]) -> tuple[FloatArray, float]:
    """What the sketches say of the stored distances of some nodes, and by how much that may be too far."""
    assert rows.sketch is not None
    sketches = rows.sketch.codes[nodes]
    _, _, square = _codes_and_tail(sketches)
    l2 = rows.metric == "l2"
    shifted = query - rows.centre if l2 else query
    dots = decoded(sketches) @ (rows.sketch.projection[:, : rows.dim].astype(np.float32) @ shifted)
    constant = 0.0 if rows.dtype == "int8" else float(shifted @ shifted) if l2 else -float(rows.centre @ query)
    estimates: FloatArray = ((square - 2 * dots if l2 else -dots) + constant).astype(np.float32)
    return estimates, (2 if l2 else 1) * rows.sketch.slack * float(np.linalg.norm(shifted))


def _codes_and_tail(rows: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], Any, Any]:
    """Codes, steps and squared norms of rows that end with these two."""
    tail = np.ascontiguousarray(rows[:, -TAIL:]).view(np.float32)
    return rows[:, :-TAIL], tail[:, 0], tail[:, 1]
