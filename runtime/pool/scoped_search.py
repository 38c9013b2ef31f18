"""Search of all parts of a query's scope, sequentially in the query's one slot. Compiled.

The policy sees a query with several parts as one query, which occupies one slot for the extends of all its parts, and
its estimate covers all of them. Results are merged as the parts end.
"""

from gpu.engine import RELEASE
from ipc.native import intrinsics
from ipc.native.intrinsics import call, floats32, words
from runtime.pool.compiled import compiled
from runtime.pool.loop_layout import Loop, Search
from runtime.pool.tables import PREFILL

FAILED, CONTINUES = -1, -2
_PAIR_BYTES = 12  # an id and a distance


@compiled
def bind_scope(loop: Loop, search: Search, number: int, now: int) -> None:
    """Bind a query to the current parts of a scope."""
    scope = loop.scopes[number]
    scope.used_ns = now
    search.parts, search.part_count, search.part = scope.parts, scope.part_count, 0
    search.kept = search.spent = 0


@compiled
def is_whole_index(search: Search) -> bool:
    """Whether a query is one for all rows of one index."""
    return search.part_count == 1 and search.parts[0].allowed == 0


@compiled
def admit(loop: Loop, number: int) -> int:
    """Admit a query to a slot, with its scope's current part. Return the slot, below 0 on failure."""
    entry, search, engine = loop.tables.entries[number], loop.searches[number], loop.engine
    admitted, vector = engine.admit_in_place, search.vector
    if vector == 0:
        admitted, vector = engine.admit, loop.vectors + number * loop.vector_bytes
    k, top_m, width, patience = search.k, entry.top_m, entry.search_width, entry.patience
    part = search.parts[search.part]
    slot = call(admitted, (engine.handle, vector, part.index, k, top_m, width, patience))
    if slot < 0:
        return slot
    if part.allowed:
        call(engine.set_filter, (engine.handle, slot, part.allowed, part.passing))
    if engine.prioritize and entry.stage == PREFILL:
        call(engine.prioritize, (engine.handle, slot))
    search.slot = slot
    loop.owners[slot] = number
    return slot


@compiled
def finish_part(loop: Loop, number: int, extends: int) -> int:
    """Complete a query's search in its slot, which took `extends`, and start the next part of its scope.

    Return CONTINUES if there is a next part, else the extends of all parts, or FAILED.
    """
    search, engine = loop.searches[number], loop.engine
    search.spent += extends
    if search.part + 1 >= search.part_count:
        return search.spent
    most = loop.part_result_bytes // _PAIR_BYTES
    results = loop.part_results + number * loop.part_result_bytes
    part, merged = loop.merge_buffer, loop.merge_buffer + loop.part_result_bytes
    count = call(engine.read_result, (engine.handle, search.slot, part, part + 8 * most))
    call(engine.change_state, (engine.handle, search.slot, RELEASE))
    if count < 0:
        return FAILED
    search.kept = merge(part, count, results, search.kept, most, merged, search.k)
    intrinsics.copy(results, merged, 8 * search.kept)
    intrinsics.copy(results + 8 * most, merged + 8 * most, 4 * search.kept)
    search.part += 1
    return CONTINUES if admit(loop, number) >= 0 else FAILED


@compiled
def read_result(loop: Loop, number: int, into: int, most: int) -> int:
    """Write a query's results: ids at `into`, distances 8·most bytes behind. Return the count, below 0 on failure."""
    search = loop.searches[number]
    target = loop.merge_buffer if search.kept else into
    count = call(loop.engine.read_result, (loop.engine.handle, search.slot, target, target + 8 * most))
    if count < 0 or search.kept == 0:
        return count
    results = loop.part_results + number * loop.part_result_bytes
    return merge(target, count, results, search.kept, most, into, search.k)


@compiled
def merge(a: int, a_count: int, b: int, b_count: int, most: int, into: int, k: int) -> int:
    """Merge the result lists at `a` and `b` into the k nearest at `into`. Return their count.

    A list is sorted by distance, then id: ids at an address, distances 8·most bytes behind.
    """
    a_ids, b_ids, ids = words(a, a_count), words(b, b_count), words(into, k)
    a_distances, b_distances = floats32(a + 8 * most, a_count), floats32(b + 8 * most, b_count)
    distances = floats32(into + 8 * most, k)
    i = j = 0
    while i + j < k and (i < a_count or j < b_count):
        from_a = j >= b_count
        if i < a_count and j < b_count:
            nearer = a_distances[i] < b_distances[j]
            from_a = nearer or (a_distances[i] == b_distances[j] and a_ids[i] < b_ids[j])
        if from_a:
            ids[i + j], distances[i + j] = a_ids[i], a_distances[i]
            i += 1
        else:
            ids[i + j], distances[i + j] = b_ids[j], b_distances[j]
            j += 1
    return i + j
