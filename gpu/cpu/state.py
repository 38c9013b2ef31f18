"""The state of a running batch: plain arrays, allocated once, that the stages read and write."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cpu import stages
from gpu.index_data import IndexData
from gpu.params import SearchParams
from gpu.rows import padded, query_bytes

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
        line[stages.GRAPH], line[stages.DEGREE] = data.graph.ctypes.data, data.graph.shape[1]
        line[stages.SIZE] = len(data.graph)
        line[stages.SEEDS], line[stages.SEED_COUNT] = data.seeds.ctypes.data, len(data.seeds)
        if rows.full is not None:
            line[stages.FULL], line[stages.FULL_BYTES] = rows.full.ctypes.data, rows.full.strides[0]
            line[stages.FULL_LANES] = padded(rows.dim)
    return table


def visited_bits(top_m: int, degree: int) -> int:
    """Twice the nodes that a search of this length scores, as a power of two, so that the table forgets little."""
    return min(max((2 * top_m * degree - 1).bit_length(), _MIN_VISITED_BITS), _MAX_VISITED_BITS)


class Batch(NamedTuple):
    """What compiled code sees. The addresses in `collections` and `queries` are of arrays that the caller keeps."""

    collections: npt.NDArray[np.int64]  # [collections, COLLECTION_FIELDS]
    slots: npt.NDArray[np.int64]  # [slots, SLOT_FIELDS]
    queries: npt.NDArray[np.int64]  # [slots] address of the prepared query
    scales: npt.NDArray[np.float32]  # [slots] of its int8 codes
    keys: npt.NDArray[np.uint64]  # [slots, max_top_m]
    visited: npt.NDArray[np.uint32]  # [slots, table + window]
    parents: npt.NDArray[np.int64]  # [slots, max_width]
    tasks: npt.NDArray[np.uint32]  # [slots · tasks]
    distances: npt.NDArray[np.float32]  # [slots · tasks]
    finished: npt.NDArray[np.int32]  # [slots]


class BatchState:
    """The arrays of `slots` slots over some indexes, for queries of at most `max_top_m` and `max_width`.

    Bytes a slot: 8·max_top_m for top_m, 4·2^visited_bits for the visited table (at most 128 KiB), at most 5 a dimension
    for the query, 8 a task (max_width·degree or the seeds), and about 200 more.
    """

    def __init__(self, collections: Sequence[IndexData], slots: int, max_top_m: int, max_width: int) -> None:
        self._keep_alive = tuple(collections)
        degree = max(data.graph.shape[1] for data in collections)
        tasks = max(max_width * degree, *(len(data.seeds) for data in collections))
        width = max(query_bytes(data.rows.dim, data.rows.dtype) for data in collections)
        self.query_bytes = np.zeros((slots, width), np.uint8)
        self.batch = Batch(
            collections=collection_table(collections),
            slots=np.zeros((slots, stages.SLOT_FIELDS), np.int64),
            queries=self.query_bytes.ctypes.data + np.arange(slots, dtype=np.int64) * width,
            scales=np.zeros(slots, np.float32),
            keys=np.zeros((slots, max_top_m), np.uint64),
            visited=np.zeros((slots, (1 << visited_bits(max_top_m, degree)) + stages.WINDOW), np.uint32),
            parents=np.zeros((slots, max_width), np.int64),
            tasks=np.zeros(slots * tasks, np.uint32),
            distances=np.zeros(slots * tasks, np.float32),
            finished=np.zeros(slots, np.int32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.query_bytes.nbytes + sum(array.nbytes for array in self.batch)

    def set_params(self, slot: int, collection: int, params: SearchParams) -> None:
        """Write what a query asks into its slot, and make the slot ready for its first extend."""
        line = self.batch.slots[slot]
        line[stages.COLLECTION] = collection
        line[stages.K], line[stages.TOP_M], line[stages.WIDTH] = params.k, params.top_m, params.search_width
        line[stages.PATIENCE] = params.patience or 0
        line[stages.VISITED_BITS] = visited_bits(params.top_m, int(self.batch.collections[collection, stages.DEGREE]))
        stages.reset_slot(self.batch, slot)
