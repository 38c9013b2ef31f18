"""The state of a running batch: plain arrays, allocated once, that the stages read and write."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cpu import stages
from gpu.cpu.queries import code_offset, full_offset, prepared_bytes
from gpu.cpu.simd import WAYS
from gpu.index_data import IndexData
from gpu.params import SearchParams
from gpu.rows import aligned_empty, padded

_KINDS = {
    ("float32", "l2"): stages.F32_L2,
    ("float16", "l2"): stages.F16_L2,
    ("int8", "l2"): stages.I8_L2,
    ("float32", "dot"): stages.F32_DOT,
    ("float16", "dot"): stages.F16_DOT,
    ("int8", "dot"): stages.I8_DOT,
}
_MIN_VISITED_BITS, _MAX_VISITED_BITS = 9, 15


def collection_table(collections: Sequence[IndexData]) -> npt.NDArray[np.int64]:
    """What the stages need to know of each index. Holds addresses: the indexes must outlive the table."""
    table = np.zeros((len(collections), stages.COLLECTION_FIELDS), np.int64)
    for line, data in zip(table, collections, strict=True):
        rows = data.rows
        line[stages.ROWS], line[stages.ROW_BYTES] = rows.codes.ctypes.data, rows.codes.strides[0]
        line[stages.LANES] = rows.lanes
        line[stages.KIND] = _KINDS[rows.dtype, "l2" if rows.metric == "l2" else "dot"]
        line[stages.QUERY_ROW] = code_offset(rows) if rows.dtype == "int8" else full_offset(rows)
        if rows.sketch is not None:
            line[stages.SKETCHES] = rows.sketch.codes.ctypes.data
            line[stages.SKETCH_BYTES] = rows.sketch.codes.shape[1]
        if rows.full is not None:
            line[stages.FULL], line[stages.FULL_BYTES] = rows.full.ctypes.data, rows.full.strides[0]
            line[stages.FULL_LANES] = padded(rows.dim)
        line[stages.QUERY_FULL] = full_offset(rows)
        line[stages.GRAPH], line[stages.DEGREE] = data.graph.ctypes.data, data.graph.shape[1]
        line[stages.SIZE] = len(data.graph)
        line[stages.SEEDS], line[stages.SEED_COUNT] = data.seeds.ctypes.data, len(data.seeds)
    return table


def visited_bits(top_m: int, degree: int) -> int:
    """The nodes that a search of this length meets at most, as a power of two: the table forgets little."""
    return min(max((top_m * degree - 1).bit_length(), _MIN_VISITED_BITS), _MAX_VISITED_BITS)


class Batch(NamedTuple):
    """What compiled code sees. The addresses in `collections` and `slots` are of arrays that the caller keeps."""

    collections: npt.NDArray[np.int64]  # [collections, COLLECTION_FIELDS]
    slots: npt.NDArray[np.int64]  # [slots, SLOT_FIELDS]
    keys: npt.NDArray[np.uint64]  # [slots, max_top_m]
    visited: npt.NDArray[np.uint32]  # [slots, table]
    parents: npt.NDArray[np.int64]  # [slots, max_width]
    tasks: npt.NDArray[np.uint32]  # [slots · tasks]
    distances: npt.NDArray[np.float32]  # [slots · tasks]
    finished: npt.NDArray[np.int32]  # [slots]


def _spread(count: int, length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [count, length] whose rows begin in different sets of the caches."""
    item = np.dtype(dtype).itemsize
    stride = -(-length * item // 64) * 64 // item
    return aligned_empty((count, stride + 5 * 64 // item), dtype)[:, :length]


class BatchState:
    """The arrays of `slots` slots over some indexes, for queries of at most `max_top_m` and `max_width`.

    Bytes a slot: 8·max_top_m for top_m, 4·2^visited_bits for the visited table (at most 128 KiB), at most 6 a dimension
    and 320 more for the query, 8 a task (max_width·degree or the seeds), 8·max_width for parents, and about 120 more.
    """

    def __init__(self, collections: Sequence[IndexData], slots: int, max_top_m: int, max_width: int) -> None:
        self._keep_alive = tuple(collections)
        degree = max(data.graph.shape[1] for data in collections)
        tasks = (
            max(max_width * degree, *(len(data.seeds) for data in collections)) + 1
        )  # a task that is dropped is written first
        width = max(prepared_bytes(data.rows) for data in collections)
        self.queries = aligned_empty((slots, width), np.uint8)
        visited = _spread(slots, 1 << visited_bits(max_top_m, degree), np.uint32)
        self.batch = Batch(
            collections=collection_table(collections),
            slots=np.zeros((slots, stages.SLOT_FIELDS), np.int64),
            keys=_spread(slots, max_top_m, np.uint64),
            visited=visited,
            parents=np.zeros((slots, max_width), np.int64),
            tasks=np.zeros(slots * tasks, np.uint32),
            distances=np.zeros(slots * tasks, np.float32),
            finished=np.zeros(slots, np.int32),
        )
        self.batch.slots[:, stages.QUERY] = self.queries.ctypes.data + np.arange(slots) * width
        assert visited.strides[0] % (4 * WAYS) == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.queries.nbytes) + sum(array.nbytes for array in self.batch)

    def line(self, collection: int, params: SearchParams) -> npt.NDArray[np.int64]:
        """The columns before QUERY of a slot whose query asks this."""
        bits = visited_bits(params.top_m, int(self.batch.collections[collection, stages.DEGREE]))
        wanted = (collection, params.k, params.top_m, params.search_width, params.patience or 0, bits)
        return np.array(wanted, np.int64)
