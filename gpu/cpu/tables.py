"""Tables that describe indexes, query encodings and slots to compiled code, and the arrays of a running batch.

The tables are int64 and hold addresses; their owner keeps the arrays behind them alive.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.index.rows import DTYPES, Rows
from ipc.native.arrays import float32_at, int32_at, int64_at, uint8_at, uint32_at, uint64_at

# Columns of the collection table, int64 [collections, COLLECTION_FIELDS]. *_BYTES are sizes in bytes; QUERY_ROW,
# QUERY_FULL and QUERY_TABLE byte offsets into a prepared query; FACTOR and OFFSET bits of float64 that convert a raw
# distance to the metric's; ROWS, SKETCHES, FULL, GRAPH, SEEDS, BLOCKS, ENTRY and SCAN addresses; the rest counts of
# elements. SKETCHES, FULL, BLOCKS (with the columns after it) and SCAN are 0 if the index has none.
(
    ROWS,
    ROW_BYTES,
    LANES,
    KIND,
    QUERY_ROW,
    SKETCHES,
    SKETCH_BYTES,
    FULL,
    FULL_BYTES,
    FULL_LANES,
    QUERY_FULL,
    GRAPH,
    DEGREE,
    SIZE,
    SEEDS,
    SEED_COUNT,
    FACTOR,
    OFFSET,
    BLOCKS,
    BLOCK_BYTES,
    ENTRY,
    ROTATED,
    QUERY_TABLE,
    CODE_BITS,
    SCAN,
) = range(25)
COLLECTION_FIELDS = 25

# Columns of the query encoding table, int64 [collections, ENCODING_FIELDS]. SCALE and SLACK are the bits of float64;
# CENTRE, PROJECTION and SIGNS addresses of float32, float16 and float32. ROTATED_LANES is 0 without neighbour codes.
(
    DIM,
    NORMALISED,
    SQUARED,
    SCALE,
    SLACK,
    CENTRE,
    PROJECTION,
    COMPONENTS,
    SKETCH_LANES,
    CODE_LANES,
    SIGNS,
    ROTATED_LANES,
) = range(12)
ENCODING_FIELDS = 12

# Columns of the slot table, int64 [slots, SLOT_FIELDS]. QUERY: address of the prepared query. START: the start node, or
# -1 for the seeds. SCORED: number of entries of `exact`. DISTINCT: 1 once no node may enter top_m twice. ALLOWED:
# address of the filter's bitmap, one bit a node, or 0 for no filter. ALLOWED_COUNT: number of bits set in it, 0 if
# unknown. SCANNING: 0 for a graph search, else the pass of a scan of the allowed rows that is made from CURSOR on
# (`gpu.cpu.extend.filtered`); MARGIN: bits of float64, of its last pass. MIN_ALLOWED: a graph search stops once this
# many allowed entries precede the next parent; 0: when no parent is left.
# WALKED_PARENTS: number of parents so far; ALLOWED_PARENTS: of those that pass the filter (with MIN_ALLOWED only).
(
    COLLECTION,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    VISITED_BITS,
    QUERY,
    START,
    FILLED,
    CURSOR,
    UNCHANGED,
    EXTENDS,
    PARENTS,
    TASK_BEGIN,
    TASK_END,
    SCORED,
    DISTINCT,
    ALLOWED,
    ALLOWED_COUNT,
    SCANNING,
    MARGIN,
    MIN_ALLOWED,
    WALKED_PARENTS,
    ALLOWED_PARENTS,
) = range(24)
SLOT_FIELDS = 24

# Kinds: the row's element type times 2, plus 1 for a dot product.
F32_L2, F32_DOT, F16_L2, F16_DOT, I8_L2, I8_DOT = range(6)


def kind_of(rows: Rows) -> int:
    """Return the kind of an index's rows."""
    return 2 * DTYPES.index(rows.dtype) + (rows.metric != "l2")


class Batch(NamedTuple):
    """The arrays of a running batch."""

    collections: npt.NDArray[np.int64]  # [collections, COLLECTION_FIELDS]
    encodings: npt.NDArray[np.int64]  # [collections, ENCODING_FIELDS]
    slots: npt.NDArray[np.int64]  # [slots, SLOT_FIELDS]
    queries: npt.NDArray[np.uint8]  # [slots, bytes of a prepared query]
    keys: npt.NDArray[np.uint64]  # [slots, max_top_m]
    visited: npt.NDArray[np.uint32]  # [slots, table]
    parents: npt.NDArray[np.int64]  # [slots, max_width]
    tasks: npt.NDArray[np.uint32]  # [slots · tasks]
    distances: npt.NDArray[np.float32]  # [slots · tasks]
    active: npt.NDArray[np.int32]  # [slots]: slots to extend, in admission order
    finished: npt.NDArray[np.int32]  # [slots]
    nodes: npt.NDArray[np.int64]  # [slots, max_k]: results
    found: npt.NDArray[np.float32]  # [slots, max_k]: their distances
    exact: npt.NDArray[np.uint64]  # [slots, max_k]: keys of the results where top_m holds estimates


def handle_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Return addresses and shapes of the arrays, int64 [arrays, 3]: one argument is cheaper to pass than all arrays."""
    return np.array([(array.ctypes.data, *array.shape, 1)[:3] for array in batch], np.int64)


@compiled
def batch_at(handle: Any) -> Any:
    """Return the batch that `handle_of` has described."""
    return Batch(
        int64_at(handle[0, 0], (handle[0, 1], handle[0, 2])),
        int64_at(handle[1, 0], (handle[1, 1], handle[1, 2])),
        int64_at(handle[2, 0], (handle[2, 1], handle[2, 2])),
        uint8_at(handle[3, 0], (handle[3, 1], handle[3, 2])),
        uint64_at(handle[4, 0], (handle[4, 1], handle[4, 2])),
        uint32_at(handle[5, 0], (handle[5, 1], handle[5, 2])),
        int64_at(handle[6, 0], (handle[6, 1], handle[6, 2])),
        uint32_at(handle[7, 0], handle[7, 1]),
        float32_at(handle[8, 0], handle[8, 1]),
        int32_at(handle[9, 0], handle[9, 1]),
        int32_at(handle[10, 0], handle[10, 1]),
        int64_at(handle[11, 0], (handle[11, 1], handle[11, 2])),
        float32_at(handle[12, 0], (handle[12, 1], handle[12, 2])),
        uint64_at(handle[13, 0], (handle[13, 1], handle[13, 2])),
    )
