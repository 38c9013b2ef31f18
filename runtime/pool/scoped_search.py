"""Search of all parts of a query's scope, sequentially in the query's one slot. Compiled.

The policy sees a query with several parts as one query, which occupies one slot for the extends of all its parts, and
its estimate covers all of them. Results are merged as the parts end.
"""

from typing import Any

from gpu.engine import RELEASE
from ipc.memory import intrinsics
from ipc.memory.intrinsics import call, floats32, words
from runtime.pool import loop_layout as layout
from runtime.pool import tables
from runtime.pool.collections import scopes
from runtime.pool.collections.scopes import PART_WORDS, SCOPE_WORDS
from runtime.pool.compiled import compiled

FAILED, CONTINUES = -1, -2
_PAIR_BYTES = 12  # an id and a distance


@compiled
def bind_scope(loop: Any, entry: Any, number: int, now: int) -> None:
    """Bind a query to the current parts of a scope."""
    scope = words(loop[layout.SCOPES] + 8 * SCOPE_WORDS * number, SCOPE_WORDS)
    scope[scopes.USED_NS] = now
    entry[layout.PARTS], entry[layout.PART_COUNT], entry[layout.PART] = scope[scopes.PARTS], scope[scopes.PART_COUNT], 0
    entry[layout.KEPT] = entry[layout.SPENT] = 0
    entry[layout.COLLECTION] = words(entry[layout.PARTS], PART_WORDS)[scopes.INDEX]


@compiled
def admit(loop: Any, entry: Any, number: int) -> Any:
    """Admit a query to a slot, with its collection or its scope's current part. Return the slot, below 0 on failure."""
    admitted, vector = loop[layout.ADMIT_IN_PLACE], entry[layout.VECTOR]
    if vector == 0:
        admitted, vector = loop[layout.ADMIT], loop[layout.VECTORS] + number * loop[layout.VECTOR_BYTES]
    collection, k, top_m = entry[layout.COLLECTION], entry[layout.K], entry[layout.TOP_M]
    width, patience = entry[layout.WIDTH], entry[layout.PATIENCE]
    slot = call(admitted, (loop[layout.HANDLE], vector, collection, k, top_m, width, patience))
    if slot < 0:
        return slot
    if entry[layout.PARTS]:
        part = words(entry[layout.PARTS] + 8 * PART_WORDS * entry[layout.PART], PART_WORDS)
        if part[scopes.ALLOWED]:
            call(loop[layout.SET_FILTER], (loop[layout.HANDLE], slot, part[scopes.ALLOWED], part[scopes.PASSING]))
    if loop[layout.PRIORITIZE] and entry[tables.STAGE] == tables.PREFILL:
        call(loop[layout.PRIORITIZE], (loop[layout.HANDLE], slot))
    entry[layout.SLOT] = slot
    words(loop[layout.OWNERS] + 8 * slot, 1)[0] = number
    return slot


@compiled
def finish_part(loop: Any, entry: Any, number: int, extends: int) -> Any:
    """Complete a query's search in its slot, which took `extends`, and start the next part of its scope.

    Return CONTINUES if there is a next part, else the extends of all parts, or FAILED.
    """
    if entry[layout.PART_COUNT] == 0:
        return extends
    entry[layout.SPENT] += extends
    if entry[layout.PART] + 1 >= entry[layout.PART_COUNT]:
        return entry[layout.SPENT]
    most = loop[layout.PART_RESULT_BYTES] // _PAIR_BYTES
    kept = loop[layout.PART_RESULTS] + number * loop[layout.PART_RESULT_BYTES]
    part, merged = loop[layout.MERGE_BUFFER], loop[layout.MERGE_BUFFER] + loop[layout.PART_RESULT_BYTES]
    found = call(loop[layout.READ_RESULT], (loop[layout.HANDLE], entry[layout.SLOT], part, part + 8 * most))
    call(loop[layout.CHANGE_STATE], (loop[layout.HANDLE], entry[layout.SLOT], RELEASE))
    if found < 0:
        return FAILED
    entry[layout.KEPT] = merge(part, found, kept, entry[layout.KEPT], most, merged, entry[layout.K])
    intrinsics.copy(kept, merged, 8 * entry[layout.KEPT])
    intrinsics.copy(kept + 8 * most, merged + 8 * most, 4 * entry[layout.KEPT])
    entry[layout.PART] += 1
    entry[layout.COLLECTION] = words(entry[layout.PARTS] + 8 * PART_WORDS * entry[layout.PART], PART_WORDS)[
        scopes.INDEX
    ]
    return CONTINUES if admit(loop, entry, number) >= 0 else FAILED


@compiled
def read_result(loop: Any, entry: Any, number: int, into: int, most: int) -> Any:
    """Write a query's results: ids at `into`, distances 8·most bytes behind. Return the count, below 0 on failure."""
    target = loop[layout.MERGE_BUFFER] if entry[layout.KEPT] else into
    found = call(loop[layout.READ_RESULT], (loop[layout.HANDLE], entry[layout.SLOT], target, target + 8 * most))
    if found < 0 or entry[layout.KEPT] == 0:
        return found
    kept = loop[layout.PART_RESULTS] + number * loop[layout.PART_RESULT_BYTES]
    return merge(target, found, kept, entry[layout.KEPT], most, into, entry[layout.K])


@compiled
def merge(a: int, a_count: int, b: int, b_count: int, most: int, into: int, k: int) -> Any:
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
