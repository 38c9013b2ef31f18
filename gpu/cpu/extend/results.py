"""Results of a finished slot: filtering, rescoring of int8 candidates, output."""

import numpy as np

from gpu.compiled import compiled
from gpu.cpu import tables as at
from gpu.cpu.extend.keys import distance_of, key_of, may_be_result, node_of, row_distance
from gpu.cpu.simd import prefetch

RESCORED_AT_LEAST = 8


@compiled
def keep_allowed(batch, slot):  # type: ignore[no-untyped-def]
    """Remove entries that the filter rejects from a finished top_m."""
    slots, keys = batch.slots, batch.keys
    if slots[slot, at.ALLOWED] == 0:
        return
    kept = 0
    for i in range(slots[slot, at.FILLED]):
        if may_be_result(slots[slot, at.ALLOWED], node_of(keys[slot, i])):
            keys[slot, kept] = keys[slot, i]
            kept += 1
    slots[slot, at.FILLED] = kept


@compiled
def rescore(batch, slot):  # type: ignore[no-untyped-def]
    """Sort the nearest entries of a finished top_m by full-precision distance (int8 only).

    Rescoring the first max(k, 8) entries measures the range of the codes' error for this query. Later entries, up to
    2·k + 16, are rescored as long as an error somewhat below that range could make them nearer than the k-th.
    """
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    if collections[slots[slot, at.COLLECTION], at.FULL] == 0:
        return
    count = min(slots[slot, at.FILLED], 2 * slots[slot, at.K] + 16)
    first = min(count, max(slots[slot, at.K], RESCORED_AT_LEAST))
    least, most = rescore_range(batch, slot, 0, first)
    if first == count:
        return
    worst = distance_of(keys[slot, slots[slot, at.K] - 1])
    following = first
    while following < count and distance_of(keys[slot, following]) + least - (most - least) < worst:
        following += 1
    rescore_range(batch, slot, first, following)


@compiled
def rescore_range(batch, slot, begin, end):  # type: ignore[no-untyped-def]
    """Rescore entries begin..end and sort them into the earlier ones. Returns the (least, most) distance change."""
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    collection = slots[slot, at.COLLECTION]
    full, full_bytes = collections[collection, at.FULL], collections[collection, at.FULL_BYTES]
    kind = at.F32_DOT if collections[collection, at.KIND] == at.I8_DOT else at.F32_L2
    lanes = collections[collection, at.FULL_LANES]
    query = np.uint64(slots[slot, at.QUERY] + collections[collection, at.QUERY_FULL])
    least, most = np.float32(np.inf), np.float32(-np.inf)
    for i in range(begin, end):
        node = np.int64(node_of(keys[slot, i]))
        for offset in range(0, full_bytes, 64):
            prefetch(np.uint64(full + node * full_bytes + offset))
    for i in range(begin, end):
        node = np.int64(node_of(keys[slot, i]))
        distance = row_distance(kind, np.uint64(full + node * full_bytes), query, lanes, np.float32(1))
        least = min(least, distance - distance_of(keys[slot, i]))
        most = max(most, distance - distance_of(keys[slot, i]))
        key = key_of(distance, node)
        j = i
        while j > 0 and keys[slot, j - 1] > key:
            keys[slot, j] = keys[slot, j - 1]
            j -= 1
        keys[slot, j] = key
    return least, most


@compiled
def write_result(batch, slot, nodes, found):  # type: ignore[no-untyped-def]
    """Write a finished slot's k nearest nodes and their distances in the metric, padded with -1 and +inf."""
    filled, collection = batch.slots[slot, at.FILLED], batch.slots[slot, at.COLLECTION]
    keys = batch.keys
    if batch.collections[collection, at.BLOCKS] != 0:
        filled, keys = batch.slots[slot, at.SCORED], batch.exact
    factor = np.int64(batch.collections[collection, at.FACTOR]).view(np.float64)
    offset = np.int64(batch.collections[collection, at.OFFSET]).view(np.float64)
    for i in range(batch.slots[slot, at.K]):
        nodes[i] = np.int64(node_of(keys[slot, i])) if i < filled else -1
        found[i] = np.float64(distance_of(keys[slot, i])) * factor + offset if i < filled else np.inf
