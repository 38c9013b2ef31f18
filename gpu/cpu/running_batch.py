"""Compiled operations of the running batch: admit a query to a slot, extend all active slots, write results.

`handle` describes the batch (see `tables.handle_of`).
"""

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.extend.results import write_result
from gpu.cpu.extend.stages import extend
from gpu.cpu.queries import write_query
from gpu.cpu.tables import Batch, BatchHandle, batch_at

INTERLEAVED = 8  # slots per group: enough to hide memory latency, few enough for the L2 cache
_EMPTY = np.uint32(0xFFFFFFFF)


@compiled
def reset_slot(batch: Batch, slot: int) -> None:
    """Reset a slot's search state before its first extend."""
    search = batch.slots[slot]
    search.filled = search.cursor = search.unchanged = search.extends = search.parents = search.task_begin = (
        search.task_end
    ) = 0
    search.scored = search.allowed = search.allowed_count = search.scanning = search.min_allowed = 0
    search.walked_parents = search.allowed_parents = 0
    search.distinct, search.margin = False, 0.0
    batch.visited[slot, : 1 << search.visited_bits] = _EMPTY


@compiled
def admit_query(
    batch: Batch,
    slot: int,
    query: npt.NDArray[np.float32],
    collection: int,
    k: int,
    top_m: int,
    width: int,
    patience: int,
    bits: int,
) -> bool:
    """Prepare a query, float32 [d], in a slot. Returns whether it is valid."""
    if not write_query(query, batch.encodings[collection], batch.queries[slot]):
        return False
    search = batch.slots[slot]
    search.collection, search.k, search.top_m, search.width = collection, k, top_m, width
    search.patience, search.visited_bits, search.start = patience, bits, -1
    reset_slot(batch, slot)
    return True


@compiled
def extend_active(handle: BatchHandle, count: int) -> int:
    """Make one extend of the first `count` slots in `active`, and remove finished slots from it.

    Returns the number of finished slots; `finished` lists them in admission order, and their rows of `nodes` and
    `result_distances` hold the results.
    """
    batch = batch_at(handle)
    active, finished = batch.active, batch.finished
    parts = max(1, (count + INTERLEAVED // 2) // INTERLEAVED)
    done = 0
    for part in range(parts):
        begin, end = count * part // parts, count * (part + 1) // parts
        done += extend(handle, active[begin:end], finished[done:])
    for i in range(done):
        write_result(batch, finished[i], batch.nodes[finished[i]], batch.result_distances[finished[i]])
    kept = following = 0
    for i in range(count):
        if following < done and active[i] == finished[following]:  # both are in the same order
            following += 1
        else:
            active[kept] = active[i]
            kept += 1
    return done
