"""Filtered search: a graph search with a longer top_m, or an exact scan of the allowed rows.

A graph search traverses all rows and returns the allowed ones. Its top_m is scaled up by the inverse selectivity of the
filter, so that it holds as many allowed entries as an unfiltered search holds entries. It stops as soon as it does,
which is early when the query's neighbours pass the filter more often than the average row. Scanning n rows costs about
as much as expanding n / SCAN_ROWS_PER_ENTRY entries of top_m (measured in docs/benchmarks.md). If a graph search finds
fewer allowed rows than it should, the slot falls back to the scan.
"""

import numpy as np

from gpu.compiled import compiled
from gpu.cpu import tables as at
from gpu.cpu.extend.keys import insert, key_of, may_be_result, node_of, row_distance
from gpu.cpu.fast_scan import lowest_bit
from gpu.cpu.simd import load_u64, prefetch

SCAN_ROWS_PER_ENTRY = 5
SCAN_ROWS_PER_ENTRY_BATCHED = 16
"""The same of many queries with one filter in one call: they share the rows that they are compared with."""
MIN_BATCH = 16  # queries, at least
SCAN_ROWS_PER_EXTEND = 128  # compared before other slots have their turn
_LONGEST = 2  # times the longest list: a walk that should have a longer one than this would find too little
_DOUBLES = 2
_EMPTY = np.uint32(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def filtered_top_m(top_m, allowed_count, size, longest, rows_a_step=SCAN_ROWS_PER_ENTRY):  # type: ignore[no-untyped-def]
    """top_m of a walk that finds as well as one of `top_m` would if all of `size` rows might be results; `longest` at
    most. 0: compare each of the `allowed_count` rows."""
    if allowed_count <= 0:
        return 0
    wanted = (top_m * size + allowed_count - 1) // allowed_count
    length = min(wanted, longest)
    return 0 if wanted > _LONGEST * longest or allowed_count <= rows_a_step * length else length


@compiled
def set_filter(batch, slot, allowed, allowed_count, bits, length):  # type: ignore[no-untyped-def]
    """Let a slot that was just admitted find only rows whose bits are set: by a walk of this length, or by comparing.

    bits: of the visited table, for a walk of this length.
    """
    line = batch.slots[slot]
    line[at.ALLOWED], line[at.ALLOWED_COUNT] = allowed, allowed_count
    if length == 0:
        line[at.SCANNING] = 1
        return
    line[at.MIN_ALLOWED], line[at.TOP_M] = line[at.TOP_M], length
    if bits > line[at.VISITED_BITS]:
        line[at.VISITED_BITS] = bits
        batch.visited[slot, : 1 << bits] = _EMPTY


@compiled
def count_parent(batch, slot, node):  # type: ignore[no-untyped-def]
    """A slot's walk goes on from this node."""
    line = batch.slots[slot]
    if line[at.MIN_ALLOWED] != 0:
        line[at.ALLOWED_PARENTS] += may_be_result(line[at.ALLOWED], node)


@compiled
def has_min_allowed(batch, slot):  # type: ignore[no-untyped-def]
    """Whether as many entries that may be results lie before a slot's cursor as its walk is to find."""
    line = batch.slots[slot]
    left = line[at.MIN_ALLOWED]
    if (
        _DOUBLES * line[at.ALLOWED_PARENTS] < left or left == 0
    ):  # not worth a look: entries may be doubles of one parent
        return False
    for i in range(line[at.CURSOR]):
        left -= may_be_result(line[at.ALLOWED], node_of(batch.keys[slot, i]))
        if left == 0:
            return True
    return False


@compiled
def fall_back_to_scan(batch, slot, found):  # type: ignore[no-untyped-def]
    """A walk has ended with so many results. Whether the rows are now compared, because that is too few."""
    line = batch.slots[slot]
    if line[at.ALLOWED_COUNT] == 0 or found >= min(line[at.K], line[at.ALLOWED_COUNT]):
        return False
    line[at.SCANNING] = 1
    line[at.CURSOR] = line[at.FILLED] = line[at.SCORED] = 0
    return True


@compiled
def extend_scan(batch, active, finished):  # type: ignore[no-untyped-def]
    """One extend of slots that compare rows. Writes those that are done to `finished`; returns how many."""
    slots = batch.slots
    done = 0
    for slot in active:
        slots[slot, at.EXTENDS] += 1
        if scan_rows(batch, slot):
            finished[done] = slot
            done += 1
    return done


@compiled
def scan_rows(batch, slot):  # type: ignore[no-untyped-def]
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
    row = next_allowed_row(allowed, line[at.CURSOR], size)
    left = SCAN_ROWS_PER_EXTEND
    while row < size and left > 0:
        next_row = next_allowed_row(allowed, row + 1, size)
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
def next_allowed_row(allowed, row, size):  # type: ignore[no-untyped-def]
    """The first row from `row` on whose bit is set; `size` or more if there is none."""
    while row < size:
        word = load_u64(np.uint64(allowed + 8 * (row >> 6))) if allowed != 0 else _ALL
        word >>= np.uint64(row & 63)
        if word != 0:
            return row + lowest_bit(word)
        row = (row | 63) + 1
    return row
