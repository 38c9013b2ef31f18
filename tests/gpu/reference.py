"""Reference implementation of the search in plain numpy, one query and one step at a time, to compare backends with.

It is not optimised. A backend returns the same ids and the same number of extends where arithmetic is exact; where it
rounds, another order of summation may break near ties differently.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpu.index.data import FACTOR_BYTES, GROUP, ROUNDS, IndexData, NeighborCodes, window
from gpu.index.rows import Rows, metric_transform
from gpu.params import SearchParams

FloatArray = npt.NDArray[np.float32]
Entry = tuple[float, int]


class ReferenceSearch:
    """The search of one query: call `extend` until it returns True, then `result`.

    top_m: (distance, node) of the best so far, ascending. expanded, visited: nodes. allowed: bool [N], which nodes may
    be results; the walk visits all nodes.
    """

    def __init__(
        self,
        data: IndexData,
        query: npt.ArrayLike,
        params: SearchParams,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._data, self._params, self._allowed = data, params, allowed
        self._query = fitted_query(np.asarray(query, np.float32), data.rows)
        self.top_m: list[Entry] = []
        self.expanded: set[int] = set()
        self.visited: set[int] = set()
        self.extends = 0
        self._unchanged = 0

    def extend(self) -> bool:
        """Run the five stages. Return whether the search is done."""
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
        nodes = np.array(tasks, np.int64)
        return list(zip(stored_distances(self._data.rows, self._query, nodes).tolist(), tasks, strict=True))

    def merge_top_m(self, scored: list[Entry]) -> bool:
        before = self.top_m
        self.top_m = sorted(before + scored)[: self._params.top_m]
        return self.top_m != before

    def _results(self) -> list[Entry]:
        """Return the entries that may be results."""
        return [entry for entry in self.top_m if self._allowed is None or self._allowed[entry[1]]]

    def result(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Return ids and distances of the k nearest, padded with -1 and +inf."""
        k, rows = self._params.k, self._data.rows
        entries = self._results()
        found = np.full(k, -1, np.int64)
        distances = np.full(k, np.inf, np.float32)
        best = entries[:k]
        found[: len(best)] = [node for _, node in best]
        distances[: len(best)] = [distance for distance, _ in best]
        return self._data.ids_of(found), true_distances(distances, rows)

    def _unexpanded(self) -> list[int]:
        return [node for _, node in self.top_m if node not in self.expanded]


class EstimatedReference:
    """`ReferenceSearch` of an index with neighbour codes: top_m holds estimates, `scored` the parents."""

    def __init__(
        self,
        data: IndexData,
        query: npt.ArrayLike,
        params: SearchParams,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        assert data.codes is not None
        self._allowed = allowed
        self._data, self._codes, self._params = data, data.codes, params
        self._query = fitted_query(np.asarray(query, np.float32), data.rows)
        self._table = Table(data.codes, self._query)
        self._distinct = False
        self.scored: dict[int, float] = {}
        self.extends = 0
        self._begin()

    def _begin(self) -> None:
        self.top_m: list[Entry] = []
        self.passed: set[Entry] = set()  # entries that have been parents, or whose node has
        self.visited: set[int] = set()
        self._unchanged = 0

    def extend(self) -> bool:
        """Run one extend. Return whether the search is done."""
        before = self.top_m
        if not before:
            base = float(raw_distances(self._data.rows.centre[None], self._query, self._data.rows.metric)[0])
            self._merge(self._data.seeds, self._codes.entry[0], base)
        else:
            for parent in self._parents():
                self._merge(self._data.graph[parent], self._codes.blocks[parent], self._score(parent))
        self.extends += 1
        self._unchanged = self._unchanged + 1 if self.top_m == before else 0
        patience = self._params.patience
        if self._open() and (patience is None or self._unchanged < patience):
            return False
        return self._complete()

    def _parents(self) -> list[int]:
        parents: list[int] = []
        for entry in self._open():
            if len(parents) == self._params.search_width:
                break
            self.passed.add(entry)
            if self._distinct or entry[1] not in self.visited:
                parents.append(entry[1])
                self.visited.add(entry[1])
        return parents

    def _open(self) -> list[Entry]:
        """Return the entries whose node has not been a parent."""
        entries = [entry for entry in self.top_m if entry not in self.passed]
        return entries if self._distinct else [entry for entry in entries if entry[1] not in self.visited]

    def _score(self, node: int) -> float:
        distance = float(stored_distances(self._data.rows, self._query, np.array([node]))[0])
        if self._allowed is None or self._allowed[node]:
            self.scored[node] = distance
        return distance

    def _merge(self, neighbors: npt.NDArray[np.uint32], block: npt.NDArray[np.uint8], base: float) -> None:
        estimates = self._table.estimates(block, len(neighbors), base)
        for node, distance in zip(neighbors.tolist(), estimates.tolist(), strict=True):
            if node >= len(self._data.graph) or node in self.visited or (distance, node) in self.top_m:
                continue
            if len(self.top_m) == self._params.top_m and (distance, node) >= self.top_m[-1]:
                continue
            if self._distinct:
                self.visited.add(node)
            self.top_m = sorted([*self.top_m, (distance, node)])[: self._params.top_m]

    def _complete(self) -> bool:
        wanted = min(self._params.k, len(self._data.graph))
        for entry in self.top_m:
            if len(self.scored) < wanted and entry not in self.passed:
                self._score(entry[1])
        if len(self.scored) >= wanted or self._distinct:
            return True
        self._distinct = True
        self._begin()
        return False

    def result(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Return ids and distances of the k nearest scored nodes."""
        k = self._params.k
        best = sorted((distance, node) for node, distance in self.scored.items())[:k]
        found, distances = np.full(k, -1, np.int64), np.full(k, np.inf, np.float32)
        found[: len(best)] = [node for _, node in best]
        distances[: len(best)] = [distance for distance, _ in best]
        return self._data.ids_of(found), true_distances(distances, self._data.rows)


class Table:
    """Lookup table of a query for neighbour codes: sixteen sums, as bytes, for every four rotated dimensions."""

    def __init__(self, codes: NeighborCodes, query: FloatArray) -> None:
        groups = rotated(query, codes.signs).reshape(-1, 4)
        widths = np.abs(groups).sum(axis=1, dtype=np.float32)
        signs = np.array([[1 if entry >> i & 1 else -1 for i in range(4)] for entry in range(16)], np.float32)
        self._step = np.float32(max(2 * widths.max() / np.float32(254.5), np.float32(1e-30)))
        self._offset = np.float32(-widths.sum())
        self._bits = codes.bits
        self._entries = ((groups @ signs.T + widths[:, None]) / self._step + np.float32(0.5)).astype(np.int64)

    def estimates(self, block: npt.NDArray[np.uint8], count: int, base: float) -> FloatArray:
        """Return estimated distances of a block's neighbours, float32 [count]."""
        found = []
        size = 16 * len(self._entries) * self._bits
        for part in block.reshape(-1, size + FACTOR_BYTES):
            product = np.zeros(GROUP, np.float32)  # of a code and the query
            for number, code in enumerate(part[:size].reshape(self._bits, -1, 16)):
                places = np.concatenate([code & 15, code >> 4], axis=1)  # [groups, neighbours]
                sums = np.take_along_axis(self._entries, places.astype(np.int64), axis=1).sum(axis=0)
                product += np.float32(1 << number) * (self._offset + self._step * sums.astype(np.float32))
            added, factor = part[size:].view(np.float32).reshape(2, GROUP)
            found.append(np.float32(base) + added + factor * product)
        return np.concatenate(found)[:count].astype(np.float32)


def rotated(vector: FloatArray, signs: FloatArray) -> FloatArray:
    """Return a vector [d] rotated as float32 [ROUNDS, D'] describes."""
    dims = signs.shape[1]
    size = window(dims)
    out = np.zeros(dims)
    out[: len(vector)] = vector
    for number in range(ROUNDS):
        out *= signs[number]
        begin = 0 if number % 2 == 0 else dims - size
        part, half = out[begin : begin + size], 1
        while half < size:
            pairs = part.reshape(-1, 2, half)
            part[:] = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
            half *= 2
        if size < dims:
            halves = out.reshape(2, -1)
            out = np.concatenate([halves[0] + halves[1], halves[0] - halves[1]])
    return out.astype(np.float32)


def search_reference(
    data: IndexData, query: npt.ArrayLike, params: SearchParams, allowed: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[np.int64], FloatArray, int]:
    """Return ids [k], distances [k] and the number of extends of one query."""
    kind = ReferenceSearch if data.codes is None else EstimatedReference
    search = kind(data, query, params, allowed)
    while not search.extend():
        pass
    return (*search.result(), search.extends)


def fitted_query(query: FloatArray, rows: Rows) -> FloatArray:
    """Transform the query like the rows: normalise it for cosine, scale it for float16 rows under L2."""
    if rows.metric == "cosine":
        norm = np.sqrt(np.square(query, dtype=np.float64).sum())
        return (query / (norm if norm > 0 else 1)).astype(np.float32)
    return query * np.float32(rows.scale if rows.metric == "l2" else 1)


def raw_distances(vectors: FloatArray, query: FloatArray, metric: str) -> FloatArray:
    """Return squared L2 distances or negative dot products."""
    terms = np.square(vectors - query) if metric == "l2" else -(vectors * query)
    sums: FloatArray = terms.sum(axis=1, dtype=np.float32)
    return sums


def stored_distances(rows: Rows, query: FloatArray, nodes: npt.NDArray[np.int64]) -> FloatArray:
    return raw_distances(rows.codes[nodes, : rows.dim].astype(np.float32), query, rows.metric)


def true_distances(raw: FloatArray, rows: Rows) -> FloatArray:
    """Convert raw distances to the metric's, in float32."""
    factor, offset = metric_transform(rows)
    return (raw * np.float64(factor) + offset).astype(np.float32)
