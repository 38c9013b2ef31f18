"""Records that describe indexes, query encodings and slots to compiled code, and the arrays of a running batch.

Records hold addresses; their owner keeps the arrays behind them alive.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.index.rows import DTYPES, Rows
from ipc.native.arrays import float32_at, int32_at, int64_at, uint8_at, uint32_at, uint64_at
from ipc.native.records import F32, Array, Record, address_of, array_at, record, record_at


@record
class Collection(Record):
    """An index. Addresses are 0 where it has none: of codes (blocks and what follows), scan."""

    rows: int  # address
    row_bytes: int
    lanes: int
    kind: int
    graph: int  # address
    degree: int
    size: int  # rows
    seeds: int  # address
    seed_count: int
    factor: float  # with `offset`: converts a raw distance to the metric's
    offset: float
    blocks: int  # address
    block_bytes: int
    entry: int  # address
    rotated: int  # dimensions of a code
    query_table: int  # byte offset into a prepared query
    code_bits: int
    scan: int  # address


@record
class Encoding(Record):
    """How an index's queries are encoded."""

    dim: int
    normalised: bool
    scale: float
    centre: Array[F32]  # zero-padded
    signs: Array[F32]
    rotated_lanes: int  # 0 without neighbour codes


@record
class Slot(Record):
    """A slot's query and the state of its search."""

    collection: int
    k: int
    top_m: int
    width: int
    patience: int
    visited_bits: int
    query: int  # address of the prepared query
    start: int  # the start node, or -1 for the seeds
    filled: int  # entries of top_m
    cursor: int  # in top_m; in a scan: the next row
    unchanged: int  # extends since top_m changed
    extends: int
    parents: int
    task_begin: int
    task_end: int
    scored: int  # entries of `exact`
    distinct: bool  # no node may enter top_m twice
    allowed: int  # address of the filter's bitmap, one bit a node; 0 for no filter
    allowed_count: int  # bits set in it, 0 if unknown
    scanning: int  # a pass of a scan of the allowed rows (`gpu.cpu.extend.filtered`), 0 for a graph search
    margin: float  # of the last pass
    min_allowed: int  # a graph search stops once so many allowed entries precede the next parent; 0: without parents
    walked_parents: int  # so far, with min_allowed only
    allowed_parents: int  # of those that pass the filter


# Kinds: the row's element type times 2, plus 1 for a dot product.
F32_L2, F32_DOT, F16_L2, F16_DOT = range(4)


def kind_of(rows: Rows) -> int:
    """Return the kind of an index's rows."""
    return 2 * DTYPES.index(rows.dtype) + (rows.metric != "l2")


class Batch(NamedTuple):
    """The arrays of a running batch."""

    collection_count: int
    collections: Array[Collection]
    encodings: Array[Encoding]  # by collection
    slots: Array[Slot]
    queries: npt.NDArray[np.uint8]  # [slots, bytes of a prepared query]
    keys: npt.NDArray[np.uint64]  # [slots, max_top_m]
    visited: npt.NDArray[np.uint32]  # [slots, table]
    parents: npt.NDArray[np.int64]  # [slots, max_width]
    tasks: npt.NDArray[np.uint32]  # [slots · tasks]
    distances: npt.NDArray[np.float32]  # [slots · tasks]
    active: npt.NDArray[np.int32]  # [slots]: slots to extend, in admission order
    finished: npt.NDArray[np.int32]  # [slots]
    nodes: npt.NDArray[np.int64]  # [slots, max_k]: results
    result_distances: npt.NDArray[np.float32]  # [slots, max_k]
    exact: npt.NDArray[np.uint64]  # [slots, max_k]: keys of the results where top_m holds estimates

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays that are no records."""
        return self[4:]


ARRAYS = len(Batch._fields) - 1
BatchHandle: TypeAlias = npt.NDArray[np.int64]
"""What `handle_of` returns of a batch."""


def handle_of(batch: Batch) -> BatchHandle:
    """Return addresses and shapes of the arrays, int64 [arrays, 3]: one argument is cheaper to pass than all arrays."""
    records = (batch.collections, batch.encodings, batch.slots)
    lines = [(address_of(array), batch.collection_count, 1) for array in records]
    return np.array(lines + [(array.ctypes.data, *array.shape, 1)[:3] for array in batch.arrays], np.int64)


encoding_at = record_at(Encoding)
slot_at = record_at(Slot)
collections_at = array_at(Collection)
encodings_at = array_at(Encoding)
slots_at = array_at(Slot)


@compiled
def batch_at(handle: BatchHandle) -> Batch:
    """Return the batch that `handle_of` has described."""
    return Batch(
        handle[0, 1],
        collections_at(handle[0, 0]),
        encodings_at(handle[1, 0]),
        slots_at(handle[2, 0]),
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
