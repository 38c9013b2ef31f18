"""Filtered search on a device: the host's part.

The device searches all rows with a longer top_m (`gpu.cpu.extend.filtered`) and returns the whole list, from which the
host takes the allowed rows. Bitmaps stay in host memory, where bits may be cleared at any time. Exact scans (few
allowed rows, a graph search that found too few, or an index without edges: growing rows) run on the host over its own
copy of the rows, some rows in each extend; the device is not involved.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.extend.keys import distance_of, may_be_result, node_of
from gpu.cpu.tables import Collection, Slot
from gpu.cuda.host import Host
from gpu.slots import MAX_COLLECTIONS
from ipc.native.arrays import uint64_at
from ipc.native.records import Array, new_array


class HostScans(NamedTuple):
    """Arrays for `gpu.cpu.extend.filtered.scan_rows`, with the device's slot and collection numbers."""

    collections: Array[Collection]  # [MAX_COLLECTIONS]
    slots: Array[Slot]
    keys: npt.NDArray[np.uint64]  # [slots, max_k]
    exact: npt.NDArray[np.uint64]  # the same array as keys: there are no neighbour codes


def new_host_scans(lines: npt.NDArray[np.uint8], head_bytes: int, max_k: int) -> HostScans:
    """Allocate the arrays. The slots' prepared queries are in `lines`, uint8 [slots, line_bytes], behind the heads."""
    slots, line_bytes = lines.shape
    table, keys = new_array(Slot, slots), np.zeros((slots, max_k), np.uint64)
    for slot in range(slots):
        table[slot].query = lines.ctypes.data + head_bytes + slot * line_bytes
    return HostScans(new_array(Collection, MAX_COLLECTIONS), table, keys, keys)


@compiled
def scans_of(host: Host) -> Any:
    lists = uint64_at(host.keys, (host.slots, host.max_k))
    return HostScans(host.collections, host.searches, lists, lists)


@compiled
def start_query(line: Slot, collection: int, k: int, scanning: bool) -> None:
    """Initialise the slot row of a new query, without a filter."""
    line.collection, line.k, line.scanning = collection, k, scanning
    line.allowed = line.allowed_count = line.cursor = line.filled = line.extends = 0


@compiled
def count_allowed(line: Slot, nodes: Any) -> Any:
    """Return how many results a graph search has, and how many of them pass the filter.

    nodes: int32, padded with -1.
    """
    results = passing = 0
    for node in nodes:
        if node < 0:
            break
        results += 1
        passing += may_be_result(line.allowed, np.int64(node))
    return results, passing


@compiled
def write_scan_result(batch: Any, slot: int, nodes: Any, raw: Any) -> None:
    """Write the results of a slot's scan in the device's format: nearest first, padded with -1 and +inf."""
    line = batch.slots[slot]
    for i in range(line.k):
        there = i < line.filled
        nodes[i] = np.int32(node_of(batch.keys[slot, i])) if there else np.int32(-1)
        raw[i] = distance_of(batch.keys[slot, i]) if there else np.float32(np.inf)
