"""Searches of which only some rows may be results: each of these is compared with the query, or the graph is walked.

A walk goes over all rows and keeps those that may be results. Its list is longer by as much as these are fewer, so that
it holds as many of them as it would if all rows were; it ends when it does, before its list was gone through where more
of the query's neighbours pass than of all rows. Comparing n rows costs about as much as walking over
n / ROWS_A_STEP entries of the list: docs/benchmarks.md has how that was measured. Where a walk has found fewer than
there are, the rows are compared after all.
"""

import numpy as np

from gpu.compiled import compiled
from gpu.cpu import tables as at
from gpu.cpu.extend.keys import insert, key_of, may_be_result, node_of, row_distance
from gpu.cpu.scan import lowest_bit
from gpu.cpu.simd import load_u64, prefetch

ROWS_A_STEP = 5
ROWS_A_STEP_TOGETHER = 16
"""The same of many queries with one filter in one call: they share the rows that they are compared with."""
TOGETHER = 16  # queries, at least
ROWS_AN_EXTEND = 128  # compared before other slots have their turn
_LONGEST = 2  # times the longest list: a walk that should have a longer one than this would find too little
_DOUBLES = 2
_EMPTY = np.uint32(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def walk_length(top_m, passing, size, longest, rows_a_step=ROWS_A_STEP):  # type: ignore[no-untyped-def]
    """top_m of a walk that finds as well as one of `top_m` would if all of `size` rows might be results; `longest` at
    most. 0: compare each of the `passing` rows."""
    if passing <= 0:
        return 0
    wanted = (top_m * size + passing - 1) // passing
    length = min(wanted, longest)
    return 0 if wanted > _LONGEST * longest or passing <= rows_a_step * length else length


@compiled
def restrict(batch, slot, allowed, passing, bits, length):  # type: ignore[no-untyped-def]
    """Let a slot that was just admitted find only rows whose bits are set: by a walk of this length, or by comparing.

    bits: of the visited table, for a walk of this length.
    """
    line = batch.slots[slot]
    line[at.ALLOWED], line[at.PASSING] = allowed, passing
    if length == 0:
        line[at.SCANNING] = 1
        return
    line[at.ENOUGH], line[at.TOP_M] = line[at.TOP_M], length
    if bits > line[at.VISITED_BITS]:
        line[at.VISITED_BITS] = bits
        batch.visited[slot, : 1 << bits] = _EMPTY


@compiled
def count_parent(batch, slot, node):  # type: ignore[no-untyped-def]
    """A slot's walk goes on from this node."""
    line = batch.slots[slot]
    if line[at.ENOUGH] != 0:
        line[at.PASSED] += may_be_result(line[at.ALLOWED], node)


@compiled
def found_enough(batch, slot):  # type: ignore[no-untyped-def]
    """Whether as many entries that may be results lie before a slot's cursor as its walk is to find."""
    line = batch.slots[slot]
    left = line[at.ENOUGH]
    if _DOUBLES * line[at.PASSED] < left or left == 0:  # not worth a look: entries may be doubles of one parent
        return False
    for i in range(line[at.CURSOR]):
        left -= may_be_result(line[at.ALLOWED], node_of(batch.keys[slot, i]))
        if left == 0:
            return True
    return False


@compiled
def compare_instead(batch, slot, found):  # type: ignore[no-untyped-def]
    """A walk has ended with so many results. Whether the rows are now compared, because that is too few."""
    line = batch.slots[slot]
    if line[at.PASSING] == 0 or found >= min(line[at.K], line[at.PASSING]):
        return False
    line[at.SCANNING] = 1
    line[at.CURSOR] = line[at.FILLED] = line[at.SCORED] = 0
    return True


@compiled
def extend_comparing(batch, active, finished):  # type: ignore[no-untyped-def]
    """One extend of slots that compare rows. Writes those that are done to `finished`; returns how many."""
    slots = batch.slots
    done = 0
    for slot in active:
        slots[slot, at.EXTENDS] += 1
        if compare(batch, slot):
            finished[done] = slot
            done += 1
    return done


@compiled
def compare(batch, slot):  # type: ignore[no-untyped-def]
    """Compare the next rows of a slot with its query, in full precision. Whether they were the last."""
    line, about = batch.slots[slot], batch.collections[batch.slots[slot, at.COLLECTION]]
    coded = about[at.BLOCKS] != 0
    keys, count = (batch.exact, at.SCORED) if coded else (batch.keys, at.FILLED)
    rows, row_bytes, lanes, kind = about[at.ROWS], about[at.ROW_BYTES], about[at.LANES], about[at.KIND]
    query = np.uint64(line[at.QUERY] + about[at.QUERY_ROW])
    if about[at.FULL] != 0:
        rows, row_bytes, lanes = about[at.FULL], about[at.FULL_BYTES], about[at.FULL_LANES]
        kind = at.F32_DOT if kind & 1 else at.F32_L2
        query = np.uint64(line[at.QUERY] + about[at.QUERY_FULL])
    allowed, size, k, filled = line[at.ALLOWED], about[at.SIZE], line[at.K], line[count]
    row = following(allowed, line[at.CURSOR], size)
    left = ROWS_AN_EXTEND
    while row < size and left > 0:
        next_row = following(allowed, row + 1, size)
        if next_row < size:
            for offset in range(0, row_bytes, 64):
                prefetch(np.uint64(rows + next_row * row_bytes + offset))
        distance = row_distance(kind, np.uint64(rows + row * row_bytes), query, lanes, np.float32(1))
        if insert(keys, slot, filled, k, key_of(distance, row)) >= 0:
            filled = min(filled + 1, k)
        row = next_row
        left -= 1
    line[at.CURSOR], line[count] = row, filled
    return row >= size


@compiled
def following(allowed, row, size):  # type: ignore[no-untyped-def]
    """The first row from `row` on whose bit is set; `size` or more if there is none."""
    while row < size:
        word = load_u64(np.uint64(allowed + 8 * (row >> 6))) if allowed != 0 else _ALL
        word >>= np.uint64(row & 63)
        if word != 0:
            return row + lowest_bit(word)
        row = (row | 63) + 1
    return row
