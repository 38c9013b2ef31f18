"""Exact (brute-force) search over all rows or a list of rows."""

import numpy as np
import numpy.typing as npt

from gpu.build.params import check_within
from gpu.compiled import compiled
from gpu.cpu.extend.keys import distance_of, insert, key_of, node_of, row_distance
from gpu.cpu.queries import QUERY_ROW, prepare, prepared_bytes, query_encoding
from gpu.cpu.simd import prefetch
from gpu.cpu.tables import kind_of
from gpu.errors import InvalidParams, InvalidVector
from gpu.index.rows import Rows, aligned_empty, metric_transform

BLOCK = 256  # rows scored for all queries before the next block is read
MAX_K = 4096


@compiled
def scan(
    kind: int,
    start: int,
    row_bytes: int,
    lanes: int,
    nodes: npt.NDArray[np.int64],
    count: int,
    queries: npt.NDArray[np.uint8],
    offset: int,
    keys: npt.NDArray[np.uint64],
    filled: npt.NDArray[np.int64],
) -> None:
    """Write the keys of each prepared query's nearest rows to `keys`, uint64 [q, k], and their number to `filled`.

    queries: uint8 [q, …], prepared. nodes: int64, the rows to score; empty: the first `count` rows.
    """
    k = keys.shape[1]
    some = len(nodes) > 0
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        for q in range(len(queries)):
            query = np.uint64(queries[q].ctypes.data + offset)
            for i in range(begin, end):
                node = nodes[i] if some else i
                if some and q == 0 and i + 4 < end:
                    following = start + nodes[i + 4] * row_bytes
                    for line in range(0, row_bytes, 64):
                        prefetch(np.uint64(following + line))
                distance = row_distance(kind, np.uint64(start + node * row_bytes), query, lanes)
                if insert(keys, q, filled[q], k, key_of(distance, node)) >= 0:
                    filled[q] = min(filled[q] + 1, k)


@compiled
def write(
    keys: npt.NDArray[np.uint64],
    filled: npt.NDArray[np.int64],
    factor: float,
    offset: float,
    nodes: npt.NDArray[np.int64],
    distances: npt.NDArray[np.float32],
) -> None:
    """Convert keys to nodes and distances in the metric, padded with -1 and +inf."""
    for q in range(len(keys)):
        for i in range(keys.shape[1]):
            there = i < filled[q]
            nodes[q, i] = np.int64(node_of(keys[q, i])) if there else -1
            distances[q, i] = np.float64(distance_of(keys[q, i])) * factor + offset if there else np.inf


def nearest(
    rows: Rows,
    queries: npt.ArrayLike,
    k: int,
    nodes: npt.NDArray[np.int64] | None = None,
    count: int | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return nodes int64 [q, k] and distances float32 [q, k] of the nearest rows, padded with -1 and +inf.

    nodes: int64, the rows to score; default: the first `count`, or all. Raises InvalidVector and InvalidParams.
    """
    array = np.asarray(queries)
    if array.ndim != 2:
        raise InvalidVector(f"queries have shape {array.shape}; this index needs [q, {rows.dim}]")
    check_within("k", k, 1, MAX_K)
    codes = rows.codes
    selected = np.zeros(0, np.int64) if nodes is None else np.ascontiguousarray(nodes, np.int64)
    total = len(selected) if nodes is not None else len(codes) if count is None else count
    if not 0 <= total <= len(codes) or (
        len(selected) and not 0 <= int(selected.min()) <= int(selected.max()) < len(codes)
    ):
        raise InvalidParams(f"row numbers must be within 0..{len(codes) - 1}")
    prepared = aligned_empty((len(array), prepared_bytes(rows)), np.uint8)
    prepare(array, query_encoding(rows), prepared)
    keys, filled = np.empty((len(array), k), np.uint64), np.zeros(len(array), np.int64)
    scan(
        kind_of(rows), codes.ctypes.data, codes.strides[0], codes.shape[1], selected, total, prepared,
        QUERY_ROW, keys, filled,
    )  # fmt: skip
    nearest_nodes, distances = np.empty(keys.shape, np.int64), np.empty(keys.shape, np.float32)
    write(keys, filled, *metric_transform(rows), nearest_nodes, distances)
    return nearest_nodes, distances
