"""Keys of top_m entries: uint64, sorted ascending.

The upper half holds the distance's bits, mapped so that integers order as the floats do; then follow 31 bits of the
node number and one bit "expanded". So ties of distance are broken by node number, and duplicates of a node with one
distance are adjacent.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import Float, Integer, compiled
from gpu.cpu.simd import (
    KEYS_AT_ONCE,
    bits_float,
    count_below,
    dot_f16,
    dot_f32,
    float_bits,
    l2_f16,
    l2_f32,
    load_u64,
    move,
    shift_in,
    store_u64,
)
from gpu.cpu.tables import F16_L2, F32_DOT, F32_L2

_COMPARED = 64  # keys compared linearly, by registers; a binary search narrows longer lists to this first


@compiled
def key_of(distance: Float, node: Integer) -> Any:
    """Return the key of an unexpanded node."""
    bits = np.uint32(float_bits(np.float32(distance)))
    bits = ~bits if bits & np.uint32(0x80000000) else bits | np.uint32(0x80000000)
    return (np.uint64(bits) << np.uint64(32)) | (np.uint64(node) << np.uint64(1))


@compiled
def distance_of(key: int) -> Any:
    bits = np.uint32(np.uint64(key) >> np.uint64(32))
    bits = bits & np.uint32(0x7FFFFFFF) if bits & np.uint32(0x80000000) else ~bits
    return bits_float(np.uint32(bits))


@compiled
def node_of(key: int) -> Any:
    return (np.uint64(key) >> np.uint64(1)) & np.uint64(0x7FFFFFFF)


@compiled
def insert(keys: npt.NDArray[np.uint64], slot: int, filled: int, top_m: int, key: np.uint64) -> Any:
    """Insert a key into a slot's top_m. Returns its position, or -1 if it is too far or a duplicate."""
    return insert_at(np.uint64(keys.ctypes.data + slot * keys.strides[0]), filled, top_m, key)


@compiled
def insert_at(keys: np.uint64, filled: int, top_m: int, key: np.uint64) -> int:
    """Insert a key into the top_m at an address; see `insert`."""
    if filled == top_m and key >= load_u64(keys + np.uint64(8 * (top_m - 1))):
        return -1
    position, length = 0, filled
    while length > 0:
        half = (length + 1) >> 1
        position += half if load_u64(keys + np.uint64(8 * (position + half - 1))) < key else 0
        length -= half
    here = keys + np.uint64(8 * position)
    if position < filled and load_u64(here) >> np.uint64(1) == key >> np.uint64(1):
        return -1
    move(here + np.uint64(8), here, (min(filled, top_m - 1) - position) * 8)
    store_u64(here, key)
    return position


@compiled
def insert_by_chunks(keys: np.uint64, filled: int, top_m: int, key: np.uint64) -> int:
    """Insert a key as `insert_at` does, into a top_m whose capacity is a multiple of KEYS_AT_ONCE.

    The position of a key is unpredictable, so the mispredicted branches of a binary search and a copy of variable
    length cost more than comparing and moving whole registers of keys.
    """
    if filled == top_m and key >= load_u64(keys + np.uint64(8 * (top_m - 1))):
        return -1
    begin, end = 0, filled
    while end - begin > _COMPARED:
        middle = begin + ((end - begin) // 2 & ~(KEYS_AT_ONCE - 1))
        if load_u64(keys + np.uint64(8 * (middle - 1))) < key:
            begin = middle
        else:
            end = middle
    position = begin
    for chunk in range(begin, end, KEYS_AT_ONCE):
        position += count_below(keys + np.uint64(8 * chunk), key, end - chunk)
    if position < filled and load_u64(keys + np.uint64(8 * position)) >> np.uint64(1) == key >> np.uint64(1):
        return -1
    within = position % KEYS_AT_ONCE
    first = position - within
    shift_in(keys + np.uint64(8 * first), within, key, (min(filled, top_m - 1) - first) // KEYS_AT_ONCE + 1)
    return position


# ---- distances between a prepared query and a stored row of any element type


@compiled
def row_distance(kind: int, row: np.uint64, query: np.uint64, lanes: int) -> Any:
    """Return the distance between a query and the row at an address: squared L2, or minus the dot product."""
    if kind == F32_L2:
        return l2_f32(row, query, lanes)
    if kind == F32_DOT:
        return -dot_f32(row, query, lanes)
    return l2_f16(row, query, lanes) if kind == F16_L2 else -dot_f16(row, query, lanes)


@compiled
def may_be_result(allowed: int, node: Integer) -> Any:
    """Return whether a node's bit is set in the bitmap at address `allowed`; always True without one (0)."""
    if allowed == 0:
        return True
    word = load_u64(np.uint64(allowed + 8 * (np.int64(node) >> 6)))
    return (word >> np.uint64(np.int64(node) & 63)) & np.uint64(1) != 0
