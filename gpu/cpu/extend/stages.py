"""The five stages of an extend on a CPU, over all active slots of a running batch.

    select_parents → expand_neighbors → mark_visited → compute_distances → merge_top_m

Each stage runs over all slots before the next one starts, so that its prefetches (graph rows, vectors) complete
while the other slots are processed.

The visited table is an 8-way set-associative cache: a full set evicts its oldest entry. An evicted node may be scored a
second time, which does not change the results: either it is still in top_m, where merging drops the duplicate, or it
was too far for top_m and still is, because the worst distance in top_m only decreases.
"""

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.extend.code_scan import extend_code_scan
from gpu.cpu.extend.filtered import COMPARE, WALK, extend_scan, fall_back_to_scan, has_min_allowed
from gpu.cpu.extend.keys import insert, key_of, row_distance
from gpu.cpu.extend.rabitq import extend_rabitq, select_parents, set_of
from gpu.cpu.extend.results import keep_allowed
from gpu.cpu.queries import QUERY_ROW
from gpu.cpu.simd import move, prefetch, visit
from gpu.cpu.tables import Batch, BatchHandle, Collection, Slot, batch_at
from ipc.native.records import Array

_EXACT, _RABITQ, _COMPARE, _CODES = range(4)


@compiled
def expand_neighbors(batch: Batch, active: npt.NDArray[np.int32]) -> None:
    """Write the neighbours of each slot's parents (in the first extend: the seeds), with duplicates, to the tasks."""
    collections, slots, parents, tasks = batch.collections, batch.slots, batch.parents, batch.tasks
    end = 0
    for slot in active:
        collection = collections[slots[slot].collection]
        slots[slot].task_begin = end
        if slots[slot].extends == 0 and slots[slot].start >= 0:
            tasks[end] = slots[slot].start
            end += 1
        elif slots[slot].extends == 0:
            count = collection.seed_count
            move(np.uint64(tasks.ctypes.data + end * 4), np.uint64(collection.seeds), count * 4)
            end += count
        else:
            degree = collection.degree
            for p in range(slots[slot].parents):
                row = collection.graph + parents[slot, p] * degree * 4
                move(np.uint64(tasks.ctypes.data + end * 4), np.uint64(row), degree * 4)
                end += degree
        slots[slot].task_end = end


@compiled
def mark_visited(batch: Batch, active: npt.NDArray[np.int32]) -> None:
    """Drop tasks of visited nodes, mark the others as visited, and compact the task array."""
    collections, slots, visited, tasks = batch.collections, batch.slots, batch.visited, batch.tasks
    end = 0
    for slot in active:
        collection = collections[slots[slot].collection]
        size = collection.size
        rows, row_bytes = collection.rows, collection.row_bytes
        table = visited.ctypes.data + slot * visited.strides[0]
        bits = slots[slot].visited_bits
        begin = end
        for t in range(slots[slot].task_begin, slots[slot].task_end):
            node = tasks[t]
            seen = visit(set_of(table, bits, node), node)
            prefetch(np.uint64(rows + np.int64(node) * row_bytes))
            tasks[end] = node
            end += 1 - (seen | (node >= size))  # a corrupt graph may point outside the rows
        slots[slot].task_begin = begin
        slots[slot].task_end = end


@compiled
def compute_distances(batch: Batch, active: npt.NDArray[np.int32]) -> None:
    """Score the tasks, prefetching the next row."""
    collections, slots, tasks, distances = batch.collections, batch.slots, batch.tasks, batch.distances
    for slot in active:
        collection = collections[slots[slot].collection]
        rows, row_bytes = collection.rows, collection.row_bytes
        kind, lanes = collection.kind, collection.lanes
        query = np.uint64(slots[slot].query + QUERY_ROW)
        for t in range(slots[slot].task_begin, slots[slot].task_end):
            if t + 1 < slots[slot].task_end:
                following = rows + np.int64(tasks[t + 1]) * row_bytes
                for offset in range(64, row_bytes, 64):
                    prefetch(np.uint64(following + offset))
            row = np.uint64(rows + np.int64(tasks[t]) * row_bytes)
            distances[t] = row_distance(kind, row, query, lanes)


@compiled
def merge_top_m(batch: Batch, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Merge the scored tasks into each top_m. Writes finished slots to `finished` and returns their number."""
    slots, keys, tasks, distances = batch.slots, batch.keys, batch.tasks, batch.distances
    done = 0
    for slot in active:
        top_m, filled, cursor = slots[slot].top_m, slots[slot].filled, slots[slot].cursor
        changed = False
        for t in range(slots[slot].task_begin, slots[slot].task_end):
            position = insert(keys, slot, filled, top_m, key_of(distances[t], tasks[t]))
            if position >= 0:
                changed = True
                filled = min(filled + 1, top_m)
                cursor = min(cursor, position)
        while cursor < filled and keys[slot, cursor] & np.uint64(1):
            cursor += 1
        slots[slot].filled = filled
        slots[slot].cursor = cursor
        slots[slot].extends += 1
        slots[slot].unchanged = 0 if changed else slots[slot].unchanged + 1
        patience = slots[slot].patience
        if cursor == filled or (patience > 0 and slots[slot].unchanged >= patience) or has_min_allowed(batch, slot):
            finished[done] = slot
            done += 1
    return done


@compiled
def extend(handle: BatchHandle, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Make one extend of every slot in `active` (int32) of the batch that `handle` describes.

    Writes finished slots to `finished` and returns their number.
    """
    batch = batch_at(handle)
    collections, slots = batch.collections, batch.slots
    done = begin = 0
    while begin < len(active):  # runs of consecutive slots with the same search method
        method = method_of(collections, slots, active[begin])
        end = begin + 1
        while end < len(active) and method_of(collections, slots, active[end]) == method:
            end += 1
        if method == _RABITQ:
            done += extend_rabitq(handle, active[begin:end], finished[done:])
        elif method == _COMPARE:
            done += extend_scan(batch, active[begin:end], finished[done:])
        elif method == _CODES:
            done += extend_code_scan(handle, active[begin:end], finished[done:])
        else:
            done += extend_exact(handle, active[begin:end], finished[done:])
        begin = end
    return done


@compiled
def method_of(collections: Array[Collection], slots: Array[Slot], slot: int) -> int:
    """Return a slot's search method."""
    if slots[slot].scanning != WALK:
        return _COMPARE if slots[slot].scanning == COMPARE else _CODES
    return _RABITQ if collections[slots[slot].collection].blocks != 0 else _EXACT


@compiled
def extend_exact(handle: BatchHandle, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Make one extend of slots whose candidates are all scored exactly."""
    batch = batch_at(handle)
    select_parents(handle, active)
    expand_neighbors(batch, active)
    mark_visited(batch, active)
    compute_distances(batch, active)
    done = merge_top_m(batch, active, finished)
    kept = 0
    for i in range(done):
        slot = finished[i]
        keep_allowed(batch, slot)
        if not fall_back_to_scan(batch, slot, batch.slots[slot].filled):
            finished[kept] = slot
            kept += 1
    return kept
