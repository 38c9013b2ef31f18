"""A scan of the allowed rows by their codes as neighbours of the centre (`gpu.index.data`): a code is a sixteenth to a
thirty-second of a row's bytes, and 32 are read at a time.

    ESTIMATE   all allowed rows → the nearest estimates, in top_m → their rows are scored, nearest first, until the next
               estimate exceeds the k-th result by more than the error that the scored ones have shown: complete
    VERIFY     if top_m was too short for that: every row whose estimate is within that error is scored

The second pass is needed where a great many rows are about as far away as the nearest of them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.extend.filtered import ESTIMATE, SCAN_ROWS_PER_EXTEND, VERIFY
from gpu.cpu.extend.keys import distance_of, insert_by_chunks, key_of, node_of
from gpu.cpu.extend.rabitq import GROUP, centre_distance, fetch, score_node
from gpu.cpu.fast_scan import below, estimate, lowest_bit
from gpu.cpu.queries import TABLE_OFFSET, TABLE_STEP
from gpu.cpu.simd import load_f32, load_u32, load_u64
from gpu.cpu.tables import Batch, BatchHandle, batch_at

CODES_PER_EXTEND = 4096  # rows whose codes one slot reads in an extend
LISTED = 512  # rows with the nearest estimates that are kept
SIGMAS = 3.0  # standard deviations of an estimate's error that are allowed for
_SAMPLE = 32  # scored rows from which the error is known
_AHEAD = 4  # rows that are prefetched
_INFINITY = np.float32(np.inf)


@compiled
def extend_code_scan(handle: BatchHandle, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Make one extend of slots that scan codes. Writes finished slots to `finished` and returns their number."""
    slots = batch_at(handle).slots
    done = 0
    for slot in active:
        slots[slot].extends += 1
        complete = scan_codes(handle, slot)
        if complete and slots[slot].scanning == ESTIMATE:
            complete = score_list(handle, slot)
        if complete:
            finished[done] = slot
            done += 1
    return done


@compiled
def list_length(batch: Batch, k: int) -> Any:
    """Return how many estimates are kept."""
    return min(batch.keys.shape[1], max(LISTED, 2 * k))


@compiled
def worst_result(batch: Batch, slot: int) -> Any:
    """Return the distance of a slot's k-th result; infinity while there are fewer."""
    k = batch.slots[slot].k
    return distance_of(batch.exact[slot, k - 1]) if batch.slots[slot].scored == k else _INFINITY


@compiled
def scan_codes(handle: BatchHandle, slot: int) -> Any:
    """Read the next codes of a slot's pass. Returns whether the pass is complete."""
    batch = batch_at(handle)
    search, collection = batch.slots[slot], batch.collections[batch.slots[slot].collection]
    dims, planes, size = collection.rotated, collection.code_bits, collection.size
    query, group_bytes = search.query, 4 * dims * planes + 8 * GROUP
    table = np.uint64(query + collection.query_table)
    step, offset = load_f32(np.uint64(query + TABLE_STEP)), load_f32(np.uint64(query + TABLE_OFFSET))
    base, verifies = centre_distance(batch, slot), search.scanning == VERIFY
    margin = np.float32(search.margin)
    keys, length = np.uint64(batch.keys.ctypes.data + slot * batch.keys.strides[0]), list_length(batch, search.k)
    estimates, filled = np.uint64(batch.distances.ctypes.data), search.filled
    row, left = search.cursor, SCAN_ROWS_PER_EXTEND
    end = min(size, row + CODES_PER_EXTEND)
    while row < end and left > 0:
        passing = np.int64(load_u32(np.uint64(search.allowed + row // 8)))
        if passing != 0:
            codes = np.uint64(collection.scan + row // GROUP * group_bytes)
            estimate(codes, table, dims, planes, base, step, offset, estimates)
            if verifies:
                near = below(estimates, worst_result(batch, slot) + margin) & passing
                left -= score_lanes(handle, slot, row, near)
            else:
                limit = distance_of(load_u64(keys + np.uint64(8 * (length - 1)))) if filled == length else _INFINITY
                near = below(estimates, limit) & passing
                while near != 0:
                    lane = lowest_bit(near)
                    near &= near - 1
                    if insert_by_chunks(keys, filled, length, key_of(batch.distances[lane], row + lane)) >= 0:
                        filled = min(filled + 1, length)
        row += GROUP
    search.cursor, search.filled = row, filled
    return row >= size


@compiled
def score_lanes(handle: BatchHandle, slot: int, row: int, lanes: int) -> int:
    """Score the rows after `row` whose bits are set in `lanes`. Returns their number."""
    batch = batch_at(handle)
    collection = batch.collections[batch.slots[slot].collection]
    left, count = lanes, 0
    while left != 0:
        fetch(collection.rows, collection.row_bytes, row + lowest_bit(left))
        left &= left - 1
    while lanes != 0:
        score_node(handle, slot, row + lowest_bit(lanes))
        lanes &= lanes - 1
        count += 1
    return count


@compiled
def score_list(handle: BatchHandle, slot: int) -> bool:
    """Score listed rows, nearest first. Returns whether no other row can be a result; else begins the second pass."""
    batch = batch_at(handle)
    search, collection = batch.slots[slot], batch.collections[batch.slots[slot].collection]
    filled, squares, margin = search.filled, 0.0, np.inf
    for i in range(min(_AHEAD, filled)):
        fetch(collection.rows, collection.row_bytes, np.int64(node_of(batch.keys[slot, i])))
    for i in range(filled):
        estimated = np.float64(distance_of(batch.keys[slot, i]))
        if i >= _SAMPLE and estimated - margin > worst_result(batch, slot):
            return True
        if i + _AHEAD < filled:
            fetch(collection.rows, collection.row_bytes, np.int64(node_of(batch.keys[slot, i + _AHEAD])))
        error = score_node(handle, slot, np.int64(node_of(batch.keys[slot, i]))) - estimated
        squares += error * error
        margin = SIGMAS * np.sqrt(squares / (i + 1))
    if filled < list_length(batch, search.k):
        return True
    search.scanning, search.cursor, search.margin = VERIFY, 0, margin
    return False
