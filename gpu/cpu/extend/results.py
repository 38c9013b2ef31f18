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
    if slots[slot].allowed == 0:
        return
    kept = 0
    for i in range(slots[slot].filled):
        if may_be_result(slots[slot].allowed, node_of(keys[slot, i])):
            keys[slot, kept] = keys[slot, i]
            kept += 1
    slots[slot].filled = kept


@compiled
def rescore(batch, slot):  # type: ignore[no-untyped-def]
    """Sort the nearest entries of a finished top_m by full-precision distance (int8 only).

    Rescoring the first max(k, 8) entries measures the range of the codes' error for this query. Later entries, up to
    2·k + 16, are rescored as long as an error somewhat below that range could make them nearer than the k-th.
    """
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    if collections[slots[slot].collection].full == 0:
        return
    count = min(slots[slot].filled, 2 * slots[slot].k + 16)
    first = min(count, max(slots[slot].k, RESCORED_AT_LEAST))
    least, most = rescore_range(batch, slot, 0, first)
    if first == count:
        return
    worst = distance_of(keys[slot, slots[slot].k - 1])
    following = first
    while following < count and distance_of(keys[slot, following]) + least - (most - least) < worst:
        following += 1
    rescore_range(batch, slot, first, following)


@compiled
def rescore_range(batch, slot, begin, end):  # type: ignore[no-untyped-def]
    """Rescore entries begin..end and sort them into the earlier ones. Returns the (least, most) distance change."""
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    collection = collections[slots[slot].collection]
    full, full_bytes = collection.full, collection.full_bytes
    kind = at.F32_DOT if collection.kind == at.I8_DOT else at.F32_L2
    lanes = collection.full_lanes
    query = np.uint64(slots[slot].query + collection.query_full)
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
    filled, collection = batch.slots[slot].filled, batch.collections[batch.slots[slot].collection]
    keys = batch.keys
    if collection.blocks != 0:
        filled, keys = batch.slots[slot].scored, batch.exact
    factor = collection.factor
    offset = collection.offset
    for i in range(batch.slots[slot].k):
        nodes[i] = np.int64(node_of(keys[slot, i])) if i < filled else -1
        found[i] = np.float64(distance_of(keys[slot, i])) * factor + offset if i < filled else np.inf
