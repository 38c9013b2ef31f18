"""The keys of a top_m: uint64, in ascending order.

The distance's bits stand in the upper half, mapped so that their order as integers is the order of the floats, then the
node's 31 bits, then one bit: "has been a parent". Ties of distance are so broken by node number, and a node that comes
a second time is found beside itself.
"""

from typing import Any

import numpy as np

from gpu.compiled import compiled
from gpu.cpu.simd import bits_float, float_bits, load_u64, move, store_u64


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
def insert(keys, slot, filled, top_m, key):  # type: ignore[no-untyped-def]
    """Put a key into a slot's sorted top_m. Returns its position, or -1 if it is too far or there already."""
    return insert_at(np.uint64(keys.ctypes.data + slot * keys.strides[0]), filled, top_m, key)


@compiled
def insert_at(keys, filled, top_m, key):  # type: ignore[no-untyped-def]
    """`insert` into the top_m at an address."""
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
