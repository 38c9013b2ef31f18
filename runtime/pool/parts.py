"""A query's way through the parts of its scope, one after the other in its one slot. Compiled.

So the policy sees a query with several parts as what it is, one slot for as long as all of them take, and learns how
many extends that is. Their results are merged as the parts end.
"""

from typing import Any

from gpu.engine import RELEASE
from ipc.memory import instructions
from ipc.memory.instructions import call, floats32, words
from runtime.pool import loop_words as of
from runtime.pool import tables as at
from runtime.pool.collections import scopes
from runtime.pool.collections.scopes import PART_WORDS, SCOPE_WORDS
from runtime.pool.compiled import compiled

FAILED, GOES_ON = -1, -2
_PAIR_BYTES = 12  # an id and a distance


@compiled
def enter_scope(loop: Any, entry: Any, number: int, now: int) -> None:
    """A query searches the parts of this scope, as they are now."""
    scope = words(loop[of.SCOPES] + 8 * SCOPE_WORDS * number, SCOPE_WORDS)
    scope[scopes.USED_NS] = now
    entry[of.PARTS], entry[of.COUNT], entry[of.PART] = scope[scopes.PARTS], scope[scopes.PART_COUNT], 0
    entry[of.KEPT] = entry[of.SPENT] = 0
    entry[of.COLLECTION] = words(entry[of.PARTS], PART_WORDS)[scopes.INDEX]


@compiled
def admit(loop: Any, entry: Any, number: int) -> Any:
    """Give a query a slot, in which it searches its collection, or the part of its scope whose turn it is. The slot."""
    vector = loop[of.VECTORS] + number * loop[of.VECTOR_BYTES]
    asked = (entry[of.COLLECTION], entry[of.K], entry[of.TOP_M], entry[of.WIDTH], entry[of.PATIENCE])
    slot = call(loop[of.ADMIT], (loop[of.HANDLE], vector, asked[0], asked[1], asked[2], asked[3], asked[4]))
    if slot < 0:
        return slot
    if entry[of.PARTS]:
        part = words(entry[of.PARTS] + 8 * PART_WORDS * entry[of.PART], PART_WORDS)
        if part[scopes.ALLOWED]:
            call(loop[of.RESTRICT], (loop[of.HANDLE], slot, part[scopes.ALLOWED], part[scopes.PASSING]))
    if loop[of.HURRY] and entry[at.STAGE] == at.PREFILL:
        call(loop[of.HURRY], (loop[of.HANDLE], slot))
    entry[of.SLOT] = slot
    words(loop[of.OWNERS] + 8 * slot, 1)[0] = number
    return slot


@compiled
def extends_of(loop: Any, entry: Any, number: int, extends: int) -> Any:
    """A query has ended in its slot, after so many extends there. How many it has taken in all; or GOES_ON, in the next
    part of its scope; or FAILED."""
    if entry[of.COUNT] == 0:
        return extends
    entry[of.SPENT] += extends
    if entry[of.PART] + 1 >= entry[of.COUNT]:
        return entry[of.SPENT]
    most = loop[of.HELD_BYTES] // _PAIR_BYTES
    held, merged = loop[of.HELD] + number * loop[of.HELD_BYTES], loop[of.SPARE] + loop[of.HELD_BYTES]
    found = call(loop[of.HARVEST], (loop[of.HANDLE], entry[of.SLOT], loop[of.SPARE], loop[of.SPARE] + 8 * most))
    call(loop[of.CHANGE], (loop[of.HANDLE], entry[of.SLOT], RELEASE))
    if found < 0:
        return FAILED
    entry[of.KEPT] = merge(loop[of.SPARE], found, held, entry[of.KEPT], most, merged, entry[of.K])
    instructions.copy(held, merged, 8 * entry[of.KEPT])
    instructions.copy(held + 8 * most, merged + 8 * most, 4 * entry[of.KEPT])
    entry[of.PART] += 1
    entry[of.COLLECTION] = words(entry[of.PARTS] + 8 * PART_WORDS * entry[of.PART], PART_WORDS)[scopes.INDEX]
    return GOES_ON if admit(loop, entry, number) >= 0 else FAILED


@compiled
def harvest(loop: Any, entry: Any, number: int, place: int, most: int) -> Any:
    """Write a query's results: ids at `place`, distances 8·most bytes behind. How many; below 0: the engine failed."""
    target = loop[of.SPARE] if entry[of.KEPT] else place
    found = call(loop[of.HARVEST], (loop[of.HANDLE], entry[of.SLOT], target, target + 8 * most))
    if found < 0 or entry[of.KEPT] == 0:
        return found
    held = loop[of.HELD] + number * loop[of.HELD_BYTES]
    return merge(loop[of.SPARE], found, held, entry[of.KEPT], most, place, entry[of.K])


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
