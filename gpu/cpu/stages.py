"""The five stages of an extend on a CPU, over all active slots of a running batch.

    select_parents → expand_neighbors → mark_visited → compute_distances → merge_top_m

Each stage runs over every slot before the next begins, so that what one stage asks memory for (a graph row, a vector)
arrives while the other slots are served.

A slot's top_m is an array of uint64 keys in ascending order: the distance's bits in the upper half, mapped so that
their order as integers is the order of the floats, then the node's 31 bits, then one bit: "has been a parent".
Ties of distance are so broken by node number, and a node that comes a second time is found beside itself.

The visited table is a cache: when its window of 8 entries is full, it forgets one. A forgotten node costs a second
distance and changes nothing else, for it is either still in top_m, where merging drops its double, or was too far for
top_m and still is, because the worst distance in top_m only falls.
"""

from typing import Any

import numpy as np
from numba import njit

from gpu.cpu.simd import (
    bits_float,
    dot_f16,
    dot_f32,
    dot_i8,
    float_bits,
    l2_f16,
    l2_f32,
    load_f32,
    load_u32,
    prefetch,
)

# Columns of the table of collections, int64 [collections, COLLECTION_FIELDS]. Addresses are bytes, counts are elements.
ROWS, ROW_BYTES, LANES, KIND, GRAPH, DEGREE, SIZE, SEEDS, SEED_COUNT, FULL, FULL_BYTES, FULL_LANES = range(12)
COLLECTION_FIELDS = 12

# Columns of the table of slots, int64 [slots, SLOT_FIELDS].
(
    COLLECTION,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    FILLED,
    CURSOR,
    UNCHANGED,
    EXTENDS,
    PARENTS,
    TASK_BEGIN,
    TASK_END,
    VISITED_BITS,
) = range(13)
SLOT_FIELDS = 13

# Kinds: the row's element type times 2, plus 1 for a dot product.
F32_L2, F32_DOT, F16_L2, F16_DOT, I8_L2, I8_DOT = range(6)

EMPTY = np.uint32(0xFFFFFFFF)
WINDOW = 8
_HASH = np.uint32(2654435761)


def compiled(function: Any) -> Any:
    return njit(nogil=True, cache=True, error_model="numpy")(function)


@compiled
def key_of(distance: float, node: int) -> Any:
    """The key of an unexpanded node."""
    bits = np.uint32(float_bits(np.float32(distance)))
    bits = ~bits if bits & np.uint32(0x80000000) else bits | np.uint32(0x80000000)
    return (np.uint64(bits) << np.uint64(32)) | (np.uint64(node) << np.uint64(1))


@compiled
def distance_of(key: int) -> Any:
    """The distance that a key holds."""
    bits = np.uint32(np.uint64(key) >> np.uint64(32))
    bits = bits & np.uint32(0x7FFFFFFF) if bits & np.uint32(0x80000000) else ~bits
    return bits_float(np.uint32(bits))


@compiled
def node_of(key: int) -> Any:
    """The node that a key holds."""
    return (np.uint64(key) >> np.uint64(1)) & np.uint64(0x7FFFFFFF)


@compiled
def reset_slot(batch, slot):  # type: ignore[no-untyped-def]
    """Make a slot ready for its first extend, which scores the seeds."""
    slots, visited = batch.slots, batch.visited
    slots[slot, FILLED] = 0
    slots[slot, CURSOR] = 0
    slots[slot, UNCHANGED] = 0
    slots[slot, EXTENDS] = 0
    for i in range((1 << slots[slot, VISITED_BITS]) + WINDOW):
        visited[slot, i] = EMPTY


@compiled
def select_parents(batch, active):  # type: ignore[no-untyped-def]
    """Take the `search_width` nearest entries of each top_m that have not been parents, and mark them."""
    collections, slots, keys, parents = batch.collections, batch.slots, batch.keys, batch.parents
    for slot in active:
        graph, row_bytes = collections[slots[slot, COLLECTION], GRAPH], collections[slots[slot, COLLECTION], DEGREE] * 4
        position, count = slots[slot, CURSOR], 0
        while position < slots[slot, FILLED] and count < slots[slot, WIDTH]:
            if not keys[slot, position] & np.uint64(1):
                node = np.int64(node_of(keys[slot, position]))
                keys[slot, position] |= np.uint64(1)
                parents[slot, count] = node
                count += 1
                for offset in range(0, row_bytes, 64):
                    prefetch(np.uint64(graph + node * row_bytes + offset))
            position += 1
        slots[slot, CURSOR] = position
        slots[slot, PARENTS] = count


@compiled
def expand_neighbors(batch, active):  # type: ignore[no-untyped-def]
    """Write each slot's neighbours of its parents (in the first extend: the seeds) to the task array, with doubles."""
    collections, slots, parents, tasks = batch.collections, batch.slots, batch.parents, batch.tasks
    end = 0
    for slot in active:
        collection = slots[slot, COLLECTION]
        slots[slot, TASK_BEGIN] = end
        if slots[slot, EXTENDS] == 0:
            for i in range(collections[collection, SEED_COUNT]):
                tasks[end] = load_u32(np.uint64(collections[collection, SEEDS] + i * 4))
                end += 1
        else:
            degree = collections[collection, DEGREE]
            for p in range(slots[slot, PARENTS]):
                row = collections[collection, GRAPH] + parents[slot, p] * degree * 4
                for i in range(degree):
                    tasks[end] = load_u32(np.uint64(row + i * 4))
                    end += 1
        slots[slot, TASK_END] = end


@compiled
def mark_visited(batch, active):  # type: ignore[no-untyped-def]
    """Keep the tasks whose node is seen for the first time; what is kept moves up, so the task array has no gaps."""
    collections, slots, visited, tasks = batch.collections, batch.slots, batch.visited, batch.tasks
    end = 0
    for slot in active:
        collection = slots[slot, COLLECTION]
        rows, row_bytes = collections[collection, ROWS], collections[collection, ROW_BYTES]
        size = collections[collection, SIZE]
        shift = np.uint32(32 - slots[slot, VISITED_BITS])
        begin = end
        for t in range(slots[slot, TASK_BEGIN], slots[slot, TASK_END]):
            node = tasks[t]
            if node >= size:  # a damaged graph must not lead outside of the rows
                continue
            home = np.int64(np.uint32(node * _HASH) >> shift)  # numba widens products to 64 bits
            place = home
            while place < home + WINDOW and visited[slot, place] != EMPTY and visited[slot, place] != node:
                place += 1
            if place == home + WINDOW:
                place = home
            elif visited[slot, place] == node:
                continue
            visited[slot, place] = node
            tasks[end] = node
            end += 1
            prefetch(np.uint64(rows + np.int64(node) * row_bytes))
        slots[slot, TASK_BEGIN] = begin
        slots[slot, TASK_END] = end


@compiled
def row_distance(kind, row, query, lanes, query_scale):  # type: ignore[no-untyped-def]
    """Distance from a query to the row at an address: squared L2, or minus the dot product.

    For int8 codes a constant of the query is left out, so distances compare but are not distances.
    """
    if kind == F32_L2:
        return l2_f32(row, query, lanes)
    if kind == F32_DOT:
        return -dot_f32(row, query, lanes)
    if kind == F16_L2:
        return l2_f16(row, query, lanes)
    if kind == F16_DOT:
        return -dot_f16(row, query, lanes)
    dot = np.float32(dot_i8(row, query, lanes)) * query_scale * load_f32(row + np.uint64(lanes))
    if kind == I8_DOT:
        return -dot
    return load_f32(row + np.uint64(lanes + 4)) - np.float32(2.0) * dot


@compiled
def compute_distances(batch, active):  # type: ignore[no-untyped-def]
    """Score every task, fetching the next row while this one is summed."""
    collections, slots, tasks, distances = batch.collections, batch.slots, batch.tasks, batch.distances
    for slot in active:
        collection = slots[slot, COLLECTION]
        rows, row_bytes = collections[collection, ROWS], collections[collection, ROW_BYTES]
        kind, lanes = collections[collection, KIND], collections[collection, LANES]
        query, scale = np.uint64(batch.queries[slot]), batch.scales[slot]
        for t in range(slots[slot, TASK_BEGIN], slots[slot, TASK_END]):
            if t + 1 < slots[slot, TASK_END]:
                following = rows + np.int64(tasks[t + 1]) * row_bytes
                for offset in range(64, row_bytes, 64):
                    prefetch(np.uint64(following + offset))
            row = np.uint64(rows + np.int64(tasks[t]) * row_bytes)
            distances[t] = row_distance(kind, row, query, lanes, scale)


@compiled
def insert(keys, slot, filled, top_m, key):  # type: ignore[no-untyped-def]
    """Put a key into a sorted top_m. Returns its position, or -1 if it is too far or there already."""
    if filled == top_m and key >= keys[slot, top_m - 1]:
        return -1
    low, high = 0, filled
    while low < high:
        middle = (low + high) >> 1
        if keys[slot, middle] < key:
            low = middle + 1
        else:
            high = middle
    if low < filled and keys[slot, low] >> np.uint64(1) == key >> np.uint64(1):
        return -1
    for i in range(min(filled, top_m - 1), low, -1):
        keys[slot, i] = keys[slot, i - 1]
    keys[slot, low] = key
    return low


@compiled
def merge_top_m(batch, active):  # type: ignore[no-untyped-def]
    """Merge the scored tasks into each top_m and decide who is done. Returns the number of slots in `finished`."""
    slots, keys, tasks, distances, finished = batch.slots, batch.keys, batch.tasks, batch.distances, batch.finished
    done = 0
    for slot in active:
        top_m, filled, cursor = slots[slot, TOP_M], slots[slot, FILLED], slots[slot, CURSOR]
        changed = False
        for t in range(slots[slot, TASK_BEGIN], slots[slot, TASK_END]):
            position = insert(keys, slot, filled, top_m, key_of(distances[t], tasks[t]))
            if position >= 0:
                changed = True
                filled = min(filled + 1, top_m)
                cursor = min(cursor, position)
        while cursor < filled and keys[slot, cursor] & np.uint64(1):
            cursor += 1
        slots[slot, FILLED] = filled
        slots[slot, CURSOR] = cursor
        slots[slot, EXTENDS] += 1
        slots[slot, UNCHANGED] = 0 if changed else slots[slot, UNCHANGED] + 1
        patience = slots[slot, PATIENCE]
        if cursor == filled or (patience > 0 and slots[slot, UNCHANGED] >= patience):
            finished[done] = slot
            done += 1
    return done


@compiled
def rescore(batch, slot):  # type: ignore[no-untyped-def]
    """Put the nearest entries of a finished top_m in the order of their full-precision distances (int8 only)."""
    collections, slots, queries, keys = batch.collections, batch.slots, batch.queries, batch.keys
    collection = slots[slot, COLLECTION]
    full, full_bytes = collections[collection, FULL], collections[collection, FULL_BYTES]
    if full == 0:
        return
    kind = F32_DOT if collections[collection, KIND] == I8_DOT else F32_L2
    lanes = collections[collection, FULL_LANES]
    query = np.uint64(queries[slot] + collections[collection, LANES])
    count = min(slots[slot, FILLED], rescore_count(slots[slot, K]))
    for i in range(count):
        node = np.int64(node_of(keys[slot, i]))
        for offset in range(0, full_bytes, 64):
            prefetch(np.uint64(full + node * full_bytes + offset))
    for i in range(count):
        node = np.int64(node_of(keys[slot, i]))
        key = key_of(row_distance(kind, np.uint64(full + node * full_bytes), query, lanes, np.float32(1)), node)
        j = i
        while j > 0 and keys[slot, j - 1] > key:
            keys[slot, j] = keys[slot, j - 1]
            j -= 1
        keys[slot, j] = key


@compiled
def rescore_count(k):  # type: ignore[no-untyped-def]
    """How many of the nearest entries are rescored for k results."""
    return 2 * k + 16


@compiled
def extend(batch, active):  # type: ignore[no-untyped-def]
    """One extend of every slot in `active` (int32). Returns how many are done; `batch.finished` begins with them."""
    select_parents(batch, active)
    expand_neighbors(batch, active)
    mark_visited(batch, active)
    compute_distances(batch, active)
    done = merge_top_m(batch, active)
    for i in range(done):
        rescore(batch, batch.finished[i])
    return done


@compiled
def write_result(batch, slot, nodes, raw):  # type: ignore[no-untyped-def]
    """Write a finished slot's k nearest nodes and raw distances; -1 and +inf where there are fewer."""
    filled = batch.slots[slot, FILLED]
    for i in range(batch.slots[slot, K]):
        nodes[i] = np.int64(node_of(batch.keys[slot, i])) if i < filled else -1
        raw[i] = distance_of(batch.keys[slot, i]) if i < filled else np.inf
