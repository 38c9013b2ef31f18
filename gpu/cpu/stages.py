"""The five stages of an extend on a CPU, over all active slots of a running batch.

    select_parents → expand_neighbors → mark_visited → compute_distances → merge_top_m

Each stage runs over every slot before the next begins, so that what one stage asks memory for (a graph row, a vector)
arrives while the other slots are served.

A slot's top_m is an array of uint64 keys in ascending order: the distance's bits in the upper half, mapped so that
their order as integers is the order of the floats, then the node's 31 bits, then one bit: "has been a parent".
Ties of distance are so broken by node number, and a node that comes a second time is found beside itself.

The visited table is a cache of sets of 8: when a set is full, it forgets its oldest entry. A forgotten node costs a
second distance and changes nothing else, for it is either still in top_m, where merging drops its double, or was too
far for top_m and still is, because the worst distance in top_m only falls.
"""

from typing import Any

import numpy as np

from gpu.compiled import compiled
from gpu.cpu.queries import (
    CODE_STEP,
    QUERY_SKETCH,
    SKETCH_BIAS,
    SKETCH_CONSTANT,
    SKETCH_MARGIN,
    SKETCH_STEP,
    write_query,
)
from gpu.cpu.simd import (
    WAYS,
    bits_float,
    dot_f16,
    dot_f32,
    dot_i8,
    dot_sketch,
    float_bits,
    l2_f16,
    l2_f32,
    load_f32,
    move,
    prefetch,
    visit,
)

# Columns of the table of collections, int64 [collections, COLLECTION_FIELDS]. Addresses and *_BYTES are bytes,
# QUERY_ROW and QUERY_FULL offsets into a prepared query, the rest elements. SKETCHES and FULL may be 0, for none.
(
    ROWS,
    ROW_BYTES,
    LANES,
    KIND,
    QUERY_ROW,
    SKETCHES,
    SKETCH_BYTES,
    FULL,
    FULL_BYTES,
    FULL_LANES,
    QUERY_FULL,
    GRAPH,
    DEGREE,
    SIZE,
    SEEDS,
    SEED_COUNT,
) = range(16)
COLLECTION_FIELDS = 16

# Columns of the table of slots, int64 [slots, SLOT_FIELDS]. QUERY is the address of the prepared query,
# START the node where the search begins, or -1 for the seeds.
(
    COLLECTION,
    K,
    TOP_M,
    WIDTH,
    PATIENCE,
    VISITED_BITS,
    QUERY,
    START,
    FILLED,
    CURSOR,
    UNCHANGED,
    EXTENDS,
    PARENTS,
    TASK_BEGIN,
    TASK_END,
) = range(15)
SLOT_FIELDS = 15

# Kinds: the row's element type times 2, plus 1 for a dot product.
F32_L2, F32_DOT, F16_L2, F16_DOT, I8_L2, I8_DOT = range(6)

EMPTY = np.uint32(0xFFFFFFFF)
SEEDS_KEPT = 16
RESCORED_AT_LEAST = 8
_HASH = np.uint32(2654435761)


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
    """Make a slot whose parameters are set ready for its first extend, which scores the seeds."""
    batch.slots[slot, FILLED:] = 0
    batch.visited[slot, : 1 << batch.slots[slot, VISITED_BITS]] = EMPTY


@compiled
def admit(batch, slot, query, form, record, line):  # type: ignore[no-untyped-def]
    """Take a query, float32 [d], into a slot; `line` holds its columns before QUERY. Returns whether it is finite."""
    if not write_query(query, form, record):
        return False
    batch.slots[slot, :QUERY] = line
    batch.slots[slot, START] = -1
    reset_slot(batch, slot)
    return True


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
        if slots[slot, EXTENDS] == 0 and slots[slot, START] >= 0:
            tasks[end] = slots[slot, START]
            end += 1
        elif slots[slot, EXTENDS] == 0:
            count = collections[collection, SEED_COUNT]
            move(np.uint64(tasks.ctypes.data + end * 4), np.uint64(collections[collection, SEEDS]), count * 4)
            end += count
        else:
            degree = collections[collection, DEGREE]
            for p in range(slots[slot, PARENTS]):
                row = collections[collection, GRAPH] + parents[slot, p] * degree * 4
                move(np.uint64(tasks.ctypes.data + end * 4), np.uint64(row), degree * 4)
                end += degree
        slots[slot, TASK_END] = end


@compiled
def mark_visited(batch, active):  # type: ignore[no-untyped-def]
    """Keep the tasks whose node is seen for the first time; what is kept moves up, so the task array has no gaps."""
    collections, slots, visited, tasks = batch.collections, batch.slots, batch.visited, batch.tasks
    end = 0
    for slot in active:
        collection = slots[slot, COLLECTION]
        size = collections[collection, SIZE]
        first, first_bytes = (
            collections[collection, SKETCHES],
            collections[collection, SKETCH_BYTES],
        )  # what compute_distances reads first
        if first == 0:
            first, first_bytes = collections[collection, ROWS], collections[collection, ROW_BYTES]
        table = visited.ctypes.data + slot * visited.strides[0]
        shift = np.uint32(32 - slots[slot, VISITED_BITS])
        begin = end
        for t in range(slots[slot, TASK_BEGIN], slots[slot, TASK_END]):
            node = tasks[t]
            place = np.int64(np.uint32(node * _HASH) >> shift) & ~np.int64(WAYS - 1)  # numba widens products to 64 bits
            seen = visit(np.uint64(table + place * 4), node)
            prefetch(np.uint64(first + np.int64(node) * first_bytes))
            tasks[end] = node
            end += 1 - (seen | (node >= size))  # a damaged graph must not lead outside of the rows
        slots[slot, TASK_BEGIN] = begin
        slots[slot, TASK_END] = end


@compiled
def row_distance(kind, row, query, lanes, step):  # type: ignore[no-untyped-def]
    """Distance from a query to the row at an address: squared L2, or minus the dot product.

    For int8 codes a constant of the query is left out: distances compare but are no distances. `step` is the query's.
    """
    if kind == F32_L2:
        return l2_f32(row, query, lanes)
    if kind == F32_DOT:
        return -dot_f32(row, query, lanes)
    if kind == F16_L2:
        return l2_f16(row, query, lanes)
    if kind == F16_DOT:
        return -dot_f16(row, query, lanes)
    dot = np.float32(dot_i8(row, query, lanes)) * step * load_f32(row + np.uint64(lanes - 8))
    return load_f32(row + np.uint64(lanes - 4)) - np.float32(2) * dot if kind == I8_L2 else -dot


@compiled
def screen(batch, slot):  # type: ignore[no-untyped-def]
    """Drop the tasks whose sketch says that they are too far for a full top_m, and fetch the rows of the others."""
    collections, slots, tasks, distances = batch.collections, batch.slots, batch.tasks, batch.distances
    collection = slots[slot, COLLECTION]
    query = np.uint64(slots[slot, QUERY])
    l2 = (collections[collection, KIND] & 1) == 0
    first = slots[slot, EXTENDS] == 0
    cutoff = np.float32(np.inf)
    if not first:
        worst = distance_of(batch.keys[slot, slots[slot, TOP_M] - 1])
        cutoff = worst - load_f32(query + np.uint64(SKETCH_CONSTANT)) + load_f32(query + np.uint64(SKETCH_MARGIN))
    step = load_f32(query + np.uint64(SKETCH_STEP))
    bias = load_f32(query + np.uint64(SKETCH_BIAS))
    lanes = query + np.uint64(QUERY_SKETCH)
    sketches, sketch_bytes = collections[collection, SKETCHES], collections[collection, SKETCH_BYTES]
    rows, row_bytes = collections[collection, ROWS], collections[collection, ROW_BYTES]
    begin = end = slots[slot, TASK_BEGIN]
    for t in range(begin, slots[slot, TASK_END]):
        node = tasks[t]
        sketch = np.uint64(sketches + np.int64(node) * sketch_bytes)
        tail = sketch + np.uint64(sketch_bytes - 8)
        estimate = -(np.float32(dot_sketch(sketch, lanes, sketch_bytes)) - bias) * step * load_f32(tail)
        if l2:
            estimate = load_f32(tail + np.uint64(4)) + np.float32(2) * estimate
        if first:
            place = end
            while place > begin and distances[place - 1] > estimate:
                if place < begin + SEEDS_KEPT:
                    distances[place] = distances[place - 1]
                    tasks[place] = tasks[place - 1]
                place -= 1
            if place < begin + SEEDS_KEPT:
                distances[place] = estimate
                tasks[place] = node
                end = min(end + 1, begin + SEEDS_KEPT)
        elif estimate < cutoff:
            tasks[end] = node
            end += 1
            prefetch(np.uint64(rows + np.int64(node) * row_bytes))
    slots[slot, TASK_END] = end


@compiled
def compute_distances(batch, active):  # type: ignore[no-untyped-def]
    """Score the tasks, those that sketches do not rule out, fetching the next row while this one is summed."""
    collections, slots, tasks, distances = batch.collections, batch.slots, batch.tasks, batch.distances
    for slot in active:
        full = slots[slot, EXTENDS] == 0 or slots[slot, FILLED] == slots[slot, TOP_M]
        if collections[slots[slot, COLLECTION], SKETCHES] != 0 and full:
            screen(batch, slot)
    for slot in active:
        collection = slots[slot, COLLECTION]
        rows, row_bytes = collections[collection, ROWS], collections[collection, ROW_BYTES]
        kind, lanes = collections[collection, KIND], collections[collection, LANES]
        step = load_f32(np.uint64(slots[slot, QUERY] + CODE_STEP))
        query = np.uint64(slots[slot, QUERY] + collections[collection, QUERY_ROW])
        for t in range(slots[slot, TASK_BEGIN], slots[slot, TASK_END]):
            if t + 1 < slots[slot, TASK_END]:
                following = rows + np.int64(tasks[t + 1]) * row_bytes
                for offset in range(64, row_bytes, 64):
                    prefetch(np.uint64(following + offset))
            row = np.uint64(rows + np.int64(tasks[t]) * row_bytes)
            distances[t] = row_distance(kind, row, query, lanes, step)


@compiled
def insert(keys, slot, filled, top_m, key):  # type: ignore[no-untyped-def]
    """Put a key into a sorted top_m. Returns its position, or -1 if it is too far or there already."""
    if filled == top_m and key >= keys[slot, top_m - 1]:
        return -1
    position, length = 0, filled
    while length > 0:
        half = (length + 1) >> 1
        position += half if keys[slot, position + half - 1] < key else 0
        length -= half
    if position < filled and keys[slot, position] >> np.uint64(1) == key >> np.uint64(1):
        return -1
    address = keys.ctypes.data + slot * keys.strides[0] + position * 8
    move(np.uint64(address + 8), np.uint64(address), (min(filled, top_m - 1) - position) * 8)
    keys[slot, position] = key
    return position


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
    """Put the nearest entries of a finished top_m in the order of their full-precision distances (int8 only).

    The first max(k, 8) entries tell by how much codes are off for this query, at least and at most; an entry behind
    them is rescored too if, off by less than any of these, it would be nearer than the k-th.
    """
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    if collections[slots[slot, COLLECTION], FULL] == 0:
        return
    count = min(slots[slot, FILLED], rescore_limit(slots[slot, K]))
    first = min(count, max(slots[slot, K], RESCORED_AT_LEAST))
    least, most = rescore_range(batch, slot, 0, first)
    if first == count:
        return
    worst = distance_of(keys[slot, slots[slot, K] - 1])
    following = first
    while following < count and distance_of(keys[slot, following]) + least - (most - least) < worst:
        following += 1
    rescore_range(batch, slot, first, following)


@compiled
def rescore_range(batch, slot, begin, end):  # type: ignore[no-untyped-def]
    """Sort entries begin..end into those before them, by full precision. Returns by how much it differs, (least, most)."""
    collections, slots, keys = batch.collections, batch.slots, batch.keys
    collection = slots[slot, COLLECTION]
    full, full_bytes = collections[collection, FULL], collections[collection, FULL_BYTES]
    kind = F32_DOT if collections[collection, KIND] == I8_DOT else F32_L2
    lanes = collections[collection, FULL_LANES]
    query = np.uint64(slots[slot, QUERY] + collections[collection, QUERY_FULL])
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
def rescore_limit(k):  # type: ignore[no-untyped-def]
    """How many of the nearest entries are rescored for k results, at most."""
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


@compiled
def advance(batch, active, count, nodes, raw):  # type: ignore[no-untyped-def]
    """`extend` of the first `count` slots in `active`; takes the finished out, leaving the others in their order.

    The results of the finished go to their slot's row of nodes and raw, both [slots, max_k].
    """
    done = extend(batch, active[:count])
    for i in range(done):
        slot = batch.finished[i]
        write_result(batch, slot, nodes[slot], raw[slot])
    kept = 0
    following = 0
    for i in range(count):
        if following < done and active[i] == batch.finished[following]:  # merge_top_m went through them in this order
            following += 1
        else:
            active[kept] = active[i]
            kept += 1
    return done
