"""State of a running batch: arrays, allocated once, that the stages read and write."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu import tables as at
from gpu.cpu.queries import QueryEncoding, code_offset, full_offset, prepared_bytes, table_offset
from gpu.cpu.simd import KEYS_AT_ONCE
from gpu.cpu.tables import Batch, handle_of, kind_of
from gpu.index.data import IndexData
from gpu.index.rows import aligned_empty, metric_transform, padded
from gpu.params import SearchParams

_MIN_VISITED_BITS, _MAX_VISITED_BITS = 9, 15
_PARENTS_A_NODE = 4  # visited-table entries per entry of top_m, with neighbour codes


def collection_table(collections: Sequence[IndexData | None]) -> npt.NDArray[np.int64]:
    """Return the stages' table of index parameters. It holds addresses: the indexes must outlive it."""
    table = np.zeros((len(collections), at.COLLECTION_FIELDS), np.int64)
    for line, data in zip(table, collections, strict=True):
        if data is None:
            continue
        rows = data.rows
        line[at.ROWS], line[at.ROW_BYTES] = rows.codes.ctypes.data, rows.codes.strides[0]
        line[at.LANES] = rows.lanes
        line[at.KIND] = kind_of(rows)
        line[at.QUERY_ROW] = code_offset(rows) if rows.dtype == "int8" else full_offset(rows)
        if rows.sketch is not None:
            line[at.SKETCHES] = rows.sketch.codes.ctypes.data
            line[at.SKETCH_BYTES] = rows.sketch.codes.shape[1]
        if rows.full is not None:
            line[at.FULL], line[at.FULL_BYTES] = rows.full.ctypes.data, rows.full.strides[0]
            line[at.FULL_LANES] = rows.full.shape[1]
        line[at.QUERY_FULL] = full_offset(rows)
        line[at.GRAPH], line[at.DEGREE] = data.graph.ctypes.data, data.graph.shape[1]
        line[at.SIZE] = len(data.graph)
        line[at.FACTOR : at.OFFSET + 1] = np.array(metric_transform(rows), np.float64).view(np.int64)
        line[at.SEEDS], line[at.SEED_COUNT] = data.seeds.ctypes.data, len(data.seeds)
        if data.codes is not None:
            line[at.BLOCKS], line[at.BLOCK_BYTES] = data.codes.blocks.ctypes.data, data.codes.blocks.shape[1]
            line[at.ENTRY], line[at.ROTATED] = data.codes.entry.ctypes.data, data.codes.dims
            line[at.QUERY_TABLE], line[at.CODE_BITS] = table_offset(rows), data.codes.bits
            if data.codes.scan is not None:
                line[at.SCAN] = data.codes.scan.ctypes.data
    return table


@compiled
def visited_bits(top_m: int, degree: int) -> Any:
    """Return log2 of the visited table's size: the upper bound of visited nodes, clamped, so that few are evicted."""
    bits = _MIN_VISITED_BITS
    while bits < _MAX_VISITED_BITS and (1 << bits) < top_m * degree:
        bits += 1
    return bits


@compiled
def visited_bits_of(collection: Any, top_m: int) -> Any:
    """Return `visited_bits` for a row of the collection table."""
    coded = collection[at.BLOCKS] != 0  # with codes only parents are marked as visited, not all candidates
    return visited_bits(top_m, _PARENTS_A_NODE if coded else collection[at.DEGREE])


class BatchState:
    """Arrays of `slots` slots for queries of at most `max_top_m` and `max_width` over some indexes.

    Bytes per slot: 8·max_top_m for top_m, 4·2^visited_bits for the visited table (at most 128 KiB), up to 6 per
    dimension plus 320 for the query (8 more per dimension with neighbour codes), 8 per task (max_width·degree or the
    seeds), 8·max_width for parents, 20·max_k for results, and about 150 more.
    """

    def __init__(
        self,
        collections: Sequence[IndexData | None],
        slots: int,
        max_top_m: int,
        max_width: int,
        max_k: int | None = None,
    ) -> None:
        max_top_m = padded(max_top_m, KEYS_AT_ONCE)
        loaded = [data for data in collections if data is not None]
        encodings = [None if data is None else QueryEncoding(data.rows, data.codes) for data in collections]
        self._keep_alive = (tuple(collections), encodings)
        degree = max((data.graph.shape[1] for data in loaded), default=1)
        scored = max((max_width * degree, *(len(data.seeds) for data in loaded)))
        tasks = scored + 1  # a dropped task is written before it is skipped
        width = max((prepared_bytes(data.rows, data.codes) for data in loaded), default=64)
        results = (slots, max_k or max_top_m)
        lines = [
            np.zeros(at.ENCODING_FIELDS, np.int64) if encoding is None else encoding.line for encoding in encodings
        ]
        self.batch = Batch(
            collections=collection_table(collections),
            encodings=np.stack(lines) if lines else np.zeros((0, at.ENCODING_FIELDS), np.int64),
            slots=np.zeros((slots, at.SLOT_FIELDS), np.int64),
            queries=aligned_empty((slots, width), np.uint8),
            keys=aligned_empty((slots, max_top_m), np.uint64),
            visited=aligned_empty((slots, 1 << visited_bits(max_top_m, degree)), np.uint32),
            parents=np.zeros((slots, max_width), np.int64),
            tasks=np.zeros(slots * tasks, np.uint32),
            distances=np.zeros(slots * tasks, np.float32),
            active=np.zeros(slots, np.int32),
            finished=np.zeros(slots, np.int32),
            nodes=np.zeros(results, np.int64),
            found=np.zeros(results, np.float32),
            exact=np.zeros(results, np.uint64),
        )
        self.batch.slots[:, at.QUERY] = self.batch.queries.ctypes.data + np.arange(slots) * width
        self.handle = handle_of(self.batch)

    def migrate_from(self, other: "BatchState", slots: Sequence[int], count: int) -> None:
        """Copy these slots from another state, with its list of the `count` running ones.

        Precondition: their collections have the same numbers in both states.
        """
        ours, theirs = self.batch, other.batch
        arrays = ((ours.queries, theirs.queries), (ours.visited, theirs.visited), (ours.keys, theirs.keys))
        results = ((ours.nodes, theirs.nodes), (ours.found, theirs.found), (ours.exact, theirs.exact))
        for slot in slots:
            for mine, its in (*arrays, *results):
                columns = min(mine.shape[1], its.shape[1])  # both are wide enough for the slot's index
                mine[slot, :columns] = its[slot, :columns]
            address = ours.slots[slot, at.QUERY]
            ours.slots[slot] = theirs.slots[slot]
            ours.slots[slot, at.QUERY] = address
        ours.active[:count] = theirs.active[:count]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.batch)

    def line(self, collection: int, params: SearchParams) -> npt.NDArray[np.int64]:
        """Return the slot columns before QUERY for a query with these parameters."""
        bits = visited_bits_of(self.batch.collections[collection], params.top_m)
        columns = (collection, params.k, params.top_m, params.search_width, params.patience or 0, bits)
        return np.array(columns, np.int64)
