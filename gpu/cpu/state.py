"""State of a running batch: arrays, allocated once, that the stages read and write."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.compiled import compiled
from gpu.cpu.queries import prepared_bytes, query_encoding, table_offset
from gpu.cpu.simd import KEYS_AT_ONCE
from gpu.cpu.tables import Batch, Collection, Encoding, Slot, handle_of, kind_of
from gpu.index.data import GROUP, IndexData
from gpu.index.rows import aligned_empty, metric_transform, padded
from gpu.params import SearchParams
from ipc.native.records import new_array

_MIN_VISITED_BITS, _MAX_VISITED_BITS = 9, 15
_PARENTS_A_NODE = 4  # visited-table entries per entry of top_m, with neighbour codes


def collection_record(data: IndexData) -> Collection:
    """Return the stages' record of an index. It holds addresses: the index must outlive it."""
    rows = data.rows
    factor, offset = metric_transform(rows)
    made = Collection(
        rows=rows.codes.ctypes.data,
        row_bytes=rows.codes.strides[0],
        lanes=rows.lanes,
        kind=kind_of(rows),
        graph=data.graph.ctypes.data,
        degree=data.graph.shape[1],
        size=len(data.graph),
        factor=factor,
        offset=offset,
        seeds=data.seeds.ctypes.data,
        seed_count=len(data.seeds),
    )
    if data.codes is not None:
        made.blocks, made.block_bytes = data.codes.blocks.ctypes.data, data.codes.blocks.shape[1]
        made.entry, made.rotated = data.codes.entry.ctypes.data, data.codes.dims
        made.query_table, made.code_bits = table_offset(rows.dim), data.codes.bits
        if data.codes.scan is not None:
            made.scan = data.codes.scan.ctypes.data
    return made


@compiled
def visited_bits(top_m: int, degree: int) -> Any:
    """Return log2 of the visited table's size: the upper bound of visited nodes, clamped, so that few are evicted."""
    bits = _MIN_VISITED_BITS
    while bits < _MAX_VISITED_BITS and (1 << bits) < top_m * degree:
        bits += 1
    return bits


@compiled
def visited_bits_of(collection: Collection, top_m: int) -> Any:
    coded = collection.blocks != 0  # with codes only parents are marked as visited, not all candidates
    return visited_bits(top_m, _PARENTS_A_NODE if coded else collection.degree)


class BatchState:
    """Arrays of `slots` slots for queries of at most `max_top_m` and `max_width` over some indexes.

    Bytes per slot: 8·max_top_m for top_m, 4·2^visited_bits for the visited table (at most 128 KiB), 4 per
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
        self._keep_alive = tuple(collections)
        degree = max((data.graph.shape[1] for data in loaded), default=1)
        scored = max((max_width * degree, *(len(data.seeds) for data in loaded)))
        tasks = scored + 1  # a dropped task is written before it is skipped
        width = max((prepared_bytes(data.rows, data.codes) for data in loaded), default=64)
        results = (slots, max_k or max_top_m)
        self.batch = Batch(
            collection_count=len(collections),
            collections=new_array(Collection, len(collections)),
            encodings=new_array(Encoding, len(collections)),
            slots=new_array(Slot, slots),
            queries=aligned_empty((slots, width), np.uint8),
            keys=aligned_empty((slots, max_top_m), np.uint64),
            visited=aligned_empty((slots, 1 << visited_bits(max_top_m, max(degree, _PARENTS_A_NODE))), np.uint32),
            parents=np.zeros((slots, max_width), np.int64),
            tasks=np.zeros(slots * tasks, np.uint32),
            distances=np.zeros(max(slots * tasks, GROUP), np.float32),  # a group is estimated at once
            active=np.zeros(slots, np.int32),
            finished=np.zeros(slots, np.int32),
            nodes=np.zeros(results, np.int64),
            result_distances=np.zeros(results, np.float32),
            exact=np.zeros(results, np.uint64),
        )
        for number, data in enumerate(collections):
            if data is not None:
                self.batch.collections[number] = collection_record(data)
                self.batch.encodings[number] = query_encoding(data.rows, data.codes)
        for slot in range(slots):
            self.batch.slots[slot].query = self.batch.queries.ctypes.data + slot * width
        self.handle = handle_of(self.batch)

    def migrate_from(self, other: "BatchState", slots: Sequence[int], count: int) -> None:
        """Copy these slots from another state, with its list of the `count` running ones.

        Precondition: their collections have the same numbers in both states.
        """
        ours, theirs = self.batch, other.batch
        arrays = ((ours.queries, theirs.queries), (ours.visited, theirs.visited), (ours.keys, theirs.keys))
        results = (
            (ours.nodes, theirs.nodes),
            (ours.result_distances, theirs.result_distances),
            (ours.exact, theirs.exact),
        )
        for slot in slots:
            for mine, its in (*arrays, *results):
                columns = min(mine.shape[1], its.shape[1])  # both are wide enough for the slot's index
                mine[slot, :columns] = its[slot, :columns]
            address = ours.slots[slot].query
            ours.slots[slot] = theirs.slots[slot]
            ours.slots[slot].query = address
        ours.active[:count] = theirs.active[:count]

    def parameters(self, collection: int, params: SearchParams) -> Slot:
        """Return a slot with the parameters of a query."""
        return Slot(
            collection=collection,
            k=params.k,
            top_m=params.top_m,
            width=params.search_width,
            patience=params.patience or 0,
            visited_bits=visited_bits_of.py_func(self.batch.collections[collection], params.top_m),
        )
