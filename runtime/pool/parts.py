"""A query's way through the parts of its scope, one after the other in its one slot. Compiled.

So the policy sees a query with several parts as what it is, one slot for as long as all of them take, and learns how
many extends that is. Their results are merged as the parts end.
"""

from typing import Any

from gpu.engine import RELEASE
from ipc.memory import instructions
from ipc.memory.instructions import call, floats, floats32, words
from runtime.pool import tables as at
from runtime.pool.collections import scopes
from runtime.pool.collections.scopes import PART_WORDS, SCOPE_WORDS
from runtime.pool.compiled import compiled
from runtime.pool.loop_words import (
    ADMIT,
    CHANGE,
    COLLECTION,
    COUNT,
    HANDLE,
    HARVEST,
    HELD,
    HELD_BYTES,
    HURRY,
    KEPT,
    OWNERS,
    PART,
    PARTS,
    PATIENCE,
    RESTRICT,
    SCOPES,
    SLOT,
    SPARE,
    SPENT,
    TOP_M,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
    K,
)

FAILED, GOES_ON = -1, -2
_PAIR_BYTES = 12  # an id and a distance


@compiled
def enter_scope(loop: Any, entry: Any, number: int, now: int) -> None:
    """A query searches the parts of this scope, as they are now."""
    scope = words(loop[SCOPES] + 8 * SCOPE_WORDS * number, SCOPE_WORDS)
    scope[scopes.USED_NS] = now
    entry[PARTS], entry[COUNT], entry[PART] = scope[scopes.PARTS], scope[scopes.PART_COUNT], 0
    entry[KEPT] = entry[SPENT] = 0
    entry[COLLECTION] = words(entry[PARTS], PART_WORDS)[scopes.INDEX]


@compiled
def admit(loop: Any, entry: Any, number: int) -> Any:
    """Give a query a slot, in which it searches its collection, or the part of its scope whose turn it is. The slot."""
    vector = loop[VECTORS] + number * loop[VECTOR_BYTES]
    asked = (entry[COLLECTION], entry[K], entry[TOP_M], entry[WIDTH], entry[PATIENCE])
    slot = call(loop[ADMIT], (loop[HANDLE], vector, asked[0], asked[1], asked[2], asked[3], asked[4]))
    if slot < 0:
        return slot
    if entry[PARTS]:
        part = words(entry[PARTS] + 8 * PART_WORDS * entry[PART], PART_WORDS)
        if part[scopes.ALLOWED]:
            call(loop[RESTRICT], (loop[HANDLE], slot, part[scopes.ALLOWED], part[scopes.PASSING]))
    if loop[HURRY] and slot >= 0 and entry[at.STAGE] == at.PREFILL:
        call(loop[HURRY], (loop[HANDLE], slot))
    entry[SLOT] = slot
    words(loop[OWNERS] + 8 * slot, 1)[0] = number
    return slot


@compiled
def extends_of(loop: Any, entry: Any, number: int, extends: int) -> Any:
    """A query has ended in its slot, after so many extends there. How many it has taken in all; or GOES_ON, in the next
    part of its scope; or FAILED."""
    if entry[COUNT] == 0:
        return extends
    entry[SPENT] += extends
    if entry[PART] + 1 >= entry[COUNT]:
        return entry[SPENT]
    most = loop[HELD_BYTES] // _PAIR_BYTES
    held, merged = loop[HELD] + number * loop[HELD_BYTES], loop[SPARE] + loop[HELD_BYTES]
    found = call(loop[HARVEST], (loop[HANDLE], entry[SLOT], loop[SPARE], loop[SPARE] + 8 * most))
    call(loop[CHANGE], (loop[HANDLE], entry[SLOT], RELEASE))
    if found < 0:
        return FAILED
    entry[KEPT] = merge(loop[SPARE], found, held, entry[KEPT], most, merged, entry[K])
    instructions.copy(held, merged, 8 * entry[KEPT])
    instructions.copy(held + 8 * most, merged + 8 * most, 4 * entry[KEPT])
    entry[PART] += 1
    entry[COLLECTION] = words(entry[PARTS] + 8 * PART_WORDS * entry[PART], PART_WORDS)[scopes.INDEX]
    return GOES_ON if admit(loop, entry, number) >= 0 else FAILED


@compiled
def harvest(loop: Any, entry: Any, number: int, place: int, most: int) -> Any:
    """Write a query's results: ids at `place`, distances 8·most bytes behind. How many; below 0: the engine failed."""
    target = loop[SPARE] if entry[KEPT] else place
    found = call(loop[HARVEST], (loop[HANDLE], entry[SLOT], target, target + 8 * most))
    if found < 0 or entry[KEPT] == 0:
        return found
    held = loop[HELD] + number * loop[HELD_BYTES]
    return merge(loop[SPARE], found, held, entry[KEPT], most, place, entry[K])


@compiled
def merge(one: int, ones: int, other: int, others: int, most: int, into: int, k: int) -> Any:
    """The k nearest of two lists of results, each nearest first, ties by id: ids at an address, distances 8·most bytes
    behind. How many there are."""
    a, b, ids = words(one, ones), words(other, others), words(into, k)
    near_a, near_b = floats32(one + 8 * most, ones), floats32(other + 8 * most, others)
    distances = floats32(into + 8 * most, k)
    i = j = 0
    while i + j < k and (i < ones or j < others):
        first = j >= others
        if i < ones and j < others:
            first = near_a[i] < near_b[j] or (near_a[i] == near_b[j] and a[i] < b[j])
        if first:
            ids[i + j], distances[i + j] = a[i], near_a[i]
            i += 1
        else:
            ids[i + j], distances[i + j] = b[j], near_b[j]
            j += 1
    return i + j


# ---- the loop's metrics, written by compiled code where the worker's table has them


@compiled
def count(loop: Any, counter: int, amount: float) -> None:
    """Add to the counter of this word of the loop."""
    floats(loop[counter], 1)[0] += amount


@compiled
def observe(loop: Any, histogram: int, value: float) -> None:
    """A value of the histogram of this word and the two behind it."""
    many = loop[histogram + 2]
    edges, buckets = floats(loop[histogram + 1], many), floats(loop[histogram], many + 2)
    place = 0
    while place < many and edges[place] < value:
        place += 1
    buckets[place] += 1.0
    buckets[many + 1] += value
