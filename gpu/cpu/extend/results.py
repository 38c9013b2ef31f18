"""Results of a finished slot: filtering, output."""

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.extend.keys import distance_of, may_be_result, node_of
from gpu.cpu.tables import Batch


@compiled
def keep_allowed(batch: Batch, slot: int) -> None:
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
def write_result(batch: Batch, slot: int, nodes: npt.NDArray[np.int64], distances: npt.NDArray[np.float32]) -> None:
    """Write a finished slot's k nearest nodes and their distances in the metric, padded with -1 and +inf."""
    filled, collection = batch.slots[slot].filled, batch.collections[batch.slots[slot].collection]
    keys = batch.keys
    if collection.blocks != 0:
        filled, keys = batch.slots[slot].scored, batch.exact
    factor = collection.factor
    offset = collection.offset
    for i in range(batch.slots[slot].k):
        nodes[i] = np.int64(node_of(keys[slot, i])) if i < filled else -1
        distances[i] = np.float64(distance_of(keys[slot, i])) * factor + offset if i < filled else np.inf
