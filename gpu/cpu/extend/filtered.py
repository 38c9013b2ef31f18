"""Filtered search: a graph search with a longer top_m, or an exact scan of the allowed rows.

A graph search traverses all rows and returns the allowed ones. Its top_m is scaled up by the inverse selectivity of the
filter, so that it holds as many allowed entries as an unfiltered search holds entries. It stops as soon as it does,
which is early when the query's neighbours pass the filter more often than the average row. Scanning n rows costs about
as much as expanding n / SCAN_ROWS_PER_ENTRY entries of top_m (measured in docs/benchmarks.md).

A filter may exclude the query's neighbourhood. Then the list fills with rows that do not pass, and the few that do are
not the nearest ones: the walk has to leave the neighbourhood, which best-first search does not. It shows in the share
of the walked rows that pass, which is below the filter's. The slot falls back to a scan then (`found_too_few`): of
codes (`gpu.cpu.extend.code_scan`) where that is faster than comparing the allowed rows.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import Integer, compiled
from gpu.cpu.extend.keys import insert, key_of, may_be_result, node_of, row_distance
from gpu.cpu.fast_scan import lowest_bit
from gpu.cpu.queries import QUERY_ROW
from gpu.cpu.simd import load_u64, prefetch
from gpu.cpu.tables import Batch, Slot

SCAN_ROWS_PER_ENTRY = 5
SCAN_ROWS_PER_ENTRY_BATCHED = 16
"""The same for a batch of queries with one filter, which share the rows that they read."""
MIN_BATCH = 16  # queries, from which SCAN_ROWS_PER_ENTRY_BATCHED applies
SCAN_ROWS_PER_EXTEND = 128  # rows that one slot scans in an extend
SCAN_CODES_PER_ROW = 16  # rows whose codes are read in the time that comparing one row takes
WALK, COMPARE, ESTIMATE, VERIFY = range(4)  # `Slot.scanning`: no scan, one of rows, the two passes of one of codes
PREFETCHED_BYTES = 2048  # before the row that is prefetched next
_LONGEST = 2  # times the longest list: beyond that, a graph search with the longest list would find too few rows
_DUPLICATES = 2
SIGMAS_COMPARE, SIGMAS_CODES = 4.0, 1.75
"""Standard deviations by which the share of walked rows that pass is below the filter's if a search falls back to a
scan, of rows or of codes: chance makes that of few searches, so that their scans take little time on average."""
_EMPTY = np.uint32(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def filtered_top_m(
    top_m: Integer, allowed_count: int, size: int, longest: int, rows_a_step: int = SCAN_ROWS_PER_ENTRY
) -> int:
    """Return the top_m, at most `longest`, with which a filtered search has the recall of an unfiltered one of `top_m`;
    0 if scanning the `allowed_count` of `size` rows is faster."""
    if allowed_count <= 0:
        return 0
    required = (top_m * size + allowed_count - 1) // allowed_count
    length = min(required, longest)
    return 0 if required > _LONGEST * longest or allowed_count <= rows_a_step * length else length


@compiled
def set_filter(batch: Batch, slot: int, allowed: int, allowed_count: int, bits: int, length: int) -> None:
    """Set the filter of a slot that was just admitted.

    length: top_m of the graph search; 0: scan the allowed rows. bits: of the visited table for this top_m.
    """
    search = batch.slots[slot]
    search.allowed, search.allowed_count = allowed, allowed_count
    if length == 0:
        search.scanning = COMPARE
        return
    search.min_allowed, search.top_m = search.top_m, length
    if bits > search.visited_bits:
        search.visited_bits = bits
        batch.visited[slot, : 1 << bits] = _EMPTY


@compiled
def count_parent(batch: Batch, slot: int, node: Integer) -> None:
    """Count a parent of a filtered search, and whether it passes the filter."""
    search = batch.slots[slot]
    if search.min_allowed != 0:
        search.walked_parents += 1
        search.allowed_parents += may_be_result(search.allowed, node)


@compiled
def has_min_allowed(batch: Batch, slot: int) -> bool:
    """Return whether MIN_ALLOWED allowed entries precede a slot's cursor."""
    search = batch.slots[slot]
    left = search.min_allowed
    # A parent has up to _DUPLICATES entries in top_m: with so few allowed parents the count cannot reach MIN_ALLOWED.
    if _DUPLICATES * search.allowed_parents < left or left == 0:
        return False
    for i in range(search.cursor):
        left -= may_be_result(search.allowed, node_of(batch.keys[slot, i]))
        if left == 0:
            return True
    return False


@compiled
def found_too_few(search: Slot, count: int, walked: int, passing: int, size: int, sigmas: float) -> bool:
    """Return whether a graph search that ended with `count` allowed rows is to be replaced by a scan.

    That is if there are more to return, or if only `passing` of the `walked` rows passed, `sigmas` standard deviations
    below what a filter without correlation lets pass.
    """
    if count < min(search.k, search.allowed_count):
        return True
    share = search.allowed_count / size
    expected = walked * share
    missing = expected - passing
    return missing > 0 and missing * missing > sigmas * sigmas * expected * (1 - share)


@compiled
def fall_back_to_scan(batch: Batch, slot: int, count: int) -> bool:
    """Switch a finished graph search to a scan if it has found too few rows. Returns whether it did."""
    search = batch.slots[slot]
    collection = batch.collections[search.collection]
    coded = collection.scan != 0
    sigmas, size = SIGMAS_CODES if coded else SIGMAS_COMPARE, collection.size
    if not found_too_few(search, count, search.walked_parents, search.allowed_parents, size, sigmas):
        return False
    search.scanning = ESTIMATE if coded and SCAN_CODES_PER_ROW * search.allowed_count > size else COMPARE
    search.cursor = search.filled = search.scored = 0
    return True


@compiled
def extend_scan(batch: Batch, active: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> int:
    """Make one extend of scanning slots. Writes finished slots to `finished` and returns their number."""
    slots = batch.slots
    done = 0
    for slot in active:
        slots[slot].extends += 1
        if scan_rows(batch, slot):
            finished[done] = slot
            done += 1
    return done


@compiled
def scan_rows(batch: Batch, slot: int) -> Any:
    """Score the next rows of a slot's scan. Returns whether the scan is complete."""
    search, collection = batch.slots[slot], batch.collections[batch.slots[slot].collection]
    coded = collection.blocks != 0
    keys = batch.exact if coded else batch.keys
    rows, row_bytes = collection.rows, collection.row_bytes
    lanes, kind = collection.lanes, collection.kind
    query = np.uint64(search.query + QUERY_ROW)
    allowed, size, k, filled = search.allowed, collection.size, search.k, search.scored if coded else search.filled
    row = ahead = next_allowed_row(allowed, search.cursor, size)
    for _ in range(PREFETCHED_BYTES // row_bytes):
        ahead = next_allowed_row(allowed, ahead + 1, size)
    left = SCAN_ROWS_PER_EXTEND
    while row < size and left > 0:
        ahead = next_allowed_row(allowed, ahead + 1, size)
        if ahead < size:
            for offset in range(0, row_bytes, 64):
                prefetch(np.uint64(rows + ahead * row_bytes + offset))
        distance = row_distance(kind, np.uint64(rows + row * row_bytes), query, lanes)
        if insert(keys, slot, filled, k, key_of(distance, row)) >= 0:
            filled = min(filled + 1, k)
        row = next_allowed_row(allowed, row + 1, size)
        left -= 1
    search.cursor = row
    if coded:
        search.scored = filled
    else:
        search.filled = filled
    return row >= size


@compiled
def next_allowed_row(allowed: int, row: int, size: int) -> Any:
    """Return the first allowed row at or after `row`; `size` or more if there is none."""
    while row < size:
        word = load_u64(np.uint64(allowed + 8 * (row >> 6))) if allowed != 0 else _ALL
        word >>= np.uint64(row & 63)
        if word != 0:
            return row + lowest_bit(word)
        row = (row | 63) + 1
    return row
