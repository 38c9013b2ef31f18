"""Searches of which only some rows may be results, on a device: what the host does for them.

The device walks over all rows, with a list that is longer by as much as fewer pass (`gpu.cpu.extend.filtered`), and
hands over the whole list, of which the host takes what may be a result. Bits stay the host's, who may clear some at any
time. Rows that are compared one by one (few pass, a walk found too few, or the index has no edges: growing rows) are
compared by the host from its own copy, some of them in each extend, and the device never learns of them.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray

from gpu.compiled import compiled
from gpu.cpu import tables as at
from gpu.cpu.extend.keys import distance_of, may_be_result, node_of
from gpu.cpu.simd import pointer
from gpu.slots import MAX_COLLECTIONS


class HostScans(NamedTuple):
    """What `gpu.cpu.extend.filtered.compare` works on, by the numbers that slots and collections have on the device."""

    collections: npt.NDArray[np.int64]  # [MAX_COLLECTIONS, COLLECTION_FIELDS]
    slots: npt.NDArray[np.int64]  # [slots, SLOT_FIELDS]
    keys: npt.NDArray[np.uint64]  # [slots, max_k]
    exact: npt.NDArray[np.uint64]  # as keys: there are no codes of neighbours


def new_host_scans(lines: npt.NDArray[np.uint8], head_bytes: int, max_k: int) -> HostScans:
    """For slots whose prepared queries stand in `lines`, uint8 [slots, line_bytes], behind the heads."""
    slots, line_bytes = lines.shape
    table, keys = np.zeros((slots, at.SLOT_FIELDS), np.int64), np.zeros((slots, max_k), np.uint64)
    table[:, at.QUERY] = lines.ctypes.data + head_bytes + np.arange(slots) * line_bytes
    return HostScans(np.zeros((MAX_COLLECTIONS, at.COLLECTION_FIELDS), np.int64), table, keys, keys)


@compiled
def host_scans_at(collections: int, table: int, keys: int, slots: int, max_k: int) -> Any:
    """The arrays at these addresses."""
    lists = carray(pointer(keys), (slots, max_k), np.uint64)
    return HostScans(
        carray(pointer(collections), (MAX_COLLECTIONS, at.COLLECTION_FIELDS), np.int64),
        carray(pointer(table), (slots, at.SLOT_FIELDS), np.int64),
        lists,
        lists,
    )


@compiled
def start_query(line: Any, collection: int, k: int, scanning: bool) -> None:
    """A query has the slot of this line: all rows may be results."""
    line[at.COLLECTION], line[at.K], line[at.SCANNING] = collection, k, scanning
    line[at.ALLOWED] = line[at.ALLOWED_COUNT] = line[at.CURSOR] = line[at.FILLED] = line[at.EXTENDS] = 0


@compiled
def count_allowed(line: Any, nodes: Any) -> Any:
    """How many of the nodes that a walk has found, int32, nearest first, -1 behind the last, may be results."""
    found = 0
    for node in nodes:
        if node < 0:
            break
        found += may_be_result(line[at.ALLOWED], np.int64(node))
    return found


@compiled
def write_scan_result(batch: Any, slot: int, nodes: Any, raw: Any) -> None:
    """The rows of a slot that were compared, nearest first, as the device writes what it has found: -1 and +inf where
    there are fewer than k."""
    line = batch.slots[slot]
    for i in range(line[at.K]):
        there = i < line[at.FILLED]
        nodes[i] = np.int32(node_of(batch.keys[slot, i])) if there else np.int32(-1)
        raw[i] = distance_of(batch.keys[slot, i]) if there else np.float32(np.inf)
