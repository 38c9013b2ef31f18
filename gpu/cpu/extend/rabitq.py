"""An extend over RaBitQ neighbour codes: parents are scored exactly, their neighbours' distances are estimated.

    select_parents → for each slot: compute_distances (the parents') → estimate_neighbors → merge_top_m

top_m holds estimated distances. A node can be in it several times, once per parent that led to it: the nearest entry is
expanded, the others are skipped. `visited` contains the expanded nodes, `exact` the nearest of them with their exact
distances, which are the results. `gpu.index.data` describes the algorithm and its sources.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import Integer, compiled
from gpu.cpu.extend.filtered import count_parent, fall_back_to_scan, has_min_allowed
from gpu.cpu.extend.keys import distance_of, insert, insert_by_chunks, key_of, may_be_result, node_of, row_distance
from gpu.cpu.fast_scan import below, estimate, lowest_bit, was_visited
from gpu.cpu.queries import QUERY_ROW, TABLE_OFFSET, TABLE_STEP, padded_lanes
from gpu.cpu.simd import WAYS, dot_f32, l2_f32, load_f32, load_u32, load_u64, prefetch, visit
from gpu.cpu.tables import Batch, BatchHandle, batch_at
from ipc.native.records import address

GROUP = 32
_EMPTY = np.uint32(0xFFFFFFFF)
_HASH = np.uint32(2654435761)
_INFINITY = np.float32(np.inf)


@compiled
def set_of(visited: int, bits: int, node: Integer) -> np.uint64:
    """Return the address of a node's set in the visited table of 2^bits entries at address `visited`."""
    first = np.int64(np.uint32(np.uint32(node) * _HASH) >> np.uint32(32 - bits)) & ~np.int64(WAYS - 1)
    return np.uint64(visited + first * 4)


@compiled
def select_parents(handle: BatchHandle, active: npt.NDArray[np.int32]) -> None:
    """Select the `search_width` nearest unexpanded nodes of each top_m as parents, and prefetch their data.

    With neighbour codes top_m may hold a node several times; an expanded one is not selected again.
    """
    batch = batch_at(handle)
    slots, keys, parents = batch.slots, batch.keys, batch.parents
    for slot in active:
        search, collection = slots[slot], batch.collections[slots[slot].collection]
        coded = collection.blocks != 0
        once = coded and not search.distinct
        visited = batch.visited.ctypes.data + slot * batch.visited.strides[0]
        position, count = search.cursor, 0
        while position < search.filled and count < search.width:
            if not keys[slot, position] & np.uint64(1):
                node = np.int64(node_of(keys[slot, position]))
                keys[slot, position] |= np.uint64(1)
                if not once or not visit(set_of(visited, search.visited_bits, node), np.uint32(node)):
                    parents[slot, count] = node
                    count += 1
                    count_parent(batch, slot, node)
                    if coded:
                        fetch(collection.rows, collection.row_bytes, node)
                        fetch(collection.blocks, collection.block_bytes, node)
                    fetch(collection.graph, collection.degree * 4, node)
            position += 1
        search.cursor, search.parents = position, count


@compiled
def fetch(start: int, size: int, row: Integer) -> None:
    """Prefetch a row of a table."""
    first = start + row * size
    for offset in range(0, size, 64):
        prefetch(np.uint64(first + offset))


@compiled
def extend_rabitq(handle: BatchHandle, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Make one extend of every slot in `active`. Writes finished slots to `finished` and returns their number."""
    batch = batch_at(handle)
    slots = batch.slots
    select_parents(handle, active)
    done = 0
    for slot in active:
        if slots[slot].filled == 0:
            changed = start_search(handle, slot)
        else:
            changed = False
            for p in range(slots[slot].parents):
                if expand_parent(handle, slot, batch.parents[slot, p]):
                    changed = True
        slots[slot].extends += 1
        slots[slot].unchanged = 0 if changed else slots[slot].unchanged + 1
        patience = slots[slot].patience
        stalled = patience > 0 and slots[slot].unchanged >= patience
        if next_parent(handle, slot) and not stalled and not has_min_allowed(batch, slot):
            continue
        if try_finish(handle, slot):
            finished[done] = slot
            done += 1
    return done


@compiled
def next_parent(handle: BatchHandle, slot: int) -> Any:
    """Move the cursor to the nearest unexpanded entry of top_m. Returns whether there is one."""
    batch = batch_at(handle)
    slots, keys = batch.slots, batch.keys
    visited = batch.visited.ctypes.data + slot * batch.visited.strides[0]
    cursor = slots[slot].cursor
    while cursor < slots[slot].filled:
        key = keys[slot, cursor]
        if not key & np.uint64(1):
            node = np.uint32(node_of(key))
            if not was_visited(set_of(visited, slots[slot].visited_bits, node), node) or slots[slot].distinct:
                break
            keys[slot, cursor] = key | np.uint64(1)
        cursor += 1
    slots[slot].cursor = cursor
    return cursor < slots[slot].filled


@compiled
def start_search(handle: BatchHandle, slot: int) -> Any:
    """Make the first extend: from the start node, or from the seeds, encoded as neighbours of the centre."""
    batch = batch_at(handle)
    collections, slots = batch.collections, batch.slots
    collection = collections[slots[slot].collection]
    if slots[slot].start >= 0:
        batch.keys[slot, 0] = key_of(np.float32(0), slots[slot].start)
        slots[slot].filled = 1
        return True
    base = centre_distance(batch, slot)
    seeds, count = collection.seeds, collection.seed_count
    return merge_neighbors(handle, slot, base, collection.entry, seeds, count)


@compiled
def centre_distance(batch: Batch, slot: int) -> Any:
    """Return the distance between a slot's query and the centre of its collection."""
    collection = batch.slots[slot].collection
    full = np.uint64(batch.slots[slot].query + QUERY_ROW)
    encoding = batch.encodings[collection]
    lanes = padded_lanes(encoding.dim)
    centre = np.uint64(address(encoding.centre))
    l2 = (batch.collections[collection].kind & 1) == 0
    return l2_f32(centre, full, lanes) if l2 else -dot_f32(centre, full, lanes)


@compiled
def expand_parent(handle: BatchHandle, slot: int, node: Integer) -> Any:
    """Score a parent and merge its neighbours' estimates. Returns whether top_m changed."""
    batch = batch_at(handle)
    collections, slots = batch.collections, batch.slots
    collection = collections[slots[slot].collection]
    base = score_node(handle, slot, node)
    block = collection.blocks + node * collection.block_bytes
    degree = collection.degree
    return merge_neighbors(handle, slot, base, block, collection.graph + node * degree * 4, degree)


@compiled
def score_node(handle: BatchHandle, slot: int, node: Integer) -> Any:
    """Return a node's exact distance, and insert the node into `exact` if it is allowed and among the k nearest."""
    batch = batch_at(handle)
    collections, slots = batch.collections, batch.slots
    collection = collections[slots[slot].collection]
    row = np.uint64(collection.rows + node * collection.row_bytes)
    query = np.uint64(slots[slot].query + QUERY_ROW)
    kind, lanes = collection.kind, collection.lanes
    distance = row_distance(kind, row, query, lanes)
    scored, k = slots[slot].scored, slots[slot].k
    if not may_be_result(slots[slot].allowed, node):
        return distance
    if insert(batch.exact, slot, scored, k, key_of(distance, node)) >= 0:
        slots[slot].scored = min(scored + 1, k)
    return distance


@compiled
def merge_neighbors(handle: BatchHandle, slot: int, base: float, block: int, neighbors: int, count: int) -> bool:
    """Estimate the distances of `count` neighbours, uint32 at an address, and merge them into top_m."""
    batch = batch_at(handle)
    collections, slots, distances = batch.collections, batch.slots, batch.distances
    collection, query = collections[slots[slot].collection], slots[slot].query
    dims, size = collection.rotated, collection.size
    distinct = slots[slot].distinct
    filled, top_m, cursor = slots[slot].filled, slots[slot].top_m, slots[slot].cursor
    table, planes = np.uint64(query + collection.query_table), collection.code_bits
    step, offset = load_f32(np.uint64(query + TABLE_STEP)), load_f32(np.uint64(query + TABLE_OFFSET))
    keys = np.uint64(batch.keys.ctypes.data + slot * batch.keys.strides[0])
    visited = batch.visited.ctypes.data + slot * batch.visited.strides[0]
    bits = slots[slot].visited_bits
    estimates = np.uint64(distances.ctypes.data)
    changed = False
    for begin in range(0, count, GROUP):
        estimate(np.uint64(block), table, dims, planes, base, step, offset, estimates)
        limit = distance_of(load_u64(keys + np.uint64(8 * (top_m - 1)))) if filled == top_m else _INFINITY
        near = below(estimates, limit)
        while near != 0:
            lane = lowest_bit(near)
            near &= near - 1
            node = load_u32(np.uint64(neighbors + 4 * (begin + lane)))
            entry = set_of(visited, bits, node)
            if node >= size or was_visited(entry, node):  # a corrupt graph may point outside the rows
                continue
            position = insert_by_chunks(keys, filled, top_m, key_of(distances[lane], node))
            if position >= 0:
                if distinct:
                    visit(entry, node)
                changed = True
                filled = min(filled + 1, top_m)
                cursor = min(cursor, position)
        block += 4 * dims * planes + 8 * GROUP
    slots[slot].filled, slots[slot].cursor = filled, cursor
    return changed


@compiled
def try_finish(handle: BatchHandle, slot: int) -> bool:
    """Finish a slot that has no parent left, or has exhausted its patience. Returns whether its search is complete.

    If fewer than k nodes were expanded, further entries of top_m are scored for the results. If top_m has too few
    distinct nodes, because duplicates fill it, the search restarts with `DISTINCT` set; a filtered search with a known
    number of allowed rows falls back to a scan of them instead.
    """
    batch = batch_at(handle)
    slots, keys = batch.slots, batch.keys
    required = min(slots[slot].k, batch.collections[slots[slot].collection].size)
    position = 0
    while slots[slot].scored < required and position < slots[slot].filled:
        node = np.int64(node_of(keys[slot, position]))
        if not keys[slot, position] & np.uint64(1) and may_be_result(slots[slot].allowed, node):
            score_node(handle, slot, node)
        position += 1
    if slots[slot].allowed_count != 0:
        return not fall_back_to_scan(batch, slot, slots[slot].scored)
    if slots[slot].scored == required or slots[slot].distinct:
        return True
    slots[slot].distinct = True
    slots[slot].filled = slots[slot].cursor = slots[slot].unchanged = slots[slot].parents = 0
    bits = 0
    while 2 << bits <= batch.visited.shape[1]:
        bits += 1
    slots[slot].visited_bits = bits
    batch.visited[slot, : 1 << bits] = _EMPTY
    return False
